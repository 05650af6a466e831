"""A measurement with a record of its own: what it is asked for, and where its record goes.

A module of a study has ``run(study)``, which gives 0, or 1 where a result was wrong, and may have
``add_options(parser)`` for options that no other has.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from insum.bench import data, machine, records
from insum.bench.options import BenchOptions
from insum.errors import BenchError


@dataclass(frozen=True)
class Study:
    """``asked`` holds what the study's own options say; ``end`` is the moment after which nothing
    new is begun; ``sources`` are the folders that were named.
    """

    name: str
    options: BenchOptions
    asked: argparse.Namespace
    command: str
    file: Path
    end: float = math.inf
    sources: Sequence[Path] = ()

    @property
    def device(self) -> torch.device:
        return self.options.device

    def on(self, device: torch.device) -> Study:
        return replace(self, options=replace(self.options, device=device))

    def has_time(self) -> bool:
        return time.monotonic() < self.end

    def wanted(self, parts: Sequence[str]) -> list[str]:
        """Those that ``--only`` names, all where it names none."""
        return data.chosen(parts, self.options.names, "part")

    def require_gpu(self) -> None:
        if not self.options.gpu:
            raise BenchError(
                f"insum bench {self.name} was asked for on {self.device.type}", expected="a GPU"
            )

    def keep(self, **content: object) -> None:
        """Write the record as it is by now: a run that is cut off leaves what it measured."""
        records.write_record(self.file, {**machine.about(self.command, self.device), **content})
