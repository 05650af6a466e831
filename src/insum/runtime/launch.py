"""Generated source -> callable kernel. With `runtime.compiling` and `runtime.binaries` the only
place that imports triton, and only when a kernel is wanted.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from insum.compat.locks import renew_in_children
from insum.runtime.compiling import (
    IMPORTS,
    MIXED_UP,
    UNLOADABLE,
    compiled_here,
    kept_text,
    key_of,
    mixes_numbers_up,
    module_of,
)
from insum.runtime.disk import cache_folder, warn_unwritten, write_whole

if TYPE_CHECKING:
    from insum.codegen.kernel import Kernel

#: Kernels that were loaded in this process, by the hash of their text; a test counts them.
loaded_kernels: dict[str, Any] = {}
#: Texts, and launchers of compiled kernels, that are kept.
MOST_LOADED = 4096
_forgotten = 0  # kernels that were loaded and let go of
_lock = threading.Lock()
renew_in_children(_lock)


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
        return compiled_here() + (_forgotten + len(loaded_kernels) if interpreting() else 0)


#: Launchers by the text of their kernel, types, alignment, warps, stages and device.
loaded: dict[object, Launcher] = {}


def keep_loaded(key: object, launcher: Launcher) -> Launcher:
    with _lock:
        if len(loaded) >= MOST_LOADED and key not in loaded:
            del loaded[next(iter(loaded))]
        return loaded.setdefault(key, launcher)


def flaw_of(compiled: Any) -> int:
    """What a thread of a compiled kernel keeps in memory for want of registers, in bytes; more than
    that where the kernel is worse.
    """
    from triton.runtime.errors import OutOfResources

    if mixes_numbers_up(compiled.asm.get("ptx", "")):
        return MIXED_UP
    try:
        compiled[(1, 1, 1)]  # which loads it onto the device
    except OutOfResources:
        return UNLOADABLE
    return 4 * int(getattr(compiled, "n_spills", 0))


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


def _import(key: str, header: str, kernel: Kernel) -> ModuleType:
    path = source_path(key)
    text = kept_text(path)
    if text is None or not text.endswith(IMPORTS + kernel.source):
        text = f"{header}{IMPORTS}{kernel.source}"
        try:
            write_whole(path, text)
        except OSError as error:  # the next process writes what this one cannot, on a full disk
            warn_unwritten(path.parent, error.strerror or "it cannot be written")
    return module_of(path, text)


def source_path(key: str) -> Path:
    return source_folder() / f"k{key}.py"


def current_target() -> list[Any]:
    """What kernels are compiled for here: backend, architecture, lanes of a warp."""
    from triton.runtime import driver

    target = driver.active.get_current_target()
    return [target.backend, target.arch, target.warp_size]


def current_device() -> int:
    from triton.runtime import driver

    return int(driver.active.get_current_device())


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
