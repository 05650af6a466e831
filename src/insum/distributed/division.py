"""How a matrix is divided: the choices, the kind of its parts, where rows and columns are cut."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from insum.accepted import TEXT, Accepted, has_elements, require
from insum.distributed.cuts import Cuts, even_cuts, nonzero_cuts, scaled
from insum.distributed.partitioned import Partitioned
from insum.distributed.transfers import summed
from insum.errors import BindingError, FormatError
from insum.formats import SparseFormat

Balance = Literal["nonzeros", "rows"]
Send = Literal["fewest", "rows"]


def _is_line(mesh: Any) -> bool:
    return hasattr(mesh, "get_group") and getattr(mesh, "ndim", 0) == 1


MESH = Accepted("a DeviceMesh of one dimension", _is_line)
PARTITION = Accepted("what insum.distributed.partition gave", lambda v: isinstance(v, Partitioned))
ORDER = Accepted(
    'None, "rcm" or a permutation of all rows as a tensor of integers',
    lambda v: (
        v is None or v == "rcm" if not isinstance(v, Tensor) else v.dim() == 1 and has_elements(v)
    ),
)


@dataclass(frozen=True)
class PartitionSpec:
    """What the parts are: a kind of format with its options, and the shape of all."""

    kind: str
    options: tuple[tuple[str, Any], ...]
    shape: tuple[int, ...]

    @property
    def block(self) -> tuple[int, ...]:
        return dict(self.options).get("block_shape") or (1,) * len(self.shape)

    @property
    def square(self) -> bool:
        return self.shape[0] == self.shape[1]


def check_choices(balance: str, send: str) -> None:
    require("balance", balance, TEXT)
    require("send", send, TEXT)
    for name, value, known in (
        ("balance", balance, ("nonzeros", "rows")),
        ("send", send, ("fewest", "rows")),
    ):
        if value not in known:
            raise BindingError(f"{name} is {value!r}", expected=" or ".join(map(repr, known)))


def spec_of(format: SparseFormat) -> PartitionSpec:
    if format.ndim < 2:
        raise FormatError(
            f"a {type(format).__name__} of {format.ndim} dimension(s) has no rows that could be "
            "cut",
            expected="a matrix",
        )
    known = {name: getattr(format, name, None) for name in type(format)._options}
    return PartitionSpec(format._kind, tuple(sorted(known.items())), tuple(format.shape))


@dataclass(frozen=True)
class UnitCuts:
    """Cuts of rows and columns, in rows and in units."""

    rows: Cuts
    columns: Cuts
    block: tuple[int, int]

    @property
    def row_units(self) -> Cuts:
        return tuple(-(-cut // self.block[0]) for cut in self.rows)

    @property
    def column_units(self) -> Cuts:
        return tuple(-(-cut // self.block[1]) for cut in self.columns)


def cuts_of(
    rows: Tensor,
    spec: PartitionSpec,
    balance: str,
    ranks: int,
    group: dist.ProcessGroup | None = None,
) -> UnitCuts:
    """Where rows and columns are cut; with a group, every rank of it has some of the entries."""
    block = spec.block
    sides = block[0], block[1]
    step = math.lcm(*sides) if spec.square else block[0]
    steps = -(-spec.shape[0] // step)
    if balance == "rows":
        found = even_cuts(steps, ranks)
    else:
        ordered = (rows.long() * block[0]).div(step, rounding_mode="floor").sort().values

        def below(row: Tensor) -> Tensor:
            count = torch.searchsorted(ordered, row)
            return count if group is None else summed(count, group)

        nonzeros = int(below(torch.tensor([steps], device=rows.device)))
        found = nonzero_cuts(below, nonzeros, steps, ranks, rows.device)
    row_cuts = scaled(found, step, spec.shape[0])
    if spec.square:
        return UnitCuts(row_cuts, row_cuts, sides)
    units = even_cuts(-(-spec.shape[1] // block[1]), ranks)
    return UnitCuts(row_cuts, scaled(units, block[1], spec.shape[1]), sides)
