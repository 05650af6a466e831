"""Kernels that earlier processes compiled, found without asking Triton.

Triton finds them too, but its key reads its whole library, half a second in every process. Here a
small note beside each kernel's source says under which hash Triton keeps the binary, for one kind
of arguments on one target. A note that leads nowhere, or that this Triton cannot follow, costs a
compilation and nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from insum.runtime import disk, launch

log = logging.getLogger("insum")
_VERSION = 2
#: Beginnings of environment variables that may change what is compiled; the folders do not.
_COMPILING = (
    "TRITON",
    "LLVM",
    "MLIR",
    "PTXAS",
    "NVPTX",
    "AMDGCN",
    "DISABLE_",
    "ENABLE_",
    "ALLOW_",
    "USE_",
)
_FOLDERS = ("TRITON_CACHE_DIR", "TRITON_HOME")


def recalled(
    function: Any, types: Sequence[str], unaligned: int, warps: int, stages: int
) -> Any | None:
    """The compiled kernel for such arguments, from Triton's cache on disk; None where there is
    none, or where someone watches Triton compile.
    """
    try:
        if launch.interpreting() or _watched():
            return None
        path = _path(function, types, unaligned, warps, stages)
        return _load(function, json.loads(path.read_text())) if path.exists() else None
    except Exception as error:  # whatever this Triton does differently: it compiles as ever
        log.debug("insum: no compiled kernel recalled: %s: %s", type(error).__name__, error)
        return None


def is_noted(function: Any, types: Sequence[str], unaligned: int, warps: int, stages: int) -> bool:
    """Whether some process has compiled such a kernel, as far as the notes say."""
    try:
        return _path(function, types, unaligned, warps, stages).exists()
    except Exception:
        return False


def note(
    compiled: Any, function: Any, types: Sequence[str], unaligned: int, warps: int, stages: int
) -> None:
    """Write down where Triton keeps what it just compiled."""
    if launch.interpreting():
        return
    try:
        constants = [[list(at), value] for at, value in compiled.src.constants.items()]
        text = json.dumps(
            {
                "hash": compiled.hash,
                "name": compiled.src.name,
                "signature": compiled.src.signature,
                "constants": constants,
            }
        )
        disk.write_whole(_path(function, types, unaligned, warps, stages), text)
    except Exception as error:
        log.debug("insum: no note of a compiled kernel: %s: %s", type(error).__name__, error)


def _load(function: Any, noted: dict[str, Any]) -> Any | None:
    from triton.compiler import ASTSource, CompiledKernel
    from triton.runtime.cache import get_cache_manager

    group = get_cache_manager(noted["hash"]).get_group(f"{noted['name'][:150]}.json")
    if not group or not all(Path(file).exists() for file in group.values()):
        return None
    source = ASTSource(
        function, noted["signature"], {tuple(at): value for at, value in noted["constants"]}
    )
    return CompiledKernel(source, group, noted["hash"])


def _path(function: Any, types: Sequence[str], unaligned: int, warps: int, stages: int) -> Path:
    asked = [
        _VERSION,
        function.fn.__module__,
        list(types),
        unaligned,
        warps,
        stages,
        launch.current_target(),
        _triton(),
        _environment(),
    ]
    name = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:24]
    return launch.source_folder() / f"b{name}.json"


def _environment() -> list[tuple[str, str]]:
    return sorted(
        (k, v) for k, v in os.environ.items() if k.startswith(_COMPILING) and k not in _FOLDERS
    )


@functools.cache
def _triton() -> list[Any]:
    """Which Triton this is: its version, and its library as the file system knows it."""
    import triton

    found: list[Any] = [triton.__version__]
    for library in sorted((Path(triton.__file__).parent / "_C").glob("libtriton*")):
        about = library.stat()
        found += [library.name, about.st_size, about.st_mtime_ns]
    return found


def _watched() -> bool:
    """Whether somebody wants to see compilations, or to change them."""
    from triton import knobs

    compiling, running = knobs.compilation, knobs.runtime
    wanted = [
        compiling.always_compile,
        compiling.override,
        compiling.dump_ir,
        compiling.listener,
        running.debug,
    ]
    with contextlib.suppress(AttributeError):  # names of newer releases
        wanted += [
            running.jit_cache_hook,
            running.jit_post_compile_hook,
            compiling.instrumentation_mode,
        ]
    return any(bool(getattr(one, "calls", one)) for one in wanted)
