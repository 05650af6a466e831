"""What is usable here, and why the rest is not: versions, device, compiler, interpreter, cache
folder, optional packages.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

import torch

from insum.runtime import cache, launch

#: Packages that insum can use, and for what.
OPTIONAL = {
    "numpy": "Triton's interpreter, conversion from and to SciPy",
    "scipy": "conversion from and to SciPy",
    "typer": "the command line",
    "rich": "progress bars and tables",
    "matplotlib": "plots",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is usable or not."""

    what: str
    usable: bool
    why: str


def report() -> list[Finding]:
    """All findings, in the order in which they matter.

    >>> [finding.what for finding in report()][:2]
    ['Python', 'torch']
    """
    return [
        Finding("Python", True, platform.python_version()),
        Finding("torch", True, torch.__version__),
        *_triton(),
        *_devices(),
        *_paths(),
        *_packages(),
    ]


def _triton() -> Iterator[Finding]:
    missing = launch.available()
    yield Finding(
        "triton",
        not missing,
        missing or f"{metadata.version('triton')}, imported only when a kernel is wanted",
    )
    if launch.interpreting():
        yield Finding(
            "Triton's interpreter",
            True,
            "TRITON_INTERPRET=1: generated kernels run on CPU tensors, slowly; for tests",
        )
    else:
        yield Finding(
            "Triton's interpreter",
            False,
            "off; TRITON_INTERPRET=1 before Python starts runs generated kernels on CPU tensors",
        )


def _devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        built = (
            "this torch is built without CUDA and ROCm"
            if torch.version.cuda is None and torch.version.hip is None
            else "no driver or no device was found"
        )
        yield Finding("GPU", False, f"{built}; statements run as graphs of torch operations")
        return
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        fused = "" if not launch.available() else f"; no generated kernels: {launch.available()}"
        capability = (
            f"capability {properties.major}.{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB"
        )
        yield Finding(
            f"GPU {number}", not launch.available(), f"{properties.name}, {capability}{fused}"
        )


def _paths() -> Iterator[Finding]:
    yield Finding(
        "fused kernels here",
        torch.cuda.is_available() and not launch.available() or launch.interpreting(),
        _fused(),
    )
    folder = cache.folder()
    wanted = os.environ.get("INSUM_CACHE_DIR") or os.path.join(
        os.path.expanduser("~"), ".cache", "insum"
    )
    kept = sum(1 for _ in cache.entries_folder().glob("*.json"))
    note = f"{folder}: {kept} tuned configs"
    yield Finding(
        "cache folder",
        str(folder) == wanted,
        note if str(folder) == wanted else f"{wanted} cannot be written; {note}",
    )
    yield Finding(
        "Triton's cache",
        True,
        os.environ.get("TRITON_CACHE_DIR")
        or os.path.join(os.path.expanduser("~"), ".triton", "cache"),
    )
    with tempfile.TemporaryDirectory() as temporary:
        yield Finding("temporary folder", True, os.path.dirname(temporary))


def _fused() -> str:
    if launch.interpreting():
        return "interpreted, on CPU tensors"
    if launch.available():
        return launch.available()
    return (
        "on CUDA tensors"
        if torch.cuda.is_available()
        else "there is no GPU; they can be written and compiled, not run"
    )


def _packages() -> Iterator[Finding]:
    for name, use in OPTIONAL.items():
        found = importlib.util.find_spec(name) is not None
        yield Finding(name, found, f"{_version(name)}; {use}" if found else f"not installed; {use}")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown version"
