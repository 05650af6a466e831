"""A short pattern of index tensors, such as Clebsch-Gordan coefficients, as one small dense tensor:
the statement loses its index tensors and becomes matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from insum import memory
from insum.contraction import cheapest
from insum.graph import live_terms, lower
from insum.host.parts import Part, sub_problem, tensor_kind
from insum.host.places import Call
from insum.host.roles import as_tensor
from insum.lang.bind import Problem
from insum.lang.expand import Term
from insum.lang.expr import (
    Access,
    Affine,
    Expr,
    accesses,
    fresh,
    index_of,
    names_of,
    rewrite,
    tensors_of,
    variables,
)
from insum.runtime.check import evaluated

#: Points of a pattern, elements of the dense tensor, and by how much more the dense product may
#: multiply than there are points: matrix products are so much faster.
MOST_POINTS, MOST_ELEMENTS, MORE_WORK = 4096, 1 << 20, 8
Lowering: TypeAlias = Callable[[Call], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """The variables of a pattern, the factors that belong to it, and the axes of the dense tensor:
    the name of each, its extent, and the index that picks a place along it.
    """

    vars: tuple[str, ...]
    factors: tuple[Expr, ...]
    axes: Mapping[tuple[Affine, int], str]


@dataclass(frozen=True, slots=True, eq=False)
class Patterns:
    problem: Problem
    pattern: Pattern
    name_of_dense: str
    coefficients: Part | None
    reads: tuple[str, ...]
    then: Lowering
    exactly: Lowering
    key: tuple[object, ...]
    name = "patterns"

    @property
    def why(self) -> str:
        inner = getattr(self.then, "why", "")
        return "a short pattern is a small dense tensor, kept with it" + (inner and f"; {inner}")

    def __call__(self, call: Call) -> Tensor:
        more = [memory.entry_of(as_tensor(call.values[n])).serial for n in self.reads]
        key = (self.key, *more)
        dense = call.kept(key, lambda: self.made(call))
        values = {**call.indices(), self.name_of_dense: dense}
        found = self.then(Call(values, lambda: values, call.entries))
        # Zeros of the dense tensor are absent points, which must not meet what is not finite.
        return found if found.sum().isfinite() else self.exactly(call)

    def made(self, call: Call) -> Tensor:
        problem, pattern, values = self.problem, self.pattern, call.indices()
        sizes = [int(problem.extents[v]) for v in pattern.vars]
        grid = {
            v: torch.arange(n).reshape([-1 if k == at else 1 for k in range(len(sizes))])
            for at, (v, n) in enumerate(zip(pattern.vars, sizes))
        }
        present = torch.ones(sizes, dtype=torch.bool)
        places: list[Tensor] = []
        for index, _ in pattern.axes:
            place, there = evaluated(problem, index, values, grid)
            present = present & there
            places.append(place.expand(sizes))
        for index in _indices(pattern.factors):
            present = present & evaluated(problem, index, values, grid)[1]
        dense = torch.zeros([n for _, n in pattern.axes], dtype=self.dtype)
        scale = dense.new_ones(sizes)
        if self.coefficients is not None:
            scale = self.coefficients(values).to(self.dtype)
        at = tuple(place[present] for place in places)
        return dense.index_put_(at, scale[present], accumulate=True)

    @property
    def dtype(self) -> torch.dtype:
        wide = self.problem.dtype == torch.float64 or any(
            k.dtype == torch.float64 for k in self.problem.kinds.values()
        )
        return torch.float64 if wide else torch.float32


def _indices(factors: tuple[Expr, ...]) -> list[Affine]:
    return [i for f in factors for a in accesses(f) for i in a.indices if any(accesses(i))]


def patterns_of(problem: Problem, choose: Callable[[Problem], Lowering]) -> Patterns | None:
    """``choose`` says how the dense statement is run."""
    (term,) = live_terms(problem)
    pattern = _pattern(problem, term)
    if pattern is None:
        return None
    taken = names_of(problem.statement) | set(pattern.axes.values())
    name = fresh("pattern", taken)
    dense = _dense(problem, term, pattern, name)
    factors = [variables(f) for t in dense.terms for f in t.factors]
    steps = cheapest(factors, variables(dense.statement.target), dense.extents).steps
    points = prod(int(problem.extents[v]) for v in term.variables)
    if steps > MORE_WORK * points:
        return None
    part = None
    if pattern.factors:
        target = Access(fresh("scale", taken), tuple(index_of(v) for v in pattern.vars))
        shape = tuple(int(problem.extents[v]) for v in pattern.vars)
        wide = torch.float64
        scale = sub_problem(problem, target, list(pattern.factors), shape, wide, {}, {})
        part = Part(scale, lower(scale))
    indices = {a.tensor for _, _, i in problem.index_uses() for a in accesses(i)}
    reads = tensors_of(part.problem.statement) if part is not None else ()
    whole = Part(problem, lower(problem))
    return Patterns(
        problem,
        pattern,
        name,
        part,
        tuple(n for n in reads if n not in indices and problem.kinds[n].device is not None),
        choose(dense),
        lambda call: whole(call.indices()),
        ("pattern", str(problem.statement), *(n for _, n in pattern.axes)),
    )


def _pattern(problem: Problem, term: Term) -> Pattern | None:
    """The short index tensors that share no variable with a long one."""
    uses = [(a, d, i) for a, d, i in problem.index_uses()]
    outside = [(a, d, i) for a, d, i in uses if _is_outside(problem, term, a)]
    short = {id(i): _is_short(problem, i) for _, _, i in outside}
    if not outside or any(a.indices and not _is_outside(problem, term, a) for a, _, _ in uses):
        return None
    vars: set[str] = {v for _, _, i in outside if short[id(i)] for v in variables(i)}
    while True:
        long = [i for _, _, i in outside if not (short[id(i)] and set(variables(i)) <= vars)]
        fewer = vars - {v for i in long for v in variables(i)}
        if fewer == vars:
            break
        vars = fewer
    own = tuple(f for f in term.factors if variables(f) and _is_own(problem, f, vars))
    ordered = tuple(v for v in term.variables if v in vars)
    if not vars or prod(int(problem.extents[v]) for v in vars) > MOST_POINTS:
        return None
    axes = _axes(problem, term, own, vars)
    rest = any(variables(f) for f in term.factors if f not in own)
    if not axes or not rest or prod(n for _, n in axes) > MOST_ELEMENTS:
        return None
    return Pattern(ordered, own, axes)


def _is_own(problem: Problem, factor: Expr, vars: set[str]) -> bool:
    """Whether a factor is part of the pattern: short, and of its variables alone."""
    tensors = {a.tensor for a in accesses(factor)}
    sizes = [prod(int(s) for s in problem.kinds[name].shape) for name in tensors]
    return set(variables(factor)) <= vars and max(sizes, default=0) <= MOST_POINTS


def _is_outside(problem: Problem, term: Term, access: Access) -> bool:
    """Whether an access is a value, or the left side, rather than part of an index."""
    values = [a for f in term.factors for a in accesses(f, nested=False)]
    return access is problem.statement.target or any(access == a for a in values)


def _is_short(problem: Problem, index: Affine) -> bool:
    atom = index.atom
    if not isinstance(atom, Access) or any(i.var is None for i in atom.indices):
        return False
    return prod(int(s) for s in problem.kinds[atom.tensor].shape) <= MOST_POINTS


def _axes(
    problem: Problem, term: Term, own: tuple[Expr, ...], vars: set[str]
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


def _dense(problem: Problem, term: Term, pattern: Pattern, name: str) -> Problem:
    """The statement with the pattern as a tensor."""

    def changed(access: Access) -> Access:
        is_target = access is problem.statement.target
        shape = problem.shape if is_target else problem.kinds[access.tensor].shape
        indices = [
            index_of(axis) if (axis := pattern.axes.get((index, int(size)))) else index
            for index, size in zip(access.indices, shape)
        ]
        return Access(access.tensor, tuple(indices))

    rest = [rewrite(f, changed) for f in term.factors if f not in pattern.factors]
    table = Access(name, tuple(index_of(axis) for axis in pattern.axes.values()))
    shape = tuple(n for _, n in pattern.axes)
    wide = torch.float64 if problem.dtype == torch.float64 else torch.float32
    return sub_problem(
        problem,
        changed(problem.statement.target),
        [table, *rest],
        tuple(int(s) for s in problem.shape),
        problem.dtype,
        {name: tensor_kind(shape, wide)},
        {axis: n for (_, n), axis in pattern.axes.items()},
    )
