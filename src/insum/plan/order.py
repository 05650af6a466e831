"""The order of contraction: a product of three and more factors as one statement, or as several
with buffers between them.

Two laws give the choices. A sum goes past factors that do not depend on its variable, so that
``A[i,j] * B[j,k] * C[k,l]`` may be two products of two. And what is done to every row of a tensor
need not be done to every reading of it: ``X[src[e],f] * W[f,h]`` is ``XW[src[e],h]`` of a product
over the rows of ``X``, and a scatter may come before a product that does not depend on what is
scattered. A dimension that is indexed through a tensor is therefore a variable of its own, which
the index fixes: a step reads it through the index, or walks all of it and leaves the index to a
later step, whichever has fewer points.

Everything here depends on the statement and on sizes alone, never on values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from insum.lang.expr import (
    Access,
    Affine,
    Expr,
    accesses,
    fresh,
    index_of,
    rewrite,
    variables,
)

#: What the costs are counted in: one point of a loop, a multiplication and an addition. Moving one
#: number to or from memory takes as long as so many points, one more statement as so many.
MOVED, STARTED = 16, 2**22
#: A path is taken on its own account where it is so many times cheaper than one statement; where
#: its buffers are larger than everything that is read and written, so many times.
CLEARLY, BY_FAR = 4, 16
#: Buffers of more elements than this, and of more than so many times those of all arguments, are
#: never made.
MOST_BUFFERED, MOST_OF_ARGUMENTS = 2**24, 8
#: Up to so many factors every order is looked at, and up to so many where that is asked for;
#: beyond it the next step is the cheapest one, of so many factors that share a variable.
MOST_SEARCHED, MOST_ASKED, MOST_SHARING = 5, 8, 6
#: Up to so many factors of one step that read through indices, every way to read them is looked at.
MOST_OPENED = 3

#: A buffer is called after what it is made of, up to so many letters.
LONGEST_NAME = 24

#: Steps as in opt_einsum: positions of factors, which are taken out; what they make comes last.
Path: TypeAlias = tuple[tuple[int, ...], ...]
#: A dimension whose size is that of a variable: a tensor ('' is the output) and which of its own.
Place: TypeAlias = tuple[str, int]


class CannotOrder(Exception):
    """Factors at these positions cannot be a statement of their own."""

    def __init__(self, positions: tuple[int, ...]) -> None:
        super().__init__(f"the factors at {positions} cannot be a statement of their own")
        self.positions = positions


@dataclass(frozen=True, slots=True)
class Term:
    """A product that can be ordered.

    Attributes:
        factors: in the order in which they are written, numbers aside.
        fixed: those that only the last statement may multiply by; ``exact`` those that have no
            precision of their own, and need others to get one.
        extents: of index variables; ``shapes`` of tensors and ``shape`` of the output.
        padded: index tensors in which -1 is absence.
        taken: names that buffers and variables of our own must not have.
        may_scatter: whether a buffer may be scattered into instead of the output.
        may_index: whether statements before the last may read or write through indices.
    """

    target: Access
    factors: tuple[Expr, ...]
    fixed: frozenset[int]
    exact: frozenset[int]
    extents: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    shape: tuple[int, ...]
    padded: frozenset[str] = frozenset()
    taken: frozenset[str] = frozenset()
    may_scatter: bool = True
    may_index: bool = True


@dataclass(frozen=True, slots=True)
class Step:
    """One statement of a path.

    Attributes:
        dims: the variable that each dimension of the target is as long as; of a buffer.
        positions: what it takes out of the factors that are left.
    """

    target: Access
    factors: tuple[Expr, ...]
    dims: tuple[str, ...]
    positions: tuple[int, ...]
    cost: float
    points: float


@dataclass(frozen=True, slots=True)
class Ordered:
    """A path as statements; the last has the target of the whole, perhaps through variables of our
    own for dimensions that an earlier one has scattered into.

    Attributes:
        places: what the variables of our own run over.
        buffered: elements of all buffers.
    """

    steps: tuple[Step, ...]
    places: Mapping[str, Place]
    buffered: float

    @property
    def path(self) -> Path:
        return tuple(step.positions for step in self.steps)

    @property
    def cost(self) -> float:
        return sum(step.cost for step in self.steps)

    @property
    def points(self) -> float:
        return sum(step.points for step in self.steps)


def ordered(term: Term, wish: str | Path = "auto") -> Ordered:
    """The path of a product: the best one for ``auto`` (one statement, unless another path is
    clearly better), ``optimal`` and ``greedy``, or the one that is wished for.

    >>> from insum.lang.parser import parse
    >>> statement = parse("Y[i,l] = A[i,j] * B[j,k] * C[k,l]")
    >>> sizes, square = dict.fromkeys("ijkl", 1024), (1024, 1024)
    >>> shapes = dict.fromkeys("ABC", square)
    >>> none = frozenset()
    >>> chain = Term(
    ...     statement.target, statement.value.factors, none, none, sizes, shapes, square
    ... )
    >>> ordered(chain).path
    ((0, 1), (0, 1))
    >>> [str(step.target) for step in ordered(chain).steps]
    ['A_B[i,k]', 'Y[i,l]']
    """
    together = _made(term, (tuple(range(len(term.factors))),))
    match wish:
        case tuple():
            return _made(term, wish)
        case "auto" if together.cost <= CLEARLY * _least(term):
            return together
        case "auto":
            found = _made(term, _searched(term, "auto"))
            return found if _is_clear(found, together, term) else together
        case _:
            found = _made(term, _searched(term, wish))
            return found if found.cost < together.cost else together


def _elements(term: Term) -> float:
    """Of everything that is read and written."""
    names = {a.tensor for f in term.factors for a in accesses(f)}
    return math.prod(term.shape) + sum(math.prod(term.shapes.get(n, ())) for n in names)


def _least(term: Term) -> float:
    """What two statements cost at least; a search for a path begins with it."""
    builder = _Builder(term)
    reads = {a for f in term.factors for a in accesses(f, nested=False)}
    read = sum(builder.read_by(a) for a in reads)
    return 2 * STARTED + MOVED * (math.prod(term.shape) + read)


def _is_clear(found: Ordered, together: Ordered, term: Term) -> bool:
    arguments = _elements(term)
    if found.buffered > max(MOST_BUFFERED, MOST_OF_ARGUMENTS * arguments):
        return False
    better = BY_FAR if found.buffered > arguments else CLEARLY
    return found.cost * better <= together.cost


def _made(term: Term, path: Path) -> Ordered:
    """The statements of a path."""
    builder = _Builder(term)
    state, steps, buffered = builder.start, [], 0.0
    for positions in path[:-1]:
        found = builder.buffer(state, positions)
        if found is None:
            raise CannotOrder(positions)
        found = builder.renamed(found)
        steps.append(found.step)
        buffered += math.prod(builder.shapes[found.step.target.tensor])
        state = found.after
    steps.append(builder.last(state, path[-1]))
    used = {v for s in steps for f in (s.target, *s.factors) for v in variables(f)}
    places = {v: builder.places[v] for s in steps for v in (*used, *s.dims) if v in builder.places}
    return Ordered(tuple(steps), places, buffered)


# --- one step -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Factor:
    """What is multiplied, and which of the statement's factors are in it, as bits."""

    inside: int
    value: Expr

    @property
    def first(self) -> int:
        """Factors stand in the order in which the first of each was written."""
        return self.inside & -self.inside


@dataclass(frozen=True, slots=True)
class _State:
    """What is left to do."""

    target: Access
    factors: tuple[_Factor, ...]

    def variables(self) -> set[str]:
        parts = (self.target, *(f.value for f in self.factors))
        return {v for part in parts for v in variables(part)}


@dataclass(frozen=True, slots=True)
class _Buffer:
    """What some factors become: the step that fills it, and what is left to do then; what stands
    for the buffer is the last factor of that.
    """

    step: Step
    after: _State

    @property
    def read(self) -> Access:
        value = self.after.factors[-1].value
        assert isinstance(value, Access)
        return value


class _Builder:
    """Makes steps, and remembers the variables and buffers that they need."""

    def __init__(self, term: Term) -> None:
        self.term = term
        self.extents = dict(term.extents)
        self.shapes = dict(term.shapes)
        self.places: dict[str, Place] = {}
        self.dims: dict[Place, Place] = {}  # of buffers, where their sizes come from
        self.own: dict[tuple[Place, Affine], str] = {}
        self.taken = {*term.taken, term.target.tensor, *term.shapes, *term.extents}
        self.fixed = sum(1 << k for k in term.fixed)
        self.exact = sum(1 << k for k in term.exact)
        self.start = _State(
            term.target, tuple(_Factor(1 << k, f) for k, f in enumerate(term.factors))
        )

    def last(self, state: _State, positions: tuple[int, ...] = ()) -> Step:
        """Everything that is left, as one statement."""
        factors = sorted(state.factors, key=lambda f: f.first)
        values = tuple(f.value for f in factors)
        return self.step(state.target, values, (), positions, math.prod(self.term.shape))

    def step(
        self,
        target: Access,
        factors: tuple[Expr, ...],
        dims: tuple[str, ...],
        positions: tuple[int, ...],
        written: float,
    ) -> Step:
        points = self.size_of({v for f in (target, *factors) for v in variables(f)})
        moved = written + sum(self.read_by(a) for f in factors for a in accesses(f))
        return Step(target, factors, dims, positions, points + MOVED * moved + STARTED, points)

    def read_by(self, access: Access) -> float:
        """How many elements an access reads, each once."""
        whole = math.prod(self.shapes.get(access.tensor, ()))
        return min(whole, self.size_of(set(variables(access))))

    def size_of(self, names: Iterable[str]) -> float:
        return math.prod(float(self.extents[v]) for v in names)

    # --- buffers ---

    def buffer(self, state: _State, positions: tuple[int, ...]) -> _Buffer | None:
        """The cheapest buffer of these factors that means the same; None where there is none."""
        inside = sum(state.factors[p].inside for p in positions)
        if inside & self.fixed or not inside & ~self.exact:
            return None
        ways = (self.filled(state, positions, which) for which in _ways(state, positions))
        allowed = [made for made in ways if self.is_allowed(made)]
        return min(allowed, key=lambda made: made.step.cost, default=None)

    def is_allowed(self, made: _Buffer) -> bool:
        """An absent point must be absent from the buffer: were its variable kept, the 0 there
        would be multiplied by what others have for that point.
        """
        parts = (made.step.target, *made.step.factors)
        indices = [a for f in parts for i in _indices(f) for a in accesses(i)]
        kept = set(variables(made.step.target)) & set(variables(made.read))
        lost = any(a.tensor in self.term.padded and kept & {*variables(a)} for a in indices)
        return not lost and (self.term.may_index or not indices)

    def filled(self, state: _State, positions: tuple[int, ...], opened: frozenset[int]) -> _Buffer:
        """The buffer of these factors, where those at ``opened`` are read without their indices."""
        taken = sorted((state.factors[p] for p in positions), key=lambda f: f.first)
        whole = {state.factors[p].inside for p in opened}
        walked: dict[str, Affine] = {}
        factors = tuple(self.open(f.value, walked) if f.inside in whole else f.value for f in taken)
        order = dict.fromkeys(v for f in factors for v in variables(f))
        rest = tuple(f for p, f in enumerate(state.factors) if p not in positions)
        # what is walked is read through its index later, whose variables are then needed
        needed = {v for index in walked.values() for v in variables(index)}
        left, scattered = self.scattered(_State(state.target, rest), set(order), needed)
        later = left.variables() | needed
        kept = {v: index_of(v) for v in order if v in later and v not in walked}
        dims = (*walked, *scattered, *kept)
        written = (*map(index_of, walked), *scattered.values(), *kept.values())
        read = (*walked.values(), *map(index_of, scattered), *kept.values())
        inside = sum(f.inside for f in taken)
        name = f"#{inside}[{','.join(map(str, (*written, *read)))}]"
        self.note(name, dims)
        size = math.prod(self.shapes[name]) * (2 if scattered else 1)  # with zeros first
        step = self.step(Access(name, written), factors, dims, positions, size)
        return _Buffer(
            step, replace(left, factors=(*left.factors, _Factor(inside, Access(name, read))))
        )

    def note(self, name: str, dims: tuple[str, ...]) -> None:
        """Remember a buffer with these variables along its dimensions."""
        self.shapes[name] = tuple(self.extents[v] for v in dims)
        self.dims |= {(name, d): self.places[v] for d, v in enumerate(dims) if v in self.places}

    def scattered(
        self, left: _State, inside: set[str], needed: set[str]
    ) -> tuple[_State, dict[str, Affine]]:
        """What is left where a buffer over the variables ``inside`` is scattered through indices of
        the left side and of other factors, with the variables that take their places: nothing
        else depends on what is scattered, ``needed`` has none of it, and there are fewer places
        than contributions.
        """
        found = {
            place: index
            for place, index in self.outer_indices(left)
            if inside >= set(variables(index))
        }
        while found:
            names = {self.variable(place, index): index for place, index in found.items()}
            after = self.replaced(left, found)
            others = after.variables() | needed
            if all(set(variables(index)) - others for index in found.values()):
                own = {v for index in found.values() for v in variables(index)} - others
                few = self.size_of(names) <= self.size_of(own)
                return (after, names) if few else (left, {})
            found = {p: i for p, i in found.items() if set(variables(i)) - others}
        return left, {}

    # --- variables and names of our own ---

    def outer_indices(self, state: _State) -> Iterator[tuple[Place, Affine]]:
        """Dimensions of the left side, and of factors that read one tensor, that are indexed
        through tensors.
        """
        if self.term.may_scatter:
            for dim, index in enumerate(state.target.indices):
                if _reads(index):
                    yield ("", dim), index
        for factor in state.factors:
            if _can_open(factor.value):
                (access,) = accesses(factor.value, nested=False)
                for dim, index in enumerate(access.indices):
                    if _reads(index):
                        yield self.place(access, dim), index

    def replaced(self, state: _State, found: Mapping[Place, Affine]) -> _State:
        """With variables in place of these indices."""

        def change(access: Access) -> Access:
            return replace(
                access,
                indices=tuple(
                    index_of(self.variable(self.place(access, d), i))
                    if found.get(self.place(access, d)) == i
                    else i
                    for d, i in enumerate(access.indices)
                ),
            )

        target = tuple(
            index_of(self.variable(("", d), i)) if found.get(("", d)) == i else i
            for d, i in enumerate(state.target.indices)
        )
        factors = tuple(replace(f, value=rewrite(f.value, change)) for f in state.factors)
        return _State(replace(state.target, indices=target), factors)

    def open(self, factor: Expr, walked: dict[str, Affine]) -> Expr:
        """A factor with a variable for each dimension that is indexed through a tensor."""

        def change(access: Access) -> Access:
            indices = list(access.indices)
            for dim, index in enumerate(access.indices):
                if _reads(index):
                    name = self.variable(self.place(access, dim), index)
                    walked[name], indices[dim] = index, index_of(name)
            return replace(access, indices=tuple(indices))

        return rewrite(factor, change)

    def place(self, access: Access, dim: int) -> Place:
        return self.dims.get((access.tensor, dim), (access.tensor, dim))

    def variable(self, place: Place, index: Affine) -> str:
        """A variable over a dimension; one for each way to index it, because two readings of a
        tensor walk it apart.
        """
        found = self.own.get((place, index))
        if found is None:
            tensor, dim = place
            wanted = f"{tensor or self.term.target.tensor}{dim}".lower()
            found = self.own[place, index] = fresh(wanted, self.taken)
            self.places[found] = place
            shape = self.term.shapes[tensor] if tensor else self.term.shape
            self.extents[found] = shape[dim]
        return found

    def renamed(self, made: _Buffer) -> _Buffer:
        """The buffer under a name for people: that of what is multiplied."""
        step, read = made.step, made.read
        names = dict.fromkeys(a.tensor for f in step.factors for a in accesses(f, nested=False))
        wanted = "_".join(names)
        name = fresh(wanted if len(wanted) <= LONGEST_NAME else "part", self.taken)
        self.note(name, step.dims)
        last = replace(made.after.factors[-1], value=replace(read, tensor=name))
        return _Buffer(
            replace(step, target=replace(step.target, tensor=name)),
            replace(made.after, factors=(*made.after.factors[:-1], last)),
        )


def _ways(state: _State, positions: tuple[int, ...]) -> Iterator[frozenset[int]]:
    """Which of these factors to read without their indices: none first."""
    could = [p for p in positions if _can_open(state.factors[p].value)]
    for count in range(len(could) + 1 if len(could) <= MOST_OPENED else 1):
        yield from map(frozenset, itertools.combinations(could, count))


def _can_open(factor: Expr) -> bool:
    """Whether a factor reads one tensor, and that through indices."""
    return len(list(accesses(factor, nested=False))) == 1 and any(True for _ in _indices(factor))


def _indices(factor: Expr) -> Iterator[Affine]:
    """The index expressions of a factor that read tensors."""
    for access in accesses(factor, nested=False):
        yield from filter(_reads, access.indices)


def _reads(index: Affine) -> bool:
    return any(True for _ in accesses(index))


# --- the search -----------------------------------------------------------------------------------

#: What each step takes: sets of the statement's factors, as bits.
_Taken: TypeAlias = tuple[tuple[int, ...], ...]


def _searched(term: Term, wish: str) -> Path:
    """The cheapest path that is found."""
    builder = _Builder(term)
    free = [f for k, f in enumerate(term.factors) if k not in term.fixed and variables(f)]
    most = {"auto": MOST_SEARCHED, "optimal": MOST_ASKED}.get(wish, 0)
    steps = _exhaustive(builder) if len(free) <= most else _greedy(builder)
    return _positions(builder.start, steps)


def _positions(state: _State, steps: _Taken) -> Path:
    """The steps by positions at their time; the last takes everything."""
    left, path = [factor.inside for factor in state.factors], []
    for step in steps:
        path.append(tuple(sorted(left.index(inside) for inside in step)))
        left = [inside for inside in left if inside not in step] + [sum(step)]
    return (*path, tuple(range(len(left))))


def _next(builder: _Builder, state: _State, most: int) -> Iterator[tuple[tuple[int, ...], _Buffer]]:
    """What can be buffered next: up to ``most`` factors, but not all of them."""
    free = [p for p, f in enumerate(state.factors) if variables(f.value)]
    for count in range(2, min(most, len(state.factors) - 1) + 1):
        for positions in itertools.combinations(free, count):
            found = builder.buffer(state, positions)
            if found is not None:
                yield tuple(state.factors[p].inside for p in positions), found


def _exhaustive(builder: _Builder) -> _Taken:
    """Every order of steps of two and more factors; what is left may be one statement at any
    time.
    """
    known: dict[object, tuple[float, _Taken]] = {}

    def best(state: _State) -> tuple[float, _Taken]:
        key = state.target, frozenset(state.factors)
        if key in known:
            return known[key]
        cost: float = builder.last(state).cost
        steps: _Taken = ()
        for taken, made in _next(builder, state, len(state.factors)):
            if made.step.cost < cost:
                after, later = best(made.after)
                if made.step.cost + after < cost:
                    cost, steps = made.step.cost + after, (taken, *later)
        known[key] = cost, steps
        return cost, steps

    return best(builder.start)[1]


def _greedy(builder: _Builder) -> _Taken:
    """One cheapest pair after the other; of the paths on the way, the one that ends best."""
    state, spent = builder.start, 0.0
    steps: _Taken = ()
    best: tuple[float, _Taken] = (builder.last(state).cost, ())
    costs: dict[tuple[int, int], float] = {}
    while (pair := _cheapest_pair(builder, state, costs)) is not None:
        made = builder.buffer(state, pair)
        taken = tuple(state.factors[p].inside for p in pair)
        if made is None:  # what could be a statement before can be none any more
            costs[taken[0], taken[1]] = math.inf
            continue
        if not _is_as_before(state, made.after):
            costs.clear()
        state, spent, steps = made.after, spent + made.step.cost, (*steps, taken)
        cost = spent + builder.last(state).cost
        if cost < best[0]:
            best = cost, steps
    return best[1]


def _cheapest_pair(
    builder: _Builder, state: _State, costs: dict[tuple[int, int], float]
) -> tuple[int, int] | None:
    """The positions of the cheapest pair but the last; ``costs`` are known, and are added to."""
    if len(state.factors) < 3:
        return None
    found: dict[tuple[int, int], float] = {}
    for a, b in _sharing_pairs(builder, state):
        key = state.factors[a].inside, state.factors[b].inside
        if key not in costs:
            made = builder.buffer(state, (a, b))
            costs[key] = math.inf if made is None else made.step.cost
        found[a, b] = costs[key]
    best = min(found, key=lambda pair: found[pair], default=None)
    return best if best is not None and found[best] < math.inf else None


def _sharing_pairs(builder: _Builder, state: _State) -> set[tuple[int, int]]:
    """Pairs of the smallest factors that share a variable."""
    names = [set(variables(f.value)) for f in state.factors]
    sharing: dict[str, list[int]] = {}
    for position in sorted(range(len(names)), key=lambda p: builder.size_of(names[p])):
        for v in names[position]:
            sharing.setdefault(v, []).append(position)
    return {
        pair
        for some in sharing.values()
        for pair in itertools.combinations(sorted(some[:MOST_SHARING]), 2)
    }


def _is_as_before(state: _State, after: _State) -> bool:
    """Whether a step has left the target and the factors that it did not take as they were."""
    return after.target == state.target and {*state.factors} >= {*after.factors[:-1]}
