"""Steps of an order of contraction: which statement some factors of a product become, what it
costs, and what is left to do then.

Factors may be read without their indices, which are then left to a later step; a target may be
scattered into before the rest is multiplied (`plan.order`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from insum.lang.expr import (
    Access,
    Affine,
    Expr,
    Var,
    accesses,
    fresh,
    index_of,
    odd_index,
    rewrite,
    variables,
)
from insum.plan.library import is_product_of_matrices, plain_variables
from insum.plan.roles import SMALLEST_DOT

#: What the costs are counted in: one point of a loop, a multiplication and an addition. Moving one
#: number to or from memory takes as long as so many points, one more statement as so many.
MOVED, STARTED = 16, 2**22
#: The latter on a CPU, where a point takes longer.
STARTED_ON_A_CPU = 2**19
#: Of two factors, on a GPU: what a point of a plain matrix product takes, which a library runs, and
#: one of a product for which numbers are gathered, or spread, one by one, each again and again.
IN_LIBRARY, ONE_BY_ONE = 1 / 8, 4
#: Of what both sides of a product have read apart for every sum, so that no side shares it.
ALONG_DIAGONALS = 6
#: Columns of a tile: what is computed of what is gathered is computed again for the next of them.
TILE = 64
#: And what a point of three dense factors and more takes whose sides no tile divides: most of a
#: tile may be empty, and all of it is masked.
UNEVEN = 2
#: How many times as long the points of a sum take that is scattered, and of how many at least:
#: where a factor has a number for each, and else into how few places.
SCATTERED_SUM, LONG_SUMS, LONGER_SUMS, FEW_PLACES = 16, 16, 2**7, 2**16
#: How many times as large as what is made the largest is that it is made of, where that is small.
SMALL = 2
#: Numbers of a line of memory, and so many sums for each place that they wait for one another.
LINE, CROWDED = 8, 2**7
#: Into so few places that nothing else hides how long a sum takes, and what each step takes of one
#: that is scattered, which waits for the one before.
HARDLY_ANY_PLACES, SCATTERED_STEP = 2**10, 2**20
#: Up to so many factors of one step that read through indices, every way to read them is looked at.
MOST_OPENED = 3
#: A buffer is called after what it is made of, up to so many letters.
LONGEST_NAME = 24

#: A dimension whose size is that of a variable: a tensor ('' is the output) and which of its own.
Place: TypeAlias = tuple[str, int]


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
        adds_first: whether a factor may be added up by itself, through an index of another that is
            not the left side's.
        on_cpu: where it runs.
        uneven: whether dense factors have short sides that no load divides.
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
    adds_first: bool = True
    on_cpu: bool = False
    uneven: bool = False

    @property
    def is_three_way(self) -> bool:
        """Whether no factor only scales another, by variables that this has as well."""
        sides = [set(variables(f)) for f in self.factors]
        pairs = itertools.permutations(sides, 2)
        return len(sides) > 2 and not any(one <= other for one, other in pairs)

    @property
    def diagonal(self) -> Affine | None:
        """An index that counts along a diagonal, as distances do: its places are a variable of
        their own, by which a product is one of matrices.
        """
        return diagonal_of(self.target, self.factors)

    @property
    def started(self) -> int:
        """What one more statement takes."""
        return STARTED_ON_A_CPU if self.on_cpu else STARTED


@dataclass(frozen=True, slots=True)
class Step:
    """One statement of a path.

    Attributes:
        dims: the variable that each dimension of the target is as long as; of a buffer.
        positions: what it takes out of the factors that are left.
        multiplied: whether a matrix instruction may have it.
        shrinks: whether what it makes is small beside the largest of what it is made of, and none
            has.
    """

    target: Access
    factors: tuple[Expr, ...]
    dims: tuple[str, ...]
    positions: tuple[int, ...]
    cost: float
    points: float
    multiplied: bool = False
    shrinks: bool = False


@dataclass(frozen=True, slots=True)
class StepFactor:
    """What is multiplied, and which of the statement's factors are in it, as bits."""

    inside: int
    value: Expr

    @property
    def first(self) -> int:
        """Factors stand in the order in which the first of each was written."""
        return self.inside & -self.inside


@dataclass(frozen=True, slots=True)
class StepState:
    """What is left to do."""

    target: Access
    factors: tuple[StepFactor, ...]

    def variables(self) -> set[str]:
        parts = (self.target, *(f.value for f in self.factors))
        return {v for part in parts for v in variables(part)}


@dataclass(frozen=True, slots=True)
class StepBuffer:
    """What some factors become: the step that fills it, and what is left to do then; what stands
    for the buffer is the last factor of that.
    """

    step: Step
    after: StepState

    @property
    def read(self) -> Access:
        value = self.after.factors[-1].value
        assert isinstance(value, Access)
        return value


class StepBuilder:
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
        #: Whether of otherwise plain factors some have their numbers through an index.
        self.by_numbers = any(map(picks_numbers, term.factors)) and all(
            picks_numbers(part) or plain_variables(part) is not None
            for part in (term.target, *term.factors)
        )
        self.diagonal = term.diagonal
        self.start = StepState(
            term.target, tuple(StepFactor(1 << k, f) for k, f in enumerate(term.factors))
        )

    def last(self, state: StepState, positions: tuple[int, ...] = ()) -> Step:
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
        multiplied = self.multiplies(target, factors)
        if not multiplied:
            moved += (LINE - 1) * self.read_apart(target, factors)
        weight = self.weight(target, factors, points)
        again = SCATTERED_SUM if self.scatters_sums(target, factors, points, written) else 1
        cost = again * (weight * points + MOVED * moved) + self.term.started
        if not multiplied:
            cost += SCATTERED_STEP * self.waits(target, factors)
        largest = max((self.size_of({*variables(f)}) for f in factors), default=0)
        small = SMALL * self.size_of({*variables(target)}) <= largest
        shrinks = small and not multiplied
        return Step(target, factors, dims, positions, cost, points, multiplied, shrinks)

    def waits(self, target: Access, factors: tuple[Expr, ...]) -> float:
        """Steps of a sum that is scattered, one after another: of numbers alone those along one
        variable are taken at once.
        """
        scattered = inner(target)
        if self.term.on_cpu or not scattered:
            return 0
        kept = {*variables(target)}
        sizes = sorted(self.extents[v] for v in {v for f in factors for v in variables(f)} - kept)
        if kept <= scattered:
            sizes = sizes[:-1]
        return math.prod(sizes) if sizes else 0

    def read_apart(self, target: Access, factors: tuple[Expr, ...]) -> float:
        """Numbers that lie along what is scattered, and beside others: rows of a result read them
        one by one.
        """
        scattered = inner(target)
        if self.term.on_cpu or not scattered:
            return 0
        reads = (a for f in factors for a in accesses(f, nested=False) if len(a.indices) > 1)
        return sum(self.read_by(a) for a in reads if a.indices[-1].var in scattered)

    def multiplies(self, target: Access, factors: Sequence[Expr]) -> bool:
        """Whether a matrix instruction may have it: two factors share what is summed, and each has
        a side of its own, all of them long enough; what finds a matrix by an index is no side.
        """
        kept, read = {*variables(target)}, [({*variables(f)}, direct(f)) for f in factors]
        return any(
            all(
                self.size_of(names) >= SMALLEST_DOT
                for names in ((one & other) - kept, (one - right) & kept, (other - left) & kept)
            )
            for (one, left), (other, right) in itertools.combinations(read, 2)
        )

    def scatters_sums(
        self, target: Access, factors: tuple[Expr, ...], points: float, places: float
    ) -> bool:
        """Whether what is scattered are long sums: its entries are then walked by the threads that
        have a place, and what lies along them in memory is read number by number. Products of
        matrices for each entry are none, for which there are far more places.
        """
        scattered = inner(target)
        every = {v for part in (target, *factors) for v in variables(part)}
        made = self.size_of(variables(target))
        if self.term.on_cpu or not scattered or len(every) == len({*variables(target)}):
            return False
        whole = [f for f in factors if every <= (plain_variables(f) or {*()})]
        reads = [f for f in whole if isinstance(f, Access)]
        together = any(f.indices[0].var in scattered for f in reads)
        lines = every - {*variables(target)} - {f.indices[-1].var for f in reads}
        if together and (places > HARDLY_ANY_PLACES or not lines):
            return False  # what an entry sums lies together
        if whole:
            # rows of numbers that lie along entries would be read one by one
            short = picks_numbers(target) or made >= CROWDED * places
            return points >= (2 if short else LONG_SUMS) * made
        return made <= FEW_PLACES and points >= LONGER_SUMS * made

    def weight(self, target: Access, factors: tuple[Expr, ...], points: float) -> float:
        """What a point of a step takes."""
        several = len(self.term.factors) > 2
        # of more factors one kernel is a matrix product as well
        if self.term.on_cpu or several and not (self.term.uneven or self.by_numbers):
            return 1
        if _is_in_library(target, factors):
            return IN_LIBRARY
        if several and not self.by_numbers:
            return UNEVEN if len(factors) > 2 else 1
        if len(factors) > 1 and self.diagonal is not None:
            return ALONG_DIAGONALS
        if any(computes(f) and points > TILE * self.size_of({*variables(f)}) for f in factors):
            return ONE_BY_ONE
        parts = (target, *factors) if None not in map(plain_variables, factors) else factors
        picked = (p for p in parts if picks_numbers(p))
        again = any(points > 2 * self.size_of(set(variables(p))) for p in picked)
        return ONE_BY_ONE if again else 1

    def read_by(self, access: Access) -> float:
        """How many elements an access reads, each once."""
        whole = math.prod(self.shapes.get(access.tensor, ()))
        return min(whole, self.size_of(set(variables(access))))

    def size_of(self, names: Iterable[str]) -> float:
        return math.prod(float(self.extents[v]) for v in names)

    # --- buffers ---

    def buffer(self, state: StepState, positions: tuple[int, ...]) -> StepBuffer | None:
        """The cheapest buffer of these factors that means the same; None where there is none. Of
        all factors, or of one, it has to take something off what is left: an index that is read
        once a product is there, or what is scattered before it, or a plain product from what
        gathers and spreads numbers one by one, or what is summed of one alone, or before all is
        scattered.
        """
        inside = sum(state.factors[p].inside for p in positions)
        if inside & self.fixed or not inside & ~self.exact:
            return None
        ways = (self.filled(state, positions, which) for which in self.ways(state, positions))
        allowed = [made for made in ways if self.is_allowed(made)]
        if len(positions) == len(state.factors):
            sums = any(map(_reads, state.target.indices))
            allowed = [
                m
                for m in allowed
                if self.can_open(m.read) or _leaves_plain(m) or sums and self.adds_up(m)
            ]
        elif len(positions) == 1:
            rest = tuple(f for p, f in enumerate(state.factors) if p not in positions)
            value = state.factors[positions[0]].value
            copies = picks_numbers(value) or computes(value)
            allowed = [
                m
                for m in allowed
                if (m.after.target, m.after.factors[:-1]) != (state.target, rest)
                or copies
                and not self.can_open(m.read)
                or self.adds_up(m)
            ]
        return min(allowed, key=lambda made: made.step.cost, default=None)

    def adds_up(self, made: StepBuffer) -> bool:
        """Whether a buffer is smaller than what it is made of: its factors are summed by
        themselves, or before they are scattered. (A CPU's graph does both anyway.)
        """
        summed = {v for f in made.step.factors for v in variables(f)}
        return not (self.term.on_cpu or summed <= {*variables(made.step.target)})

    def is_allowed(self, made: StepBuffer) -> bool:
        """An absent point must be absent from the buffer: were its variable kept, the 0 there
        would be multiplied by what others have for that point.
        """
        parts = (made.step.target, *made.step.factors)
        indices = [a for f in parts for i in reading_indices(f) for a in accesses(i)]
        kept = set(variables(made.step.target)) & set(variables(made.read))
        lost = any(a.tensor in self.term.padded and kept & {*variables(a)} for a in indices)
        return not lost and (self.term.may_index or not indices)

    def filled(
        self, state: StepState, positions: tuple[int, ...], opened: frozenset[int]
    ) -> StepBuffer:
        """The buffer of these factors, where those at ``opened`` are read without their indices."""
        taken = sorted((state.factors[p] for p in positions), key=lambda f: f.first)
        whole = {state.factors[p].inside for p in opened}
        walked: dict[str, Affine] = {}
        factors = tuple(self.open(f.value, walked) if f.inside in whole else f.value for f in taken)
        order = dict.fromkeys(v for f in factors for v in variables(f))
        rest = tuple(f for p, f in enumerate(state.factors) if p not in positions)
        # what is walked is read through its index later, whose variables are then needed
        needed = {v for index in walked.values() for v in variables(index)}
        left, scattered = StepState(state.target, rest), dict[str, Affine]()
        if rest:  # else it would be the target itself
            left, scattered = self.scattered(left, set(order), needed)
        later = left.variables() | needed
        kept = {v: index_of(v) for v in order if v in later and v not in walked}
        if not self.term.on_cpu and self.diagonal is None:  # what is scattered lies in rows
            *outer, last = left.target.indices or (Affine((), 0),)
            rows = inner(Access("", tuple(outer))) - {*variables(last)}
            kept = dict(sorted(kept.items(), key=lambda one: one[0] not in rows))
        along = [(v, index_of(v), index) for v, index in walked.items()]
        along += [(v, index, index_of(v)) for v, index in scattered.items()]
        beside = [(v, index, index) for v, index in kept.items()]
        # places of a diagonal last, for those that are met lie beside each other
        every = [*along, *beside] if self.diagonal is None else [*beside, *along]
        dims, written, read = zip(*every, strict=True) if every else ((), (), ())
        inside = sum(f.inside for f in taken)
        name = f"#{inside}[{','.join(map(str, (*written, *read)))}]"
        self.note(name, dims)
        size = math.prod(self.shapes[name]) * (2 if scattered else 1)  # with zeros first
        step = self.step(Access(name, written), factors, dims, positions, size)
        buffer = StepFactor(inside, Access(name, read))
        return StepBuffer(step, replace(left, factors=(*left.factors, buffer)))

    def note(self, name: str, dims: Sequence[str]) -> None:
        """Remember a buffer with these variables along its dimensions."""
        self.shapes[name] = tuple(self.extents[v] for v in dims)
        self.dims |= {(name, d): self.places[v] for d, v in enumerate(dims) if v in self.places}

    def scattered(
        self, left: StepState, inside: set[str], needed: set[str]
    ) -> tuple[StepState, dict[str, Affine]]:
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
                along = [*found.values()] == [self.diagonal]
                return (after, names) if few or along else (left, {})
            found = {p: i for p, i in found.items() if set(variables(i)) - others}
        return left, {}

    def ways(self, state: StepState, positions: tuple[int, ...]) -> Iterator[frozenset[int]]:
        """Which of these factors to read without their indices: none first."""
        could = [p for p in positions if self.can_open(state.factors[p].value)]
        for count in range(len(could) + 1 if len(could) <= MOST_OPENED else 1):
            yield from map(frozenset, itertools.combinations(could, count))

    def can_open(self, factor: Expr) -> bool:
        """Whether a factor reads one tensor, and that through indices or along a diagonal."""
        reads = [*accesses(factor, nested=False)]
        return len(reads) == 1 and any(map(self.opens, reads[0].indices))

    def opens(self, index: Affine) -> bool:
        """Whether a dimension of this index may be a variable of its own."""
        return _reads(index) or index == self.diagonal

    # --- variables and names of our own ---

    def outer_indices(self, state: StepState) -> Iterator[tuple[Place, Affine]]:
        """Dimensions of the left side, and of factors that read one tensor, that are indexed
        through tensors.
        """
        if self.term.may_scatter:
            for dim, index in enumerate(state.target.indices):
                if self.opens(index):
                    yield ("", dim), index
        for factor in state.factors:
            if self.can_open(factor.value):
                (access,) = accesses(factor.value, nested=False)
                for dim, index in enumerate(access.indices):
                    if self.opens(index):
                        yield self.place(access, dim), index

    def replaced(self, state: StepState, found: Mapping[Place, Affine]) -> StepState:
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
        return StepState(replace(state.target, indices=target), factors)

    def open(self, factor: Expr, walked: dict[str, Affine]) -> Expr:
        """A factor with a variable for each dimension that is indexed through a tensor."""

        def change(access: Access) -> Access:
            indices = list(access.indices)
            for dim, index in enumerate(access.indices):
                if self.opens(index):
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

    def renamed(self, made: StepBuffer) -> StepBuffer:
        """The buffer under a name for people: that of what is multiplied."""
        step, read = made.step, made.read
        names = dict.fromkeys(a.tensor for f in step.factors for a in accesses(f, nested=False))
        wanted = "_".join(names)
        name = fresh(wanted if len(wanted) <= LONGEST_NAME else "part", self.taken)
        self.note(name, step.dims)
        last = replace(made.after.factors[-1], value=replace(read, tensor=name))
        return StepBuffer(
            replace(step, target=replace(step.target, tensor=name)),
            replace(made.after, factors=(*made.after.factors[:-1], last)),
        )


def _is_in_library(target: Access, factors: tuple[Expr, ...]) -> bool:
    """Whether a step is one product of matrices as they lie in memory: what is summed comes first,
    or last, in both.

    >>> from insum.lang.parser import parse
    >>> def looked(text):
    ...     statement = parse(text)
    ...     return _is_in_library(statement.target, statement.value.factors)
    >>> looked("Y[a,b,f] = T[a,b,c] * D[c,f]"), looked("Y[a,c,f] = T[a,b,c] * B[b,f]")
    (True, False)
    """
    if len(factors) != 2 or not is_product_of_matrices(target, *factors):
        return False
    one, other = ([*variables(f)] for f in factors)
    summed = {*one, *other} - {*variables(target)}
    count = len(summed)
    return all(summed in ({*names[:count]}, {*names[-count:]}) for names in (one, other))


def picks_numbers(part: Expr) -> bool:
    """Whether what lies beside each other in a tensor is read, or written, through an index: the
    innermost dimension is, or another by an index tensor that this one runs along.

    >>> from insum.lang.parser import parse
    >>> [picks_numbers(parse(f"y[i,o] = {read}").value) for read in ("c[q[i,o]]", "c[q[i,o],o]")]
    [True, True]
    >>> picks_numbers(parse("y[i,o] = c[q[i],o]").value)
    False
    """
    if not isinstance(part, Access) or not part.indices:
        return False
    *outer, last = part.indices
    along = {*variables(last)}
    return _reads(last) or any(_reads(i) and along.intersection(variables(i)) for i in outer)


def _leaves_plain(made: StepBuffer) -> bool:
    """Whether a plain product is made, of which the numbers are spread later."""
    return picks_numbers(made.after.target) and _is_in_library(made.step.target, made.step.factors)


def computes(factor: Expr) -> bool:
    """Whether a factor is a function of what is read through indices."""
    return not isinstance(factor, Access) and any(True for _ in reading_indices(factor))


def diagonal_of(target: Access, factors: Sequence[Expr]) -> Affine | None:
    """The one index of two variables, where another part of a product has both of them: along its
    places instead of one of them the product is one of matrices.

    >>> from insum.lang.parser import parse
    >>> def looked(text):
    ...     statement = parse(text)
    ...     return str(diagonal_of(statement.target, statement.value.factors))
    >>> looked("s[h,i,j] = q[h,i,f] * r[j-i+9,f]"), looked("dr[j-i+9,f] = ds[h,i,j] * q[h,i,f]")
    ('j - i + 9', 'j - i + 9')
    >>> looked("y[b,t,o] = x[b,t+r,c] * w[r,c,o]"), looked("s[h,i,j] = q[h,i,f] * r[2*i,j,f]")
    ('None', 'None')
    """
    if len(factors) != 2 or not all(isinstance(f, Access) for f in factors):
        return None
    parts: list[Access] = [target, *factors]  # type: ignore[list-item]
    for at, dim, (by, moved), (_, kept) in odd_index(parts):
        index, others = parts[at].indices[dim], [k for k in range(3) if k != at]
        both = [k for k in others if {moved.name, kept.name} <= {*variables(parts[k])}]
        beside = {v for k in others if k not in both for v in variables(parts[k])}
        beside |= {i.var for i in parts[at].indices if i.var is not None}
        if abs(by) != 1 or len(both) != 1 or moved.name in beside:
            continue
        walked = {at: index, both[0]: index_of(moved.name)}
        opened = [_walked(part, walked.get(k)) for k, part in enumerate(parts)]
        if is_product_of_matrices(opened[0], *opened[1:]):
            return index
    return None


def _walked(part: Access, index: Affine | None) -> Access:
    """With a variable that no statement can spell for the places of an index."""
    found = tuple(index_of("#") if one == index else one for one in part.indices)
    return replace(part, indices=found)


def inner(value: Expr) -> set[str]:
    """Variables that index tensors are read by."""
    reads = (a for index in reading_indices(value) for a in accesses(index))
    return {v for access in reads for v in variables(access)}


def direct(value: Expr) -> set[str]:
    """Variables that stand in indices themselves."""
    reads = (i for access in accesses(value, nested=False) for i in access.indices)
    return {atom.name for index in reads for _, atom in index.terms if isinstance(atom, Var)}


def reading_indices(factor: Expr) -> Iterator[Affine]:
    """The index expressions of a factor that read tensors."""
    for access in accesses(factor, nested=False):
        yield from filter(_reads, access.indices)


def _reads(index: Affine) -> bool:
    return any(True for _ in accesses(index))
