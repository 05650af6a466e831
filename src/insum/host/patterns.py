"""A short pattern of index tensors, such as Clebsch-Gordan coefficients, as one small dense tensor:
the statement loses its index tensors and becomes matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from math import prod

import torch
from torch import Tensor

from insum import memory
from insum.bounded import keep
from insum.graph.contraction import WRITING, cheapest
from insum.graph.lower import live_terms
from insum.graph.value import meeting_dtype
from insum.host.arguments import HostCall, kept_with
from insum.host.operations import lower_on_host
from insum.host.parts import SubProblem, extent_of, is_finite, sub_problem, tensor_kind
from insum.host.pattern_axes import (
    DensePattern,
    index_expressions,
    index_tensors,
    left_axes,
    pattern_of,
)
from insum.host.places import Lowering, on_grid
from insum.lang.bind import Problem
from insum.lang.expand import ProductTerm
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
from insum.runtime.points import variable_grid

#: Elements of the dense tensor.
MOST_ELEMENTS = 1 << 20
#: Measured, in multiplications of the dense statement: what a number that is gathered or scattered
#: takes beside one that is written, and looking for the dense tensor and for what is not finite.
GATHERING, STARTING = 3, 1 << 21
#: As much of what a graph takes is surely less than that.
SURELY = 0.9
#: How many times fewer pairs of places there must be than two axes have for one axis to be better.
WORTH_JOINING = 1.5
#: Dense statements that are kept for one statement: patterns of other values may need others.
MOST_WAYS = 16


@dataclass(frozen=True, slots=True)
class _Reduction:
    """Axes that the dense tensor has not got, because another one determines them (``follows``:
    which), and those that it has instead: ``joint`` ones have a place for each pair of places of
    two axes that the pattern has, and their number.
    """

    follows: tuple[tuple[str, str], ...] = ()
    joint: tuple[tuple[str, int], ...] = ()

    def kept(self, axes: Iterable[str]) -> list[str]:
        gone = dict(self.follows)
        return [axis for axis in (*axes, *dict(self.joint)) if axis not in gone]

    def joining(self, a: str, b: str, name: str, count: int) -> _Reduction:
        moved = [(axis, name if base in (a, b) else base) for axis, base in self.follows]
        rest = tuple(one for one in self.joint if one[0] not in (a, b))
        gone = [(axis, name) for axis in (a, b) if axis not in dict(self.joint)]
        return _Reduction((*moved, *gone), (*rest, (name, count)))


@dataclass(frozen=True, slots=True, eq=False)
class _PatternPlaces:
    """What is made of a pattern's index values alone: which of its points are present, where each
    of these is in the dense tensor and how large that is, None where it would be too large; and for
    each axis that follows another, a table from there (on the left side, a matrix of ones).
    """

    present: Tensor
    places: tuple[Tensor, ...]
    sizes: tuple[int, ...] | None
    reduction: _Reduction
    tables: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """How the dense statement is run, None where it takes more than without; and the names of what
    is made for it.
    """

    lowering: Lowering | None = None
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Patterns:
    """A statement in which a short pattern becomes a dense tensor, where that takes less work, or
    which goes the way ``otherwise``. ``indices``: the index tensors of the pattern, which may come
    back with others; ``reads``: what else it is made of.
    """

    problem: Problem
    term: ProductTerm
    pattern: DensePattern
    coefficients: SubProblem | None
    reads: tuple[str, ...]
    indices: tuple[str, ...]
    choose: Callable[[Problem], Lowering]
    otherwise: Lowering
    key: tuple[object, ...]
    #: By what the dense tensor is reduced to.
    ways: dict[object, Way] = field(default_factory=dict)
    name, slowness = "patterns", 1
    why = "a short pattern is a small dense tensor, kept with it, and the rest matrix products"

    def __call__(self, call: HostCall) -> Tensor:
        own = call.among(self.indices)
        if not own.comes_back(self.key):
            return self.otherwise(call)
        made, way = self.way(own)
        if way.lowering is None:
            return self.otherwise(call)
        tensors = self.dense(own, made), *made.tables
        values = {**call.indices(), **dict(zip(way.names, tensors))}
        found = way.lowering(HostCall(values, call.entries))
        # Zeros of the dense tensor are absent points, which must not meet what is not finite.
        return found if is_finite(found, self.dtype) else self.otherwise(call)

    def chosen(self, call: HostCall) -> Lowering:
        """This, or the other way where values decide for that."""
        way = self.way(call.among(self.indices))[1]
        return self.otherwise if way.lowering is None else self

    def way(self, own: HostCall) -> tuple[_PatternPlaces, Way]:
        made = own.kept(self.key, lambda: self.made(own))
        if made.sizes is None:
            return made, Way()
        found = self.ways.get(made.reduction)
        if found is None:
            found = keep(self.ways, made.reduction, self.dense_way(made.reduction), MOST_WAYS)
        return made, found

    def dense(self, own: HostCall, made: _PatternPlaces) -> Tensor:
        """The dense tensor, kept with the youngest of its coefficients: what is trained is never
        the same again, and what was made of it goes when it changes.
        """
        given = {name: own.values[name] for name in self.reads}
        entries = {n: memory.entry_of(v) for n, v in given.items() if isinstance(v, Tensor)}
        # a number is told by its text, which no serial is
        known = [entries[n].serial if n in entries else repr(v) for n, v in given.items()]
        key = "dense", self.key, *known
        if not entries:
            return own.kept(key, lambda: self.filled(own, made))
        youngest = max(entries.values(), key=lambda entry: entry.serial)
        return kept_with(youngest, (*key, own.serials), lambda: self.filled(own, made))

    # --- the dense statement ---

    def dense_way(self, reduction: _Reduction) -> Way:
        taken = self.names | set(dict(reduction.joint))
        names = tuple(fresh("pattern", taken) for _ in range(1 + len(reduction.follows)))
        dense = _dense(self.problem, self.term, self.pattern, reduction, names)
        if _steps(dense) > _most_steps(self.problem, self.term, self.otherwise):
            return Way()
        rest = [f for f in self.term.factors if f not in self.pattern.factors]
        if _moved(dense, dense.terms[0].factors, names) > _moved(self.problem, rest):
            return Way()  # a few places of long axes: most of what is read, no point asks for
        return Way(self.choose(dense), names)

    # --- values ---

    def made(self, call: HostCall) -> _PatternPlaces:
        problem, pattern, values = self.problem, self.pattern, call.indices()
        sizes = [int(problem.extents[v]) for v in pattern.vars]
        grid = variable_grid(pattern.vars, tuple(sizes))
        present = torch.ones(sizes, dtype=torch.bool)
        places: dict[str, Tensor] = {}
        for (index, _), axis in pattern.axes.items():
            place, there = on_grid(problem, index, values, grid)
            places[axis] = place.expand(sizes)
            present = present if there is None else present & there
        for index in index_expressions(pattern.factors):
            there = on_grid(problem, index, values, grid)[1]
            present = present if there is None else present & there
        at = {axis: place[present] for axis, place in places.items()}
        extents = {axis: n for (_, n), axis in pattern.axes.items()}
        reduction = self.reduced(at, extents)
        extents |= dict(reduction.joint)
        kept = reduction.kept(pattern.axes.values())
        shape = tuple(extents[axis] for axis in kept)
        if prod(shape) > MOST_ELEMENTS:
            return _PatternPlaces(present, (), None, reduction, ())
        left = left_axes(self.problem, self.pattern)
        tables = [
            _ones(at[axis], extents[axis], at[base], extents[base], self.dtype)
            if axis in left
            else torch.zeros(extents[base], dtype=torch.int64).index_put_((at[base],), at[axis])
            for axis, base in reduction.follows
        ]
        where = tuple(at[axis] for axis in kept)
        return _PatternPlaces(present, where, shape, reduction, tuple(tables))

    def filled(self, call: HostCall, made: _PatternPlaces) -> Tensor:
        scale = torch.ones(made.present.shape, dtype=self.dtype)
        if self.coefficients is not None:
            scale = self.coefficients(call.indices()).to(self.dtype)
        assert made.sizes is not None
        dense = torch.zeros(made.sizes, dtype=self.dtype)
        return dense.index_put_(made.places, scale[made.present], accumulate=True)

    def reduced(self, at: dict[str, Tensor], extents: Mapping[str, int]) -> _Reduction:
        """What takes least: all axes, or without those that follow others; then, as long as that
        takes less, one axis for the pairs of two. Places along those are added to ``at``.
        """
        best = min((_Reduction(), _Reduction(_follows(at, extents))), key=self.steps)
        taken = set(self.names)
        while True:
            found, count, pairs = best, self.steps(best), None
            sizes, kept = {**extents, **dict(best.joint)}, best.kept(extents)
            # one axis for all of them would be the pattern as it was
            for a, b in combinations(kept, 2) if len(kept) > 2 else ():
                numbers, places = torch.unique(at[a] * sizes[b] + at[b], return_inverse=True)
                if not len(numbers) or WORTH_JOINING * len(numbers) > sizes[a] * sizes[b]:
                    continue
                one = best.joining(a, b, fresh("x", set(taken)), len(numbers))
                if (steps := self.steps(one)) < count:
                    found, count, pairs = one, steps, places
            if pairs is None:
                return best
            best = found
            at[best.joint[-1][0]] = pairs
            taken.add(best.joint[-1][0])

    def steps(self, reduction: _Reduction) -> int:
        names = ("dense", *(f"table_{k}" for k in range(len(reduction.follows))))
        return _steps(_dense(self.problem, self.term, self.pattern, reduction, names), 1)

    @property
    def names(self) -> set[str]:
        return names_of(self.problem.statement) | set(self.pattern.axes.values())

    @property
    def dtype(self) -> torch.dtype:
        return meeting_dtype(self.problem)


def _follows(at: Mapping[str, Tensor], extents: Mapping[str, int]) -> tuple[tuple[str, str], ...]:
    """Axes whose place is known from that of another one, longer and not left out itself."""
    kept: list[str] = []
    found: list[tuple[str, str]] = []
    for axis in sorted(at, key=lambda name: -extents[name]):
        base = next((b for b in kept if _determines(at[b], at[axis], extents[axis])), None)
        if base is None:
            kept.append(axis)
        else:
            found.append((axis, base))
    return tuple(found)


def _determines(base: Tensor, other: Tensor, extent: int) -> bool:
    return len(torch.unique(base * extent + other)) == len(torch.unique(base))


def _ones(rows: Tensor, count: int, columns: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """A matrix with ones at these places."""
    return torch.zeros(count, width, dtype=dtype).index_put_(
        (rows, columns), torch.ones((), dtype=dtype)
    )


def _steps(problem: Problem, gathering: int = GATHERING) -> int:
    """What a product takes: the best order, and what is gathered for it; a pattern's own tables
    gather few rows of each tensor, which stay in cache.
    """
    (term,) = problem.terms
    factors = [variables(f) for f in term.factors]
    order = cheapest(factors, variables(problem.statement.target), problem.extents)
    found = [f for f in (problem.statement.target, *term.factors) if index_expressions((f,))]
    gathered = sum(extent_of(problem, variables(f)) for f in found)
    return order.steps + gathering * WRITING * gathered


def _moved(problem: Problem, factors: Iterable[Expr], made: tuple[str, ...] = ()) -> int:
    """How many numbers a statement reads and writes, but for tensors that are made for it."""
    given = [f for f in factors if not (isinstance(f, Access) and f.tensor in made)]
    return sum(extent_of(problem, variables(f)) for f in (problem.statement.target, *given))


def _most_steps(problem: Problem, term: ProductTerm, otherwise: Lowering) -> int:
    """What the dense statement may take, so that it is not slower than the other way."""
    if otherwise.slowness:
        return otherwise.slowness * extent_of(problem, term.variables) - STARTING
    return int(SURELY * _steps(problem)) - STARTING


def _least_steps(problem: Problem, term: ProductTerm, pattern: DensePattern) -> int:
    """What the dense statement takes at least, whatever the values, as long as no two points of
    the pattern are the same: the axes that are left then have a place for each. Two axes stay as
    they are, unless one is as long as the pattern and determines the other. The dense tensor meets
    one of the other factors first.
    """
    sizes, points = [n for _, n in pattern.axes], extent_of(problem, pattern.vars)
    elements = prod(sizes)
    if len(sizes) > 2 or points <= max(sizes):
        elements = min(elements, points)
    others = [variables(f) for f in term.factors if f not in pattern.factors]
    met = [extent_of(problem, [v for v in vs if v not in pattern.vars]) for vs in others]
    return elements * min(met)


def patterns_of(
    problem: Problem, choose: Callable[[Problem], Lowering], otherwise: Callable[[], Lowering]
) -> Patterns | None:
    """``choose`` says how the dense statement is run, ``otherwise`` how this one is without."""
    (term,) = live_terms(problem)
    pattern = pattern_of(problem, term)
    if pattern is None or _sums_nothing(problem, pattern):
        return None
    other = otherwise()
    if _least_steps(problem, term, pattern) > _most_steps(problem, term, other):
        return None
    part = _coefficients(problem, pattern)
    indices = {a.tensor for _, _, i in problem.index_uses() for a in accesses(i)}
    reads = tensors_of(part.problem.statement) if part is not None else ()
    axes = [(str(index), n) for index, n in pattern.axes]
    return Patterns(
        problem,
        term,
        pattern,
        part,
        tuple(n for n in reads if n not in indices),
        index_tensors(pattern),
        choose,
        other,
        # which factors are the pattern's, and so its axes, is decided by sizes
        ("pattern", f"{problem.statement} {pattern.factors} {axes}", meeting_dtype(problem)),
    )


def _sums_nothing(problem: Problem, pattern: DensePattern) -> bool:
    """Whether each point of a pattern is a place of the left side: it only says what is read."""
    return {*pattern.vars} <= {index.var for index in problem.statement.target.indices}


def _coefficients(problem: Problem, pattern: DensePattern) -> SubProblem | None:
    """What scales the points of a pattern."""
    if not pattern.factors:
        return None
    name = fresh("scale", names_of(problem.statement))
    target = Access(name, tuple(index_of(v) for v in pattern.vars))
    shape = tuple(int(problem.extents[v]) for v in pattern.vars)
    scale = sub_problem(
        problem, target, list(pattern.factors), shape, meeting_dtype(problem), {}, {}
    )
    return SubProblem(scale, lower_on_host(scale))


def _dense(
    problem: Problem,
    term: ProductTerm,
    pattern: DensePattern,
    reduction: _Reduction,
    names: tuple[str, ...],
) -> Problem:
    """The statement with the pattern as a tensor, and tables for the axes that follow others; these
    have the names.
    """
    follows = dict(reduction.follows)
    extents = {axis: n for (_, n), axis in pattern.axes.items()} | dict(reduction.joint)
    tables = dict(zip(follows, names[1:]))
    left = left_axes(problem, pattern)

    def place(axis: str) -> Affine:
        if axis not in follows or axis in left:
            return index_of(axis)
        return Affine(((1, Access(tables[axis], (index_of(follows[axis]),))),))

    def changed(access: Access) -> Access:
        is_target = access is problem.statement.target
        shape = problem.shape if is_target else problem.kinds[access.tensor].shape
        indices = [
            place(axis) if (axis := pattern.axes.get((index, int(size)))) else index
            for index, size in zip(access.indices, shape)
        ]
        return Access(access.tensor, tuple(indices))

    rest = [rewrite(f, changed) for f in term.factors if f not in pattern.factors]
    kept = reduction.kept(pattern.axes.values())
    dense = Access(names[0], tuple(index_of(axis) for axis in kept))
    kinds = {names[0]: tensor_kind(tuple(extents[a] for a in kept), meeting_dtype(problem))}
    for axis, base in follows.items():
        if axis in left:
            rest.append(Access(tables[axis], (index_of(axis), index_of(base))))
            shape = extents[axis], extents[base]
            kinds[tables[axis]] = tensor_kind(shape, meeting_dtype(problem))
        else:
            kinds[tables[axis]] = tensor_kind((extents[base],), torch.int64)
    return sub_problem(
        problem,
        changed(problem.statement.target),
        [dense, *rest],
        tuple(int(s) for s in problem.shape),
        problem.dtype,
        kinds,
        extents,
    )
