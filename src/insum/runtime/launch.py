"""Generated source -> callable kernel. The only module that imports triton, and only when a kernel is wanted."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

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
    wanted = os.environ.get("INSUM_CACHE_DIR") or os.path.join(os.path.expanduser("~"), ".cache", "insum")
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


def _import(key: str, header: str, kernel: Kernel) -> ModuleType:
    path = source_folder() / f"k{key}.py"
    if not path.exists():
        text = f"{header}\nimport triton\nimport triton.language as tl\n\n\n{kernel.source}"
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(text)
        temporary.replace(path)  # atomic, so that another process never reads half a file
    spec = importlib.util.spec_from_file_location(f"insum_generated.k{key}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
