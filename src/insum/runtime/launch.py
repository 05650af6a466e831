"""Generated source -> callable kernel. The only module that imports triton, and only when a kernel
is wanted.

It is also what compiling workers run, as a file of its own: nothing of insum, and no torch, is
imported here at run time.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from insum.codegen.emit import Kernel

#: Kernels that were loaded in this process; a test counts them.
loaded_kernels: dict[str, Any] = {}
_lock = threading.Lock()


@functools.cache
def available() -> str:
    """Empty when generated kernels can be compiled here, else the reason why not."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"triton is not installed ({error})"
    return ""


@functools.cache
def interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def source_folder() -> Path:
    """Where kernels are written: a jitted function must live in a file."""
    wanted = os.environ.get("INSUM_CACHE_DIR") or os.path.join(
        os.path.expanduser("~"), ".cache", "insum"
    )
    folder = Path(wanted) / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f".probe-{os.getpid()}").touch()
        (folder / f".probe-{os.getpid()}").unlink()
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="insum-"))
    return folder


def load(kernel: Kernel, header: str) -> Any:
    """The jitted function for a source text, loaded once per process."""
    key = hashlib.sha256(kernel.source.encode()).hexdigest()[:20]
    with _lock:
        function = loaded_kernels.get(key)
        if function is None:
            function = loaded_kernels[key] = getattr(_import(key, header, kernel), kernel.name)
    return function


def forget() -> None:
    """Let go of every loaded kernel, so that the next call loads and compiles anew, as the first of
    a process does.
    """
    with _lock:
        loaded_kernels.clear()


def kind_of(*numbers: int) -> tuple[tuple[bool, bool, bool], ...]:
    """What Triton compiles a kernel for when it is passed these numbers: where this is equal, so is
    the kernel.
    """
    return tuple((n == 1, n % 16 == 0, n >= 2**31) for n in numbers)


def runner_of(compiled: Any, programs: int) -> Callable[[Sequence[Any]], None]:
    """A compiled kernel as a function of the list of its arguments, without what Triton does at
    every launch for hooks that nobody has set.
    """
    plain: Callable[..., None] = compiled[(programs, 1, 1)]
    if not _launches_as_known():
        return lambda arguments: plain(*arguments)
    from triton import knobs
    from triton.runtime import driver

    run, function, metadata, hooks = (
        compiled.run,
        compiled.function,
        compiled.packed_metadata,
        knobs.runtime,
    )
    device, stream_of = driver.active.get_current_device(), driver.active.get_current_stream
    launch, cooperative, dependent = _without_scratch(run)

    def direct(arguments: Sequence[Any]) -> None:
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            plain(*arguments)
        elif launch is None:
            run(programs, 1, 1, stream_of(device), function, metadata, None, None, None, *arguments)
        else:
            launch(
                programs,
                1,
                1,
                stream_of(device),
                function,
                cooperative,
                dependent,
                None,
                None,
                metadata,
                None,
                None,
                None,
                *arguments,
            )

    return direct


def _without_scratch(launcher: Any) -> tuple[Callable[..., None] | None, Any, Any]:
    """What Triton's launcher calls in the end, where it is known to call it so and the kernel needs
    no scratch memory.
    """
    with contextlib.suppress(AttributeError, TypeError):
        known: Any = type(launcher)
        if (
            _calls_as_known(known)
            and not launcher.global_scratch_size
            and not launcher.profile_scratch_size
        ):
            return launcher.launch, launcher.launch_cooperative_grid, launcher.launch_pdl
    return None, None, None


@functools.cache
def _calls_as_known(launcher: Any) -> bool:
    with contextlib.suppress(AttributeError, OSError, TypeError):
        text = " ".join(inspect.getsource(launcher.__call__).split())
        known = (
            "self.launch(gridX, gridY, gridZ, stream, function, self.launch_cooperative_grid, "
            "self.launch_pdl, global_scratch, profile_scratch, *args)"
        )
        return known in text
    return False


@functools.cache
def _launches_as_known() -> bool:
    """Whether this Triton launches in the way that `runner_of` shortens."""
    try:
        from triton import knobs
        from triton.compiler import CompiledKernel

        text = " ".join(inspect.getsource(CompiledKernel.__getitem__).split())
        known = (
            "self.run(grid[0], grid[1], grid[2], stream, self.function, "
            "self.packed_metadata, launch_metadata,"
        )
        return known in text and all(
            hasattr(hook, "calls")
            for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
        )
    except (AttributeError, ImportError, OSError, TypeError):
        return False


def _import(key: str, header: str, kernel: Kernel) -> ModuleType:
    path = source_path(key)
    if not path.exists():
        text = f"{header}\nimport triton\nimport triton.language as tl\n\n\n{kernel.source}"
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(text)
        temporary.replace(path)  # atomic, so that another process never reads half a file
    return _import_file(path)


def source_path(key: str) -> Path:
    return source_folder() / f"k{key}.py"


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"insum_generated.{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# --- compiling ahead, in other processes ----------------------------------------------------------

#: One kernel to compile: the file of its source, its name, its arguments as `described`, warps and
#: stages.
Job: TypeAlias = tuple[str, str, list[list[Any]], int, int]
_REPLY = "insum-worker "
_WORKER = "import runpy, sys; runpy.run_path(sys.argv[1])['serve']()"


def job(function: Any, name: str, arguments: Sequence[Any], warps: int, stages: int) -> Job:
    """What a worker needs to compile a kernel just as a launch with these arguments would."""
    return (
        inspect.getsourcefile(function.fn) or "",
        name,
        [_described(a) for a in arguments],
        warps,
        stages,
    )


def _described(value: Any) -> list[Any]:
    return (
        ["pointer", str(value.dtype).removeprefix("torch.")]
        if hasattr(value, "data_ptr")
        else ["number", value]
    )


def current_target() -> list[Any]:
    """What kernels are compiled for here: backend, architecture, lanes of a warp."""
    from triton.runtime import driver

    target = driver.active.get_current_target()
    return [target.backend, target.arch, target.warp_size]


def current_device() -> int:
    from triton.runtime import driver

    return int(driver.active.get_current_device())


def compile_ahead(
    jobs: Sequence[Job],
    target: Sequence[Any],
    *,
    workers: int = 0,
    seconds: float = 300,
    done: Callable[[], None] = lambda: None,
) -> list[str]:
    """Compile kernels in worker processes, so that Triton's cache on disk has them; for each job ''
    or what went wrong.

    Only a head start: what a worker could not do is compiled, or fails, at the kernel's first
    launch.
    """
    workers = min(workers or os.cpu_count() or 1, len(jobs), 16)
    answers = ["not compiled"] * len(jobs)
    running = (
        [
            _start(target, [(i, jobs[i]) for i in range(first, len(jobs), workers)])
            for first in range(workers)
        ]
        if workers > 1
        else []
    )
    threads = [
        threading.Thread(target=_listen, args=(process, answers, done), daemon=True)
        for process in running
    ]
    end = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread, process in zip(threads, running, strict=True):
        thread.join(max(0.0, end - time.monotonic()))
        if process.poll() is None:
            process.kill()
        process.wait()
    return answers


def _start(target: Sequence[Any], jobs: Sequence[tuple[int, Job]]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-c", _WORKER, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as stream:
        stream.write(json.dumps({"target": list(target), "jobs": list(jobs)}))
    return process


def _listen(process: subprocess.Popen[str], answers: list[str], done: Callable[[], None]) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            if line.startswith(_REPLY):
                position, answer = json.loads(line.removeprefix(_REPLY))
                answers[position] = answer
                done()


def serve() -> None:
    """The worker: compile what standard input asks for, as if the device were here; torch is kept
    out, for it takes seconds to import.
    """
    asked = json.loads(sys.stdin.read())
    sys.modules["torch"] = None  # type: ignore[assignment]
    _pretend(asked["target"])
    for position, work in asked["jobs"]:
        try:
            _compile_job(work)
            answer = ""
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"[:300]
        print(_REPLY + json.dumps([position, answer]), flush=True)


def _compile_job(work: Job) -> None:
    from triton.runtime.jit import MockTensor

    path, name, arguments, warps, stages = work
    function = getattr(_import_file(Path(path)), name)
    values = [MockTensor(value) if kind == "pointer" else value for kind, value in arguments]
    function.warmup(*values, grid=(1,), num_warps=warps, num_stages=stages)


def _pretend(target: Sequence[Any]) -> None:
    """Let Triton see a device that is not opened: compiling needs no more than its name."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Absent:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> Any:
            return GPUTarget(*target)

    driver.set_active(Absent())


# --- compiling without a device -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the compiler says of a kernel for one target, without running it."""

    target: str
    assembly: dict[str, str]
    shared: int
    registers: int
    stack: int  # bytes of local memory: above zero, registers were spilled

    def uses(self, instruction: str) -> bool:
        return any(instruction in text for text in self.assembly.values())


#: Targets that continuous integration compiles for: Ampere, Hopper, Blackwell and CDNA 3.
TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
_POINTER = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
_POINTER |= {
    "int1": "i1",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
}


def compile_for(
    function: Any, arguments: Sequence[Any], target: str, *, warps: int, stages: int
) -> Compiled:
    """Compile a kernel for a target that need not be here, specialised as a launch with these
    arguments would be.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    constants: dict[str, int] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for position, (name, value) in enumerate(zip(function.arg_names, arguments, strict=True)):
        kind, divisible = argument_kind(value)
        signature[name] = kind
        if kind == "constexpr":
            constants[name] = value
        elif divisible:
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    backend, arch, width = TARGETS[target]
    binary = triton.compile(
        source,
        target=GPUTarget(backend, arch, width),
        options={"num_warps": warps, "num_stages": stages},
    )
    registers, stack = _resources(binary, target)
    texts = {key: text for key, text in binary.asm.items() if isinstance(text, str)}
    return Compiled(target, texts, binary.metadata.shared, registers, stack)


def argument_kind(value: Any) -> tuple[str, bool]:
    """Triton's type of an argument, and whether it is specialised as a multiple of 16."""
    if hasattr(value, "data_ptr"):
        return "*" + _POINTER[str(value.dtype).removeprefix("torch.").replace("bool", "int1")], True
    if isinstance(value, float):
        return "fp32", False
    if value == 1:
        return "constexpr", False
    return ("i32" if -(2**31) <= value < 2**31 else "i64"), value % 16 == 0


def _resources(binary: Any, target: str) -> tuple[int, int]:
    """Registers per thread and bytes of local memory, read from the binary."""
    if target.startswith("gfx"):
        text = binary.asm["amdgcn"]
        found = {
            key: re.search(rf"\.{key}:\s+(\d+)", text)
            for key in ("vgpr_count", "private_segment_fixed_size")
        }
        return tuple(int(m.group(1)) if m else 0 for m in found.values())  # type: ignore[return-value]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        report = subprocess.run(
            [_cuobjdump(), "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    registers, stack = re.search(r"REG:(\d+)", report), re.search(r"STACK:(\d+)", report)
    return int(registers.group(1)) if registers else 0, int(stack.group(1)) if stack else 0


def _cuobjdump() -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")
