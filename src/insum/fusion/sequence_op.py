"""The op that several fused ops of one graph become, ``insum::fused_sequence``: one call, which is
recognised as a whole and then launches them one after the other. A statement may read what one
before it has computed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from insum.compat.calls import are_plain, shorten
from insum.fusion.defining import define
from insum.fusion.op import fused_fake, run_fused
from insum.fusion.repeated import like, note_sequence

_BETWEEN = " & "


@dataclass(frozen=True, slots=True)
class SequenceMember:
    """One of the fused ops. As text, with the others, it is the first argument of the op.

    Attributes:
        spec: the first argument that it had.
        sizes: how many sizes it takes. They come one after the other, those of each member before
            those of its views.
        given: of each tensor that it takes the number among those that are passed, or, from -1 on
            downwards, among the results before; and of how many dimensions the view of that is
            which it takes, 0 where it takes it as it is.
    """

    spec: str
    sizes: int
    given: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        given = ",".join(f"{place}:{dims}" for place, dims in self.given)
        return f"{self.sizes} {given} {self.spec}"


def text_of(members: Sequence[SequenceMember]) -> str:
    """One line without quotes."""
    return _BETWEEN.join(map(str, members))


@functools.lru_cache(maxsize=1024)
def members_of(text: str) -> tuple[SequenceMember, ...]:
    """The reverse of `text_of`."""
    found = []
    for one in text.split(_BETWEEN):
        count, given, spec = one.split(" ", 2)
        places = tuple((int(p), int(d)) for p, _, d in (g.partition(":") for g in given.split(",")))
        found.append(SequenceMember(spec, int(count), places))
    return tuple(found)


def _arguments(
    member: SequenceMember,
    tensors: Sequence[Tensor],
    results: Sequence[Tensor],
    sizes: Sequence[Any],
) -> tuple[list[Tensor], list[Any], Sequence[Any]]:
    """Tensors and sizes of a member, and the sizes of those behind it."""
    own, rest = list(sizes[: member.sizes]), sizes[member.sizes :]
    given = []
    for place, dims in member.given:
        value = tensors[place] if place >= 0 else results[-1 - place]
        given.append(value.view(tuple(rest[:dims])) if dims else value)
        rest = rest[dims:]
    return given, own, rest


def _fused_sequence(spec: str, tensors: list[Tensor], sizes: list[int]) -> list[Tensor]:
    results, calls = list[Tensor](), []
    rest: Sequence[int] = sizes
    for member in members_of(spec):
        given, own, rest = _arguments(member, tensors, results, rest)
        results.append(run_fused(member.spec, given, own))
        if (call := like(member.spec, given, own, None)) is not None:
            calls.append((call, [place for place, _ in member.given]))
    if len(calls) == len(results):
        note_sequence(spec, calls, tensors, sizes)
    return results


def _fused_sequence_fake(spec: str, tensors: list[Tensor], sizes: list[Any]) -> list[Tensor]:
    results = list[Tensor]()
    rest: Sequence[Any] = sizes
    for member in members_of(spec):
        given, own, rest = _arguments(member, tensors, results, rest)
        results.append(fused_fake(member.spec, given, own))
    return results


def _quick(spec: str, tensors: list[Tensor], sizes: list[int]) -> list[Tensor] | None:
    alike = like(spec, tensors, sizes, None)
    found = None if alike is None else alike.run(tensors, None)
    if found is None and are_plain(tensors):
        return _fused_sequence(spec, tensors, sizes)
    return found


define(
    "fused_sequence(str spec, Tensor[] tensors, SymInt[] sizes) -> Tensor[]",
    _fused_sequence,
    _fused_sequence_fake,
)
shorten(torch.ops.insum.fused_sequence.default, _quick)
