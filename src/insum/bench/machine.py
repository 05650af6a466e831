"""Where a run took place: device, versions, command."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "insum",
    "torch",
    "triton",
    "numpy",
    "e3nn",
    "torch_geometric",
    "cuequivariance_torch",
    "openequivariance",
    "spconv",
    "torchsparse",
    "flex_gemm",
)


def device_name(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"
    )


def versions() -> dict[str, str]:
    """What is installed, by version.

    >>> versions()["torch"] == torch.__version__
    True
    """
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = torch.__version__ if name == "torch" else metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def command(arguments: Sequence[str]) -> str:
    """As one would type it, without the folders of this machine."""
    return " ".join(["insum bench", *(Path(a).name if a.startswith("/") else a for a in arguments)])


def about(line: str, device: torch.device) -> dict[str, Any]:
    """What every record says of itself."""
    return {
        "command": line,
        "date": today(),
        "device": device_name(device),
        "versions": versions(),
    }


def today() -> str:
    return datetime.date.today().isoformat()
