"""What a run was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from insum.bench.records import BOTH, FORWARD
from insum.errors import BenchError

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
DIRECTIONS = {"forward": (FORWARD,), "backward": (BOTH,), "both": (FORWARD, BOTH)}


@dataclass(frozen=True)
class BenchOptions:
    """Sizes follow from the device: on a CPU they shrink, so that all can be seen to work."""

    device: torch.device
    data: Path | None = None
    quick: bool = False
    dtypes: tuple[torch.dtype, ...] = ()
    directions: tuple[str, ...] = (FORWARD, BOTH)
    names: tuple[str, ...] = ()  # cases; all where empty
    slow: bool = True  # rivals that take long to set up
    skip: tuple[str, ...] = ()  # rivals to leave out: parts of their names
    drawn: int | None = None  # a seed: sizes are drawn around those that are named
    random: int | None = None  # a seed: statements are drawn

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"

    def dtypes_or(self, *usual: torch.dtype) -> tuple[torch.dtype, ...]:
        return self.dtypes or usual


def dtypes_of(text: str) -> tuple[torch.dtype, ...]:
    """
    >>> dtypes_of("fp16,bf16")
    (torch.float16, torch.bfloat16)
    """
    return tuple(DTYPES[_known(name, DTYPES, "dtype")] for name in text.split(",") if name)


def directions_of(text: str) -> tuple[str, ...]:
    return DIRECTIONS[_known(text, DIRECTIONS, "direction")]


def _known(
    name: str,
    names: Sequence[str] | dict[str, object] | dict[str, torch.dtype] | dict[str, tuple[str, ...]],
    kind: str,
) -> str:
    if name not in names:
        raise BenchError(f"there is no {kind} {name!r}", expected=", ".join(names))
    return name
