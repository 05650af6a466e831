"""Short index tensors that share no variable with a long one, such as those of Clebsch-Gordan
coefficients: what belongs to such a pattern, and the axes that it has as a dense tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from insum.host.parts import extent_of
from insum.lang.bind import Problem
from insum.lang.expand import ProductTerm
from insum.lang.expr import Access, Affine, Expr, accesses, fresh, names_of, variables

#: Points of a pattern.
MOST_POINTS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class DensePattern:
    """The variables of a pattern, the factors that belong to it, and the axes of the dense tensor:
    the name of each, its extent, and the index that picks a place along it.
    """

    vars: tuple[str, ...]
    factors: tuple[Expr, ...]
    axes: Mapping[tuple[Affine, int], str]


def pattern_of(problem: Problem, term: ProductTerm) -> DensePattern | None:
    """The short index tensors that share no variable with a long one."""
    uses = [(a, d, i) for a, d, i in problem.index_uses()]
    outside = [(a, d, i) for a, d, i in uses if _is_outside(problem, term, a)]
    short = {id(i): _is_short(problem, i) for _, _, i in outside}
    if not outside or any(a.indices and not _is_outside(problem, term, a) for a, _, _ in uses):
        return None
    long = {v for _, _, i in outside if not short[id(i)] for v in variables(i)}
    vars: set[str] = set()
    # the shortest first: edges of a small graph are short, and have nothing to do with coefficients
    groups = _groups([variables(i) for _, _, i in outside])
    for group in sorted(groups, key=lambda vs: extent_of(problem, vs)):
        if not group & long and extent_of(problem, vars | group) <= MOST_POINTS:
            vars |= group
    own = tuple(f for f in term.factors if variables(f) and _is_own(problem, f, vars))
    ordered = tuple(v for v in term.variables if v in vars)
    if not vars:
        return None
    axes = _axes(problem, term, own, vars)
    rest = any(variables(f) for f in term.factors if f not in own)
    if not axes or not rest:
        return None
    return DensePattern(ordered, own, axes)


def _groups(related: Iterable[tuple[str, ...]]) -> list[set[str]]:
    """Variables that are related, directly or by others."""
    groups: list[set[str]] = []
    for vars in related:
        met = [g for g in groups if g & {*vars}]
        groups = [g for g in groups if g not in met] + [{*vars}.union(*met)]
    return groups


def _is_own(problem: Problem, factor: Expr, vars: set[str]) -> bool:
    """Whether a factor is part of the pattern: short, and of its variables alone."""
    tensors = {a.tensor for a in accesses(factor)}
    sizes = [prod(int(s) for s in problem.kinds[name].shape) for name in tensors]
    return set(variables(factor)) <= vars and max(sizes, default=0) <= MOST_POINTS


def _is_outside(problem: Problem, term: ProductTerm, access: Access) -> bool:
    """Whether an access is a value, or the left side, rather than part of an index."""
    values = [a for f in term.factors for a in accesses(f, nested=False)]
    return access is problem.statement.target or any(access == a for a in values)


def _is_short(problem: Problem, index: Affine) -> bool:
    atom = index.atom
    if not isinstance(atom, Access) or any(i.var is None for i in atom.indices):
        return False
    return prod(int(s) for s in problem.kinds[atom.tensor].shape) <= MOST_POINTS


def _axes(
    problem: Problem, term: ProductTerm, own: tuple[Expr, ...], vars: set[str]
) -> dict[tuple[Affine, int], str] | None:
    """An axis for each index that the pattern decides, and for each of its variables that is an
    index by itself.
    """
    taken, found = names_of(problem.statement), {}
    others = [a for f in term.factors if f not in own for a in accesses(f, nested=False)]
    for access in (problem.statement.target, *others):
        for dim, index in enumerate(access.indices):
            mentioned = set(variables(index)) & vars
            if not mentioned:
                continue
            if not mentioned >= set(variables(index)) or index.atom is None:
                return None
            key = index, int(problem.size_of(access, dim))
            if key not in found:
                found[key] = index.var or fresh("x", taken)
    return found


def left_axes(problem: Problem, pattern: DensePattern) -> set[str]:
    """Axes of the left side: what is scattered through a short table is a matrix product."""
    target = problem.statement.target
    keys = zip(target.indices, (int(s) for s in problem.shape))
    return {axis for key in keys if (axis := pattern.axes.get(key)) is not None}


def index_tensors(pattern: DensePattern) -> tuple[str, ...]:
    every = (*(index for index, _ in pattern.axes), *index_expressions(pattern.factors))
    return tuple(dict.fromkeys(a.tensor for index in every for a in accesses(index)))


def index_expressions(factors: tuple[Expr, ...]) -> list[Affine]:
    return [i for f in factors for a in accesses(f) for i in a.indices if any(accesses(i))]
