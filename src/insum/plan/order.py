"""The order of contraction: a product as one statement, or as several with buffers between them.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from insum.lang.expr import Access, Expr, accesses, variables
from insum.plan.steps import (
    MOVED,
    Place,
    Step,
    StepBuffer,
    StepBuilder,
    StepState,
    Term,
    diagonal_of,
    direct,
    inner,
    picks_numbers,
    reading_indices,
)

#: A path is taken on its own account where it is so many times cheaper than one statement; where
#: its buffers are larger than everything that is read and written, so many times.
CLEARLY, BY_FAR = 4, 16
#: Of dense factors whose sides no tile divides, so many times, whatever its buffers.
UNEVENLY = 1.25
#: Of two factors nothing is read anew at every point but what the index of one finds: there it is
#: so many times, where it saves what is worth another call; on a CPU, where a point takes longer,
#: the second.
TWICE, WORTH_A_CALL, WORTH_ON_A_CPU = 2, 2**28, 2**21
#: The same where a factor is summed by itself, or all of them before they are scattered.
WORTH_A_SUM = 2**22
#: And where what is made is smaller than what it is made of, for each statement: of the points, of
#: which no matrix instructions have the others.
WORTH_A_SMALL_SUM = 2**20
#: How many times as much is read and written as is buffered, where that is little.
FEW_BUFFERED = 8
#: How many times what is read and written a buffer over all places of a diagonal may be: as many as
#: distances are for points.
DIAGONAL = 2
#: Buffers of more elements than this, and of more than so many times those of all arguments, are
#: never made.
MOST_BUFFERED, MOST_OF_ARGUMENTS = 2**24, 8
#: Up to so many factors every order is looked at, and up to so many where that is asked for;
#: beyond it the next step is the cheapest one, of so many factors that share a variable.
MOST_SEARCHED, MOST_ASKED, MOST_SHARING = 5, 8, 6

#: Steps as in opt_einsum: positions of factors, which are taken out; what they make comes last.
Path: TypeAlias = tuple[tuple[int, ...], ...]


class CannotOrder(Exception):
    """Factors at these positions cannot be a statement of their own."""

    def __init__(self, positions: tuple[int, ...]) -> None:
        super().__init__(f"the factors at {positions} cannot be a statement of their own")
        self.positions = positions


@dataclass(frozen=True, slots=True)
class Ordered:
    """A path as statements; the last has the target of the whole, perhaps through variables of our
    own for dimensions that an earlier one has scattered into.

    Attributes:
        places: what the variables of our own run over.
        buffered: elements of all buffers.
        exact: whether these are so few that nothing is rounded between statements.
    """

    steps: tuple[Step, ...]
    places: Mapping[str, Place]
    buffered: float
    exact: bool = False

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
        case "auto" if not _is_worth_a_search(term, together):
            return together
        case "auto":
            for path in _worth_a_look(term):
                found = _made(term, path)
                if _is_clear(found, together, term):
                    return replace(found, exact=_is_exact(found, together, term))
            return together
        case _:
            found = _made(term, _searched(term, wish))
            return found if found.cost < together.cost else together


def is_worth_an_order(target: Access, first: Expr, second: Expr) -> bool:
    """Whether a product of two factors may be worth two statements, whatever the sizes: something
    is summed, and one factor has nothing of what an index of the other, or of the left side, is
    read by; or one is read by summed variables through indices alone, so that the other may be
    added up through these first; or a product is plain but for numbers that are gathered, or
    spread, one by one.

    >>> from insum.lang.parser import parse
    >>> def looked(text):
    ...     statement = parse(text)
    ...     return is_worth_an_order(statement.target, *statement.value.factors)
    >>> looked("Y[d[e],h] = X[s[e],f] * W[f,h]"), looked("Y[d[e],h] = M[e,f] * W[f,h]")
    (True, True)
    >>> looked("D[f,h] = X[s[e],f] * G[d[e],h]"), looked("Y[d[e],f] = v[e] * X[s[e],f]")
    (True, False)
    >>> looked("D[f,h] = M[e,f] * G[d[e],h]"), looked("D[e] = X[s[e],f] * G[d[e],f]")
    (True, False)
    """
    if _is_plain_but_for_numbers(target, first, second) or diagonal_of(target, (first, second)):
        return True
    kept, scattered = {*variables(target)}, inner(target)
    both = [({*direct(one)}, inner(one)) for one in (first, second)]
    if (both[0][0] & both[1][0]) - kept:
        return any(
            (read and not read & (other | through))
            or (scattered & own and not scattered & (other | through))
            for (own, read), (other, through) in (both, both[::-1])
        )
    return any(
        bool(read) and not read & (own | kept) and read <= other | through
        for (own, read), (other, through) in (both, both[::-1])
    )


def adds_up_first(target: Access, factors: Sequence[Expr]) -> bool:
    """Whether something is summed that may be summed before the rest, whatever the sizes: along
    what only one of two factors has, or before it is scattered.

    >>> from insum.lang.parser import parse
    >>> def looked(text):
    ...     statement = parse(text)
    ...     value = statement.value
    ...     return adds_up_first(statement.target, getattr(value, "factors", (value,)))
    >>> looked("y[b,d] = F[b,d] * G[a,b]"), looked("y[T[b],c] = F[a,b,c]"), looked("y[b] = F[a,b]")
    (True, True, False)
    >>> looked("y[i,k] = F[i,j] * G[j,k]"), looked("y[d[e],f] = w[e] * x[s[e],f]")
    (False, False)
    """
    kept = {*variables(target)}
    read = [{*variables(f)} for f in factors]
    if inner(target) and any(names - kept for names in read):
        return True
    return len(read) == 2 and any(
        one - other - kept and other - one for one, other in (read, read[::-1])
    )


def _is_plain_but_for_numbers(target: Access, first: Expr, second: Expr) -> bool:
    """Whether of a matrix product one part has its numbers through an index.

    >>> from insum.lang.parser import parse
    >>> def looked(text):
    ...     statement = parse(text)
    ...     return _is_plain_but_for_numbers(statement.target, *statement.value.factors)
    >>> looked("Y[b,o] = X[b,i] * c[q[i,o]]"), looked("D[q[i,o]] = Y[b,o] * X[b,i]")
    (True, True)
    >>> looked("Y[b,p] = X[b,t[p]] * w[p]"), looked("Y[d[e],f] = v[e] * X[s[e],f]")
    (False, False)
    """
    picked = [part for part in (target, first, second) if picks_numbers(part)]
    if len(picked) != 1 or any(
        True for p in (target, first, second) if p not in picked for _ in reading_indices(p)
    ):
        return False
    kept, a, b = ({*variables(part)} for part in (target, first, second))
    return bool((a & b) - kept and a - b and b - a)


def _elements(term: Term) -> float:
    """Of everything that is read and written."""
    parts = (*term.target.indices, *term.factors)
    names = {a.tensor for part in parts for a in accesses(part)}
    return math.prod(term.shape) + sum(math.prod(term.shapes.get(n, ())) for n in names)


def _is_worth_a_search(term: Term, together: Ordered) -> bool:
    """Whether one statement costs so much that a path is searched."""
    if together.cost > _clearly(term) * _least(term):
        return True
    if term.on_cpu:
        return False
    sums = _has_own_sums(StepBuilder(term).start)
    if sums and together.cost > _least(term) + WORTH_A_SUM:
        return True
    return (sums or len(term.factors) > 2) and together.points >= 2 * WORTH_A_SMALL_SUM


def _least(term: Term) -> float:
    """What two statements cost at least."""
    builder = StepBuilder(term)
    reads = {a for f in term.factors for a in accesses(f, nested=False)}
    read = sum(builder.read_by(a) for a in reads)
    return 2 * term.started + MOVED * (math.prod(term.shape) + read)


def _is_clear(found: Ordered, together: Ordered, term: Term) -> bool:
    arguments = _elements(term)
    if found.buffered > max(MOST_BUFFERED, MOST_OF_ARGUMENTS * arguments):
        return False
    least = WORTH_ON_A_CPU if term.on_cpu else WORTH_A_CALL
    if _saves_points(found, together, term):
        return True
    if not term.on_cpu and any(_adds_alone(step) for step in found.steps[:-1]):
        least = WORTH_A_SUM
        if all(_adds_alone(step) for step in found.steps[:-1]):
            return found.buffered <= arguments and together.cost - found.cost >= least
    if not term.on_cpu and _only_scatters(found.steps[-1]):
        least = WORTH_A_SUM
    if len(term.factors) <= 2 and together.cost - found.cost < least:
        return False
    most = arguments * (1 if term.diagonal is None else DIAGONAL)
    large = found.buffered > most and not term.uneven
    clearly = TWICE if not term.on_cpu and _only_scatters(found.steps[-1]) else _clearly(term)
    return found.cost * (BY_FAR if large else clearly) <= together.cost


def _saves_points(found: Ordered, together: Ordered, term: Term) -> bool:
    """Whether what all statements but the last make is small beside what it is made of, or beside
    all arguments, and takes many points off what is left; of a product of matrices points are
    cheap.
    """
    first, arguments = found.steps[:-1], _elements(term)
    if term.on_cpu or any(inner(step.target) for step in first):
        return False
    if StepBuilder(term).multiplies(term.target, term.factors):
        return False
    small = all(step.shrinks for step in first) and found.buffered <= arguments
    if not small and FEW_BUFFERED * found.buffered > arguments:
        return False
    return together.points - found.points >= WORTH_A_SMALL_SUM * len(first)


def _is_exact(found: Ordered, together: Ordered, term: Term) -> bool:
    """Whether what is buffered is so little that it need not be rounded."""
    if StepBuilder(term).multiplies(term.target, term.factors):
        return False
    little = FEW_BUFFERED * found.buffered <= _elements(term)
    return little or _saves_points(found, together, term)


def _only_scatters(step: Step) -> bool:
    """Whether nothing is left to do but to scatter a buffer."""
    return len(step.factors) == 1 and bool(inner(step.target))


def _adds_alone(step: Step) -> bool:
    """Whether one factor is summed by itself."""
    summed = {v for f in step.factors for v in variables(f)} - {*variables(step.target)}
    return len(step.factors) == 1 and bool(summed)


def _clearly(term: Term) -> float:
    if term.uneven:
        return UNEVENLY
    return TWICE if len(term.factors) <= 2 else CLEARLY


def _made(term: Term, path: Path) -> Ordered:
    """The statements of a path."""
    builder = StepBuilder(term)
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


# --- the search -----------------------------------------------------------------------------------

#: What each step takes: sets of the statement's factors, as bits.
_Taken: TypeAlias = tuple[tuple[int, ...], ...]


def _searched(term: Term, wish: str) -> Path:
    """The cheapest path that is found."""
    builder = StepBuilder(term)
    free = [f for k, f in enumerate(term.factors) if k not in term.fixed and variables(f)]
    most = {"auto": MOST_SEARCHED, "optimal": MOST_ASKED}.get(wish, 0)
    steps = _exhaustive(builder) if len(free) <= most else _greedy(builder)
    return _positions(builder.start, steps)


def _worth_a_look(term: Term) -> Iterator[Path]:
    """The cheapest path, and that by which factors are summed that have sums of their own."""
    yield _searched(term, "auto")
    start = StepBuilder(term).start
    own = [p for p in range(len(start.factors)) if _has_own_sums(start, (p,))]
    if own and not term.on_cpu and len(start.factors) > 1:
        yield _positions(start, tuple((start.factors[p].inside,) for p in own))


def _positions(state: StepState, steps: _Taken) -> Path:
    """The steps by positions at their time; the last takes everything."""
    left, path = [factor.inside for factor in state.factors], []
    for step in steps:
        path.append(tuple(sorted(left.index(inside) for inside in step)))
        left = [inside for inside in left if inside not in step] + [sum(step)]
    return (*path, tuple(range(len(left))))


def _next(
    builder: StepBuilder, state: StepState, most: int
) -> Iterator[tuple[tuple[int, ...], StepBuffer]]:
    """What can be buffered next: up to ``most`` factors, but not all of them, unless there are but
    two, which are then read or written through an index, or they are scattered; of two also one,
    which is gathered or scattered first, and of more one that has sums of its own.
    """
    free = [p for p, f in enumerate(state.factors) if variables(f.value)]
    every = len(state.factors)
    scattered = any(inner(Access("", (index,))) for index in state.target.indices)
    last = every if every == 2 or scattered else every - 1
    for count in range(1, min(most, last) + 1):
        for positions in itertools.combinations(free, count):
            if count == 1 and every > 2 and not _has_own_sums(state, positions):
                continue
            found = builder.buffer(state, positions)
            if found is None or (every != 2 and count in (1, every) and not builder.adds_up(found)):
                continue
            waits = not builder.term.adds_first and builder.diagonal is None
            if count == 1 and waits and _is_for_another(state, found.after):
                continue
            yield tuple(state.factors[p].inside for p in positions), found


def _has_own_sums(state: StepState, positions: Sequence[int] = ()) -> bool:
    """Whether one of these factors, or of all, is summed along what nothing else has."""
    read = [{*variables(f.value)} for f in state.factors]
    kept = {*variables(state.target)}
    for position in positions or range(len(read)):
        others = read[:position] + read[position + 1 :]
        if not read[position] <= kept.union(*others):
            return True
    return False


def _exhaustive(builder: StepBuilder) -> _Taken:
    """Every order of steps of two and more factors; what is left may be one statement at any
    time.
    """
    known: dict[object, tuple[float, _Taken]] = {}

    def best(state: StepState) -> tuple[float, _Taken]:
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


def _greedy(builder: StepBuilder) -> _Taken:
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
    builder: StepBuilder, state: StepState, costs: dict[tuple[int, int], float]
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


def _sharing_pairs(builder: StepBuilder, state: StepState) -> set[tuple[int, int]]:
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


def _is_for_another(state: StepState, after: StepState) -> bool:
    """Whether a step has been scattered through an index of another factor."""
    return after.target == state.target and not _is_as_before(state, after)


def _is_as_before(state: StepState, after: StepState) -> bool:
    """Whether a step has left the target and the factors that it did not take as they were."""
    return after.target == state.target and {*state.factors} >= {*after.factors[:-1]}
