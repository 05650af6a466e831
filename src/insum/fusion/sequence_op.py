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
from insum.fusion.op import KEPT_ROWS, Spec, fused_fake, run_at_once, run_fused, spec_of
from insum.fusion.repeated import like, note_sequence
from insum.lang.parser import parse
from insum.ops.shared_rows import sharing

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
    results, calls, members = list[Tensor](), [], members_of(spec)
    rest: Sequence[int] = sizes
    group, ahead = walked_together(spec), dict[int, Tensor]()
    for number, member in enumerate(members):
        if number == min(group, default=-1):
            ahead = _at_once(members, group, number, tensors, rest)
        given, own, rest = _arguments(member, tensors, results, rest)
        found = ahead[number] if number in ahead else run_fused(member.spec, given, own)
        results.append(found)
        if (call := like(member.spec, given, own, None)) is not None:
            calls.append((call, [place for place, _ in member.given]))
    if len(calls) == len(results):
        note_sequence(spec, calls, group, tensors, sizes)
    return results


def _at_once(
    members: Sequence[SequenceMember],
    group: Sequence[int],
    first: int,
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
) -> dict[int, Tensor]:
    """By number the results of a group, of which the first is on; ``sizes``: from its own on."""
    ops = []
    for number, member in enumerate(members[first:], first):
        if number in group:
            given, own, sizes = _arguments(member, tensors, (), sizes)
            ops.append((member.spec, given, own))
        else:
            sizes = sizes[member.sizes + sum(dims for _, dims in member.given) :]
    return dict(zip(group, run_at_once(ops)))


@functools.lru_cache(maxsize=1024)
def walked_together(text: str) -> tuple[int, ...]:
    """Members that gather the same rows, so that one launch may be for all of them: of those that
    read no result of another.
    """
    specs: dict[str, Spec] = {}
    places: dict[str, object] = {}
    for number, member in enumerate(members_of(text)):
        if member.spec.startswith(KEPT_ROWS) or any(place < 0 for place, _ in member.given):
            continue
        spec = spec_of(member.spec)
        own = _places(spec, member)
        if all(places.setdefault(name, place) == place for name, place in own.items()):
            specs[str(number)] = spec
    statements = {number: parse(spec.statement) for number, spec in specs.items()}
    return tuple(map(int, sharing(statements)))


def _places(spec: Spec, member: SequenceMember) -> dict[str, object]:
    """By name what the tensors of a statement are: two of one name are to be the same."""
    passed: dict[str, object] = dict(zip(spec.names, member.given))
    parts = {name: (passed.get(base, base), selects) for name, base, selects in spec.views}
    return {**passed, **parts, **{one.name: str(one) for one in spec.origins}}


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
