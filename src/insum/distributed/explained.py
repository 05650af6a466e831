"""What a call over DTensors would do: how the ranks share the work, what travels, and what each
rank runs.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

from insum.call.prepared import kinds_of
from insum.call.request import Request
from insum.compat.placed import local_of
from insum.distributed.cost import HeldTensor, moved_bytes
from insum.distributed.dispatch import PlacedCall, found_call, shown
from insum.explanation import Explanation, explained


@dataclass(frozen=True, slots=True)
class Travel:
    """One tensor of a call: where it is, where it has to be, and the bytes that a rank receives
    until it is there.
    """

    name: str
    shape: tuple[int, ...]
    placed: tuple[Placement, ...]
    used: tuple[Placement, ...]
    received: int

    def __str__(self) -> str:
        if self.placed == self.used:
            return f"{self.name} {self.shape}: {shown(self.placed)}, as it is"
        moved = f"{shown(self.placed)} to {shown(self.used)}"
        return f"{self.name} {self.shape}: {moved}, {self.received:,} bytes to each rank"


@dataclass(frozen=True, repr=False)
class PlacedExplanation:
    """What `insum.explain` says of a call over DTensors. Nothing is computed, and nothing sent.

    Attributes:
        statement: What was asked for.
        mesh: The mesh of its DTensors.
        ways: For each dimension of the mesh, how its ranks share the work.
        tensors: Where they are and where they go.
        result: The placement of the result.
        later: Bytes that a rank receives when a partial result is put together: all of it, and a
            part for each rank.
        local: What each rank runs; of this rank, where parts have different sizes.

    Examples:
        >>> import insum, torch
        >>> from torch.distributed.tensor import Shard, distribute_tensor
        >>> x = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
        >>> found = insum.explain("y[j] = x[i,j]", x=x)
        >>> found.received, found.result
        (0, (Partial(sum),))
    """

    statement: str
    mesh: str
    ways: tuple[str, ...]
    tensors: tuple[Travel, ...]
    result: tuple[Placement, ...]
    later: tuple[int, int]
    local: Explanation

    @property
    def received(self) -> int:
        """Bytes that a rank receives before the statement is run."""
        return sum(one.received for one in self.tensors)

    def __str__(self) -> str:
        every, part = self.later
        pending = f": {every:,} bytes to each rank where all is needed, {part:,} where a part is"
        lines = [self.statement, f"on {self.mesh}", ""]
        lines += [f"dimension {dim}: {way}" for dim, way in enumerate(self.ways)]
        lines += ["", *map(str, self.tensors)]
        lines += [f"result: {shown(self.result)}{pending if every else ''}"]
        lines += ["", "each rank runs", "", str(self.local)]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def explain_placed(request: Request, values: Mapping[str, Any], gpu: str = "") -> PlacedExplanation:
    """`insum.explain` of a statement over DTensors."""
    kinds, sizes = kinds_of(request.form), request.size_values
    call, values = found_call(kinds, values, sizes, None)
    local = explained(call.kinds.form.request(call.sizes), _parts(call, values), gpu)
    return PlacedExplanation(
        request.statement,
        str(call.mesh),
        tuple(way.reason for way in call.chosen),
        tuple(_travel(call, name, values[name]) for name in call.names),
        call.wanted or call.placements,
        _pending(call),
        local,
    )


def _ranks(call: PlacedCall) -> tuple[int, ...]:
    return tuple(call.mesh.size(dim) for dim in range(call.mesh.ndim))


def _travel(call: PlacedCall, name: str, value: Any) -> Travel:
    used = tuple(way.inputs[name] for way in call.chosen)
    held = HeldTensor(value.numel() * value.dtype.itemsize, tuple(value.placements))
    received = _received(held, used, _ranks(call))
    return Travel(name, tuple(value.shape), held.placements, used, received)


def _received(held: HeldTensor, used: tuple[Placement, ...], ranks: tuple[int, ...]) -> int:
    moves = zip(held.placements, used, ranks)
    return round(
        sum(
            moved_bytes(before, after, held.share(dim, ranks), count)
            for dim, (before, after, count) in enumerate(moves)
        )
    )


def _pending(call: PlacedCall) -> tuple[int, int]:
    """Bytes of putting a partial result together: everywhere, and in parts."""
    nbytes = prod(map(int, call.problem.shape)) * call.problem.dtype.itemsize
    held, found = HeldTensor(nbytes, call.placements), []
    for place in (Replicate(), Shard(0)):
        used = tuple(place if p.is_partial() else p for p in call.placements)
        found.append(_received(held, used, _ranks(call)))
    return found[0], found[1]


def _parts(call: PlacedCall, values: Mapping[str, Any]) -> dict[str, Any]:
    """What this rank would run on: its own tensors, and stand-ins for what would travel."""
    found: dict[str, Any] = {name: values[name] for name in call.numbers}
    for name, move in zip(call.names, call.moves):
        value = values[name]
        found[name] = local_of(value) if move is None else _stand_in(call, value, move)
    for index in call.indices:
        found[index.name] = index(found)
    return {name: found[name] for name in call.reads if name in found}


def _stand_in(call: PlacedCall, value: Any, placements: tuple[Placement, ...]) -> Tensor:
    shape = list(value.shape)
    for place, count in zip(placements, _ranks(call)):
        if isinstance(place, Shard):
            shape[place.dim] = -(-shape[place.dim] // count)
    return torch.zeros(shape, dtype=value.dtype, device=value.device)
