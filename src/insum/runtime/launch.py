"""Generated source -> callable kernel. The only module that imports triton, and only when a kernel
is wanted.

It is also what compiling workers run, as a file of its own: nothing of insum, and no torch, is
imported here at run time.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import linecache
import logging
import os
import re
import stat
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

log = logging.getLogger("insum")

#: Kernels that were loaded in this process, by the hash of their text; a test counts them.
loaded_kernels: dict[str, Any] = {}
#: Texts, and launchers of compiled kernels, that are kept.
MOST_LOADED = 4096
_forgotten = 0  # kernels that were loaded and let go of
_compiled = 0
_lock = threading.Lock()
# as `compat.calls.renew_in_children`, which compiling workers do not have
if hasattr(os, "register_at_fork") and hasattr(_lock, "_at_fork_reinit"):
    os.register_at_fork(after_in_child=_lock._at_fork_reinit)


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


def source_folder() -> Path:
    """Where kernels are written, for compiling workers, for later processes and to be read."""
    return cache_folder() / "kernels"


def cache_folder() -> Path:
    """Where kernels and tuned choices are kept: ``INSUM_CACHE_DIR``, else ``~/.cache/insum``, else
    a temporary folder.
    """
    wanted = os.environ.get("INSUM_CACHE_DIR")
    return _usable(wanted or os.path.join(os.path.expanduser("~"), ".cache", "insum"))


@functools.cache
def _usable(wanted: str) -> Path:
    """The folder that is wanted; one of our own among the temporary files where that cannot be
    written, or where other users can write to it: what is kept there is run.
    """
    why = _unusable(Path(wanted))
    if not why:
        return _tidied(Path(wanted))
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    try:
        other = Path(tempfile.gettempdir()) / f"insum-{user}"
        if _unusable(other):  # somebody else's, say, who was here first
            other = Path(tempfile.mkdtemp(prefix="insum-"))
    except OSError:  # nothing can be written anywhere
        log.warning("insum: the cache folder %s %s; nothing is kept on disk", wanted, why)
        return Path(wanted)
    log.warning("insum: the cache folder %s %s; %s is used instead", wanted, why, other)
    return _tidied(other)


#: Seconds after which a file that is being written has no writer any more.
ABANDONED = 3600.0
_HALF_WRITTEN = ".writing-"


def _tidied(folder: Path) -> Path:
    """A folder without what writers have left that were killed."""
    for part in (folder / "kernels", folder / "tuned"):
        with contextlib.suppress(OSError):
            for path in (*part.glob(f"{_HALF_WRITTEN}*"), *part.glob("[kb]*.tmp")):
                if time.time() - path.stat().st_mtime > ABANDONED:
                    path.unlink(missing_ok=True)
    return folder


def write_whole(path: Path, text: str) -> None:
    """All or nothing: written under another name, then renamed, so that nobody ever reads half a
    file; nothing is left where that fails.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_HALF_WRITTEN)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@functools.lru_cache(maxsize=256)
def warn_unwritten(folder: Path, why: str) -> None:
    """Say once that what is made is not kept on disk, and why."""
    log.warning("insum: nothing is kept in %s (%s); all else works as before", folder, why)


def _unusable(folder: Path) -> str:
    if folder.parts[:1] == ("~",):
        return "cannot be found: there is no home folder"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        parts = [
            folder,
            *(part for name in ("kernels", "tuned") if (part := folder / name).exists()),
        ]
        return "can be written by other users" if any(map(_is_shared, parts)) else ""
    except OSError as error:
        return f"cannot be written ({error.strerror})"


def _is_shared(folder: Path) -> bool:
    """Whether a folder belongs to somebody else, or others may write to it; a group of the user's
    own name is no other.
    """
    if not hasattr(os, "getuid"):
        return False
    about, me = folder.stat(), os.getuid()
    if about.st_uid not in (me, 0) or about.st_mode & stat.S_IWOTH:
        return True
    return bool(about.st_mode & stat.S_IWGRP) and not _is_own_group(about.st_gid, me)


def _is_own_group(group: int, user: int) -> bool:
    import grp
    import pwd

    try:
        name, found = pwd.getpwuid(user).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return found.gr_name == name and set(found.gr_mem) <= {name}


def load(kernel: Kernel, header: str) -> Any:
    """The jitted function for a source text, loaded once per process; None without Triton, where
    a program is there to be read.
    """
    if available():
        return None
    key = key_of(kernel.source)
    with _lock:
        function = loaded_kernels.get(key)
        if function is None:
            if len(loaded_kernels) >= MOST_LOADED:
                _drop_kernel(next(iter(loaded_kernels)))
            function = loaded_kernels[key] = getattr(_import(key, header, kernel), kernel.name)
    return function


def _drop_kernel(key: str) -> None:
    """Let go of a kernel, and of what Python keeps of its module."""
    global _forgotten
    _forgotten += 1
    del loaded_kernels[key]
    sys.modules.pop(f"insum_generated.k{key}", None)
    linecache.cache.pop(str(source_path(key)), None)


def forget() -> None:
    """Let go of every loaded kernel, so that the next call loads and compiles anew, as the first of
    a process does.
    """
    global _forgotten
    with _lock:
        _forgotten += len(loaded_kernels)
        loaded_kernels.clear()


#: A compiled kernel as a function of the number of programs and the list of arguments.
Launcher: TypeAlias = Callable[[int, Sequence[Any]], None]


def compile_count() -> int:
    """How many kernels were compiled for us in this process; those that were found compiled on disk
    by our own notes are not among them. One that is interpreted counts once.
    """
    with _lock:
        return _compiled + (_forgotten + len(loaded_kernels) if interpreting() else 0)


#: Launchers by the text of their kernel, types, alignment, warps, stages and device.
loaded: dict[object, Launcher] = {}


def keep_loaded(key: object, launcher: Launcher) -> Launcher:
    with _lock:
        if len(loaded) >= MOST_LOADED and key not in loaded:
            del loaded[next(iter(loaded))]
        return loaded.setdefault(key, launcher)


def launcher_of(compiled: Any) -> Launcher:
    """Launches a compiled kernel without what Triton does at every launch for hooks that nobody has
    set.
    """
    compiled[(1, 1, 1)]  # which loads it onto the device
    if not _launches_as_known():
        return lambda programs, arguments: compiled[(programs, 1, 1)](*arguments)
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

    def direct(programs: int, arguments: Sequence[Any]) -> None:
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            compiled[(programs, 1, 1)](*arguments)
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


_IMPORTS = "\nimport triton\nimport triton.language as tl\n\n\n"


def _import(key: str, header: str, kernel: Kernel) -> ModuleType:
    path = source_path(key)
    text = _kept(path)
    if text is None or not text.endswith(_IMPORTS + kernel.source):
        text = f"{header}{_IMPORTS}{kernel.source}"
        try:
            write_whole(path, text)
        except OSError as error:  # the next process writes what this one cannot, on a full disk
            warn_unwritten(path.parent, error.strerror or "it cannot be written")
    return _module(path, text)


def source_path(key: str) -> Path:
    return source_folder() / f"k{key}.py"


def _kept(path: Path) -> str | None:
    """The text of a file that an earlier process wrote: a heading, whose sizes are those that it
    saw first, and the kernel that the file's name speaks of. None where it is anything else, as
    after a full disk.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    header, _, source = text.partition(_IMPORTS)
    plain = re.fullmatch(r'"""[^"\\]*"""', header) is not None
    return text if plain and path.stem == f"k{key_of(source)}" else None


def key_of(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()[:20]


def _module(path: Path, text: str) -> ModuleType:
    """The module of a text that was looked at: neither the file nor compiled code beside it is read
    again, by Python or by Triton, which asks for the source of its functions.
    """
    module = ModuleType(f"insum_generated.{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))
    exec(compile(text, str(path), "exec", dont_inherit=True), module.__dict__)
    return module


# --- compiling ahead, in other processes ----------------------------------------------------------

#: One kernel to compile: the file of its source, its name, the types of its arguments, which
#: pointers are not aligned (a bit each), warps and stages.
Job: TypeAlias = tuple[str, str, list[str], int, int, int]
_REPLY = "insum-worker "
_WORKER = "import runpy, sys; runpy.run_path(sys.argv[1])['serve']()"


def job(
    function: Any, name: str, types: Sequence[str], unaligned: int, warps: int, stages: int
) -> Job:
    """What a worker needs to compile a kernel just as a launch would."""
    path = inspect.getsourcefile(function.fn) or ""
    return path, name, list(types), unaligned, warps, stages


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

    Only a head start: what a worker could not do, or the system has no worker for, is compiled, or
    fails, at the kernel's first launch.
    """
    workers = min(workers or os.cpu_count() or 1, len(jobs), 16)
    answers = ["not compiled"] * len(jobs)
    shares = [[(i, jobs[i]) for i in range(first, len(jobs), workers)] for first in range(workers)]
    running = _started(target, shares) if workers > 1 else []
    threads = [
        threading.Thread(target=_listen, args=(process, answers, done), daemon=True)
        for process in running
    ]
    end = time.monotonic() + seconds
    with contextlib.suppress(RuntimeError):  # no threads are left: their workers are ended
        for thread in threads:
            thread.start()
    for thread, process in zip(threads, running, strict=True):
        if thread.ident is not None:
            thread.join(max(0.0, end - time.monotonic()))
        elif process.stdout is not None:
            process.stdout.close()
        if process.poll() is None:
            process.kill()
        process.wait()
    return answers


def _started(
    target: Sequence[Any], shares: Sequence[Sequence[tuple[int, Job]]]
) -> list[subprocess.Popen[str]]:
    """A worker for each share, as far as the system starts them; none where Python is part of
    another program, which would be started instead.
    """
    found: list[subprocess.Popen[str]] = []
    if not sys.executable or getattr(sys, "frozen", False):
        return found
    with contextlib.suppress(OSError):
        for share in shares:
            found.append(_start(target, share))
    return found


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
    with contextlib.suppress(OSError), process.stdin as stream:  # it has ended already
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
    path, name, types, unaligned, warps, stages = work
    text = _kept(Path(path))
    if text is None:
        raise ValueError(f"{path} is not as it was written")
    function = getattr(_module(Path(path), text), name)
    compile_kernel(function, types, unaligned, warps, stages)


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


# --- compiling ------------------------------------------------------------------------------------


def compile_kernel(
    function: Any, types: Sequence[str], unaligned: int, warps: int, stages: int, target: Any = None
) -> Any:
    """Compile a kernel for arguments of these types; pointers are to 16 bytes but for those whose
    bit is set, counted from the last pointer. Numbers are not specialised.
    """
    import triton
    from triton.compiler import ASTSource

    global _compiled
    _compiled += target is None
    signature = dict(zip(function.arg_names, types, strict=True))
    pointers = [place for place, type in enumerate(types) if type.startswith("*")]
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for bit, place in enumerate(reversed(pointers))
        if not unaligned >> bit & 1
    }
    source = ASTSource(fn=function, signature=signature, constexprs={}, attrs=attributes)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=target, options=options)


@dataclass(frozen=True, slots=True)
class CompilerReport:
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
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
}


def pointer_type(dtype: object) -> str:
    """Triton's type of a pointer to elements of a torch dtype."""
    return "*" + _POINTER[str(dtype).removeprefix("torch.").replace("bool", "int1")]


def compile_for(
    function: Any, types: Sequence[str], target: str, *, warps: int, stages: int, unaligned: int = 0
) -> CompilerReport:
    """Compile a kernel for a target that need not be here, as a launch would."""
    from triton.backends.compiler import GPUTarget

    binary = compile_kernel(function, types, unaligned, warps, stages, GPUTarget(*TARGETS[target]))
    registers, stack = _resources(binary, target)
    texts = {key: text for key, text in binary.asm.items() if isinstance(text, str)}
    return CompilerReport(target, texts, binary.metadata.shared, registers, stack)


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
