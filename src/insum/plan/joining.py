"""Products of a sum that become one kernel, so that what several of them read is read once and the
result is written once: those of which each point has one value, and straight-line code for one
pattern each, over the same points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from insum.lang.bind import Problem
from insum.lang.expand import ProductTerm
from insum.lang.expr import Call, total, variables
from insum.plan.draft import Planned
from insum.plan.plan import Pattern, Plan

#: Points of all products of a kernel: beyond it registers are spilled, and compilers take minutes.
MOST_POINTS = 768
#: Products that are added up at each point: each may read a row of its own.
MOST_ADDED = 8


def added_up(problem: Problem, planned: Sequence[Planned]) -> ProductTerm | None:
    """The sum of all products of a statement as one, where nothing is summed in any of them but
    what is scattered to the same place; None where they had better stay apart: as matrix products
    and patterns, or where padding leaves out what the others have.

    >>> import torch
    >>> from insum.lang.bind import bind
    >>> from insum.lang.parser import parse
    >>> values = {"v": torch.ones(5), "x": torch.ones(3, 2), "z": torch.ones(3, 2)}
    >>> values |= {name: torch.zeros(5, dtype=torch.int64) for name in "ij"}
    >>> problem = bind(parse("y[i[p],n] = v[p] * x[j[p],n] + z[j[p],n]"), values, sizes={0: 3})
    >>> print(added_up(problem, ()).value)
    whole(v[p] * x[j[p],n] + z[j[p],n])
    """
    terms, target = problem.terms, problem.statement.target
    if not 1 < len(terms) <= MOST_ADDED or problem.padded or not problem.dtype.is_floating_point:
        return None
    if any(one.plan.pattern is not None or one.plan.roles.dot for one in planned):
        return None
    own = tuple(dict.fromkeys(variables(target)))
    if any(len(index.terms) > 1 for index in target.indices):
        return None
    if not all({*term.variables} == {*own} for term in terms):
        return None
    return ProductTerm((Call("whole", (total([term.value for term in terms]),)),), own)


def joined(planned: Sequence[Planned]) -> list[Planned]:
    """Neighbouring products as one, where they walk the same loops and write the same places."""
    found: list[Planned] = []
    for one in planned:
        both = _as_one([found[-1], one]) if found else None
        if both is None:
            found.append(one)
        else:
            found[-1] = both
    return found


def _as_one(planned: Sequence[Planned]) -> Planned | None:
    if not _alike(planned):
        return None
    first = planned[0]
    arrays = union_of([one.arrays for one in planned])
    kinds, strides, views, made = (
        union_of([dict(getattr(one.plan, name)) for one in planned])
        for name in ("kinds", "strides", "views", "made")
    )
    if any(part is None for part in (arrays, kinds, strides, views, made)):
        return None
    assert arrays is not None and kinds is not None and strides is not None
    assert views is not None and made is not None
    plans = [one.plan for one in planned]
    points = tuple(point for plan in plans for point in _pattern(plan).points)
    products = sum(_pattern(plan).products for plan in plans)
    plan = replace(
        first.plan,
        factors=tuple(dict.fromkeys(f for plan in plans for f in plan.factors)),
        pattern=replace(_pattern(first.plan), points=points, products=products),
        kinds=tuple(sorted(kinds.items())),
        strides=tuple(sorted(strides.items())),
        views=tuple(sorted(views.items())),
        made=tuple(sorted(made.items())),
        numbers=tuple(dict.fromkeys(n for plan in plans for n in plan.numbers)),
        guarded=frozenset().union(*(plan.guarded for plan in plans)),
        wraps=frozenset().union(*(plan.wraps for plan in plans)),
        why=tuple(dict.fromkeys([*first.plan.why, "products are added up in registers"])),
    )
    return replace(first, plan=plan, arrays=arrays)


def _alike(planned: Sequence[Planned]) -> bool:
    if any(one.plan.pattern is None for one in planned):
        return False
    if sum(len(_pattern(one.plan).points) for one in planned) > MOST_POINTS:
        return False
    return len({_loops(one) for one in planned}) == 1


def _pattern(plan: Plan) -> Pattern:
    assert plan.pattern is not None
    return plan.pattern


def _loops(one: Planned) -> tuple[object, ...]:
    """What decides the loops of a kernel, and where it writes."""
    plan = one.plan
    places = frozenset(target for target, _ in _pattern(plan).points)
    counts = frozenset(len(factors) for _, factors in _pattern(plan).points)
    return (
        *(plan.target, plan.reduce, plan.roles, plan.strategy, plan.padded, plan.accumulator),
        *(plan.segment, plan.wide, plan.idle, plan.bounds, _pattern(plan).variables),
        *(one.segments, one.fill, one.written, one.longest, one.entries, places, counts),
    )


def union_of(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """All of them in one; None where a name means different things."""
    whole: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if whole.setdefault(name, value) != value:
                return None
    return whole
