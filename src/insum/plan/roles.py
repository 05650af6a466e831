"""Roles of the index variables in one product: which become the axes of a tile, which the grid,
which the loops.

The tile has up to three axes: M and N (kept) and K (summed). In a contraction by `tl.dot`, factors
are split into a left side (M, K), a right side (K, N) and factors that are multiplied afterwards.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from insum.lang.expr import Access, Expr, Number, accesses, variables

#: Extents below this are not worth a tile axis of a matrix instruction, whose sides are at least
#: 16.
SMALLEST_DOT = 8
#: ... but for one side of a product in half precision: matrix instructions are so much quicker
#: there that most of a tile may be empty, if the other side fills its own.
THINNEST_SIDE, FULL_SIDE = 1, 16
#: Side of a wide tile, and an axis of few of them.
WIDE_TILE, SHORT_AXIS = 128, 1024
#: Numbers of a row that one tile of a segmented sum can hold whole.
LONGEST_ROW = 1024
#: Numbers that lie together and are worth reading together, and so many that what lies beside them
#: does not matter.
SHORTEST_RUN, LONG_LINE = 16, 512
#: How many times as much is read along another variable as is written, for that to be a row.
MOSTLY_READ = 4
#: Rows of at most so many numbers are a thread's.
SHORTEST_ROW = 4
#: So many sums over fewer numbers than these share programs.
MANY_SUMS, LONG_SUM = 2**14, 2**12
#: A variable of at most this extent is put beside the rows of a segmented output.
BESIDE_UP_TO = 16
#: An inner variable of at most this extent may be flattened with the loop around it.
FLATTEN_UP_TO = 64
#: ... but not with one that picks rows of so many numbers, or more, anew at every step of the sum.
GATHERED_FROM = 32
#: ... and one of at most this extent where it divides no tile: what a tile of its own would waste.
JOIN_UP_TO = 128


@dataclass(frozen=True, slots=True)
class Contraction:
    """Variables of the three axes (outermost first), the rest, and the factors' sides."""

    m: tuple[str, ...]
    n: tuple[str, ...]
    k: tuple[str, ...]
    loops: tuple[str, ...]  # summed, one value at a time, inside the contraction
    outer: tuple[str, ...]  # summed, one value at a time, outside the contraction
    grid: tuple[str, ...]  # kept, one value per program
    dot: bool
    left: tuple[int, ...] = ()
    right: tuple[int, ...] = ()
    post: tuple[int, ...] = ()

    @property
    def flat(self) -> bool:
        """Whether tiles are runs of places, whatever their dimensions."""
        return not self.dot and len(self.n) > 1


@dataclass(frozen=True, slots=True)
class Roles:
    """What `contraction` chooses from: the factors' variables, and which variables are kept."""

    factors: tuple[Expr, ...]
    kept: tuple[str, ...]  # in the order of the target
    summed: tuple[str, ...]
    extents: Mapping[str, int]
    row: str = ""  # the variable that walks over the rows of a segmented output
    segment: str = ""  # the summed variable whose range depends on the row
    # variables of a scattered dimension that is kept whole in registers
    absorbed: tuple[str, ...] = ()
    exact: frozenset[str] = frozenset()  # variables whose extents the code may know
    places: tuple[frozenset[str], ...] = ()  # what each index of the target is read by
    in_a_row: bool = False  # places of the target, in its order, lie one after the other

    @property
    def held(self) -> tuple[str, ...]:
        """Absorbed variables that one tile can hold whole; the others are looped over."""
        return tuple(v for v in self.absorbed if self.extents[v] <= FLATTEN_UP_TO)

    def depends(self, factor: int) -> frozenset[str]:
        found = set(variables(self.factors[factor]))
        return (
            frozenset(found | {self.row})
            if self.segment in found and self.segment
            else frozenset(found)
        )


def contraction(
    roles: Roles, *, allow_dot: bool, force_dot: bool = False, half: bool = False
) -> Contraction:
    """Choose the axes: a matrix product where one is worth it, else multiply and sum; ``half``
    tells that matrix instructions would read half precision.
    """
    if not allow_dot:
        return _as_sum(roles)
    found = _triples(roles, 1 if force_dot else SMALLEST_DOT)
    if not found and half:
        found = [triple for triple in _triples(roles, THINNEST_SIDE) if _is_thin(roles, *triple)]
    best = max(found, default=None, key=lambda triple: triple[0])
    return _as_dot(roles, *best[1:]) if best else _as_sum(roles)


# --- matrix products ------------------------------------------------------------------------------


def _triples(roles: Roles, smallest: int) -> list[tuple[float, str, str, str]]:
    """Every (score, m, n, k) such that no factor with k depends on both m and n."""
    found = []
    depends = [roles.depends(f) for f in range(len(roles.factors))]
    for k in roles.summed:
        with_k = [d for d in depends if k in d]
        # summed, so one tile has to hold all of it
        whole = [v for v in roles.summed if roles.extents[v] <= WIDE_TILE]
        candidates = [
            v
            for v in (*roles.kept, *roles.held, *whole)
            if v not in (k, roles.row, roles.segment) and roles.extents[v] >= smallest
        ]
        for m in candidates:
            for n in candidates:
                # the register tile takes rows or columns of the product, not single places
                both_absorbed = {m, n} <= set(roles.absorbed)
                if (
                    _is_deep(roles, k, smallest)
                    and _splits(with_k, m, n)
                    and _order(roles, m, n)
                    and not both_absorbed
                ):
                    found.append((_score(roles, m, n, k), m, n, k))
    return found


def _is_deep(roles: Roles, k: str, smallest: int) -> bool:
    """Whether a tile's K axis is filled: by a variable, or by one together with the entries of a
    segment, which would have to fill it by themselves otherwise. What scales entries, and does not
    depend on the variable, keeps them apart.
    """
    if roles.extents[k] >= smallest:
        return True
    segment, depends = roles.segment, [roles.depends(f) for f in range(len(roles.factors))]
    if k == segment or roles.extents[k] < 2 or any(segment in d and k not in d for d in depends):
        return False
    beside = segment in roles.summed and roles.extents[segment] >= smallest
    return beside and _joins_entries(roles, k)


def _is_thin(roles: Roles, _: float, m: str, n: str, k: str) -> bool:
    """Whether one kept side is long, and what is summed is dense and no shorter than usual."""
    longest = max(roles.extents[m], roles.extents[n])
    dense = k != roles.segment and roles.extents[k] >= SMALLEST_DOT
    return dense and longest >= FULL_SIDE and {m, n} <= set(roles.kept)


def _splits(with_k: Sequence[frozenset[str]], m: str, n: str) -> bool:
    left, right = any(m in d for d in with_k), any(n in d for d in with_k)
    return m != n and left and right and not any(m in d and n in d for d in with_k)


def _order(roles: Roles, m: str, n: str) -> bool:
    """Of the two orders of a pair keep one: the target's innermost variable is N."""
    order = [*roles.summed, *roles.absorbed, *roles.kept]
    return order.index(m) < order.index(n)


def _score(roles: Roles, m: str, n: str, k: str) -> float:
    size = [min(roles.extents[v], cap) for v, cap in ((m, 128), (n, 256), (k, 128))]
    innermost = 4 if roles.kept and n == roles.kept[-1] else 1
    both_kept = 16 if {m, n} <= {*roles.kept, *roles.absorbed} else 1
    in_a_row = (
        4
        if any(
            a.indices and a.indices[-1].var == k
            for f in roles.factors
            for a in accesses(f, nested=False)
        )
        else 1
    )
    # of sides alike, the one along which more lies
    along = max(_lies_along(roles, m), _lies_along(roles, n))
    near = 1.25 if along >= max(_lies_along(roles, v) for v in roles.kept or (m,)) else 1
    # Entries of a segment are few and scattered in memory: they fill the K axis only where nothing
    # dense does.
    return float(size[0] * size[1] * size[2] * innermost * both_kept * in_a_row) * (
        1e-3 * near if k == roles.segment else near
    )


def _as_dot(roles: Roles, m: str, n: str, k: str) -> Contraction:
    depends = [roles.depends(f) for f in range(len(roles.factors))]
    with_k = [f for f, d in enumerate(depends) if k in d]
    right = tuple(f for f in with_k if n in depends[f])
    left = tuple(f for f in with_k if f not in right)
    left_on, right_on = (frozenset().union(*(depends[f] for f in side)) for side in (left, right))
    apart = read_with(roles.factors, k)
    m_apart, n_apart = (apart | _placed_with(roles, other) for other in (n, m))
    m_axis = _flattened(roles, m, lambda v: v in left_on and v not in right_on, m_apart)
    n_axis = _flattened(roles, n, lambda v: v in right_on and v not in left_on, n_apart)
    axes = {*m_axis, *n_axis, k}
    summed = [v for v in roles.summed if v not in axes]
    post = tuple(f for f in range(len(depends)) if f not in with_k)
    post_on = frozenset().union(*(depends[f] for f in post)) if post else frozenset()
    # A summed variable of a factor that is multiplied afterwards has to be looped over outside the
    # contraction.
    outer = [v for v in summed if v in post_on] + [v for v in roles.absorbed if v not in axes]
    loops = [v for v in summed if v not in outer]
    k_axis: tuple[str, ...] = (k,)
    if roles.segment in loops and _joins_entries(roles, k):
        k_axis = (roles.segment, k)
        loops.remove(roles.segment)
    grid = tuple(v for v in roles.kept if v not in axes)
    return Contraction(
        m_axis, n_axis, k_axis, tuple(loops), tuple(outer), grid, True, left, right, post
    )


def _joins_entries(roles: Roles, k: str) -> bool:
    """Whether the K axis runs over the entries of a segment with all values of ``k`` for each, so
    that one tile holds several short ones, and no part of it is empty where no tile divides ``k``.
    """
    if _is_power(roles.extents[k]):
        return roles.extents[k] <= FLATTEN_UP_TO
    if roles.extents[k] < SMALLEST_DOT:  # for which there is no other way into a tile
        return k in roles.exact
    if k not in roles.exact or roles.extents[k] > JOIN_UP_TO:
        return False
    return one_place_an_entry(roles.factors, roles.segment, roles.row)


def one_place_an_entry(factors: Sequence[Expr], segment: str, row: str) -> bool:
    """Whether indices that depend on a segment's entries depend on nothing else: then a tile of
    several entries reads one index for each, and not one for each of its places.
    """
    picked = (set(variables(a)) for f in factors for a in _indices(f))
    return all(vars_ <= {segment, row} for vars_ in picked if segment in vars_)


def _indices(factor: Expr) -> list[Access]:
    """The accesses inside of indices."""
    outer = accesses(factor, nested=False)
    return [a for access in outer for index in access.indices for a in accesses(index)]


def read_with(factors: Sequence[Expr], k: str) -> frozenset[str]:
    """Variables that index tensors are read by together with ``k``."""
    reads = (variables(a) for f in factors for a in _indices(f))
    return frozenset(v for vars_ in reads if k in vars_ for v in vars_)


def _placed_with(roles: Roles, v: str) -> frozenset[str]:
    """Variables that indices of the target are read by together with ``v``."""
    return frozenset().union(*(place for place in roles.places if v in place))


def _flattened(
    roles: Roles, inner: str, alike: Callable[[str], bool], apart: frozenset[str]
) -> tuple[str, ...]:
    """The tile axis around ``inner``: while it is short, kept variables that play the same role are
    flattened onto it, the innermost of the target first. What is flattened already goes on while
    tiles would end beyond it. What index tensors are read by together with the summed variable,
    or those of the target with the other axis, stays ``apart`` from all but the shortest rows: a
    tile would read an index for each of its places.
    """
    if inner not in roles.kept or roles.extents[inner] >= FLATTEN_UP_TO:
        return (inner,)
    others = {roles.row} | (apart if roles.extents[inner] >= GATHERED_FROM else frozenset())
    axis: list[str] = []
    size = 1
    for v in reversed([v for v in roles.kept if v == inner or alike(v) and v not in others]):
        if size >= FLATTEN_UP_TO and (len(axis) < 2 or not _is_cut(size)):
            break
        axis.insert(0, v)
        size *= roles.extents[v]
    return tuple(axis)


def _is_cut(size: int) -> bool:
    """Whether the last tile along a short axis would be half empty, or nearly."""
    return size < SHORT_AXIS and size % WIDE_TILE != 0


def _is_power(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


# --- multiply and sum -----------------------------------------------------------------------------


def _as_sum(roles: Roles) -> Contraction:
    if flat := roles.kept if _is_flat(roles) else _flat_sums(roles):
        every = tuple(range(len(roles.factors)))
        k = _beside_runs(roles)
        loops = tuple(v for v in roles.summed if v != k)
        return Contraction((), flat, _one(k), loops, (), (), False, post=every)
    kept = [v for v in (*roles.held, *roles.kept) if v != roles.row]
    n = _summed_instead(roles) or _innermost(roles, [v for v in kept if v in roles.kept])
    rest = [v for v in kept if v != n]
    m = (
        roles.row
        or _held_axis(roles)
        or max(rest, key=functools.partial(_worth_a_side, roles, n), default="")
    )
    if n in roles.summed and m not in (roles.row, *roles.held):
        m = ""
    others = [v for v in roles.summed if v != n]
    k = roles.segment or _summed_axis(roles, n, others)
    m_axis = _written_together(roles, m, n) or (*_one(m), *_beside_row(roles, {m, n, k}))
    axes = {*m_axis, n, k}
    outer = tuple(v for v in roles.absorbed if v not in axes)
    loops = tuple(v for v in roles.summed if v not in axes)
    grid = tuple(v for v in roles.kept if v not in axes)
    return Contraction(
        m_axis, _one(n), _one(k), loops, outer, grid, False, post=tuple(range(len(roles.factors)))
    )


def _summed_axis(roles: Roles, n: str, summed: Sequence[str]) -> str:
    """The longest summed variable, or the one along which most is read, where that is more than
    along N.
    """
    long = [v for v in summed if roles.extents[v] >= SHORTEST_RUN]
    if not any(_lies_along(roles, v) for v in long):  # sectors of memory at least
        long = [v for v in summed if roles.extents[v] >= SMALLEST_DOT]
    most = max((_lies_along(roles, v) for v in long), default=0)
    if most > _lies_along(roles, n):
        summed = [v for v in long if _lies_along(roles, v) == most]
    return max(summed, key=lambda v: (roles.extents[v], contiguity(roles.factors, v)), default="")


def _worth_a_side(roles: Roles, n: str, v: str) -> tuple[bool, bool, int, int, int]:
    """How much a kept variable is worth the other side of a tile: it turns what is read, windows
    along it lie over each other, much is read along it, much is shared along it, it is long.
    """
    slides = roles.extents[v] >= SMALLEST_DOT and any(
        v in names and not names.isdisjoint(roles.summed)
        for factor in roles.factors
        for read in accesses(factor, nested=False)
        for names in (set(variables(index)) for index in read.indices)
    )
    turns = _turns(roles, n, v)
    along = _lies_along(roles, v) if turns else 0
    return turns, slides, along, -_read_anew(roles, n, v), roles.extents[v]


def _read_anew(roles: Roles, n: str, m: str) -> int:
    """How often a factor is read at all points of a tile, about: what a side does not have is
    shared along it.
    """
    sizes = {v: max(1, roles.extents[v]) for v in (n, m)}
    sides = {n: min(WIDE_TILE, sizes[n]), m: min(SHORTEST_RUN, sizes[m])}
    shared = (
        math.prod(side for v, side in sides.items() if v not in variables(factor))
        for factor in roles.factors
    )
    return round(4 * sum(1 / by for by in shared))


def _lies_along(roles: Roles, v: str) -> int:
    """Numbers of the largest factor that lies in memory along a variable."""
    reads = (a for f in roles.factors for a in accesses(f, nested=False) if a.indices)
    sizes = (math.prod(roles.extents[o] for o in variables(a)) for a in reads if _last(a) == v)
    return max(sizes, default=0)


def _last(access: Access) -> str | None:
    return access.indices[-1].var


def _turns(roles: Roles, n: str, v: str) -> bool:
    """Whether ``v`` walks what is read in order where ``n`` does not: a tile of both is then read
    and written in order.
    """
    long = roles.extents[v] >= SHORTEST_RUN
    return long and contiguity(roles.factors, v) > 0 and not contiguity(roles.factors, n)


def _is_flat(roles: Roles) -> bool:
    """Whether places are walked one after the other, where nothing is summed: then none of a tile
    is empty, and several of them are stored at once whatever the width. But not where what is read
    lies along another dimension; nor long rows that no wide load reads, which find out what they
    share once; nor rows of so few numbers that one thread has them.
    """
    if roles.row or roles.summed or roles.absorbed or len(roles.kept) < 2 or not roles.in_a_row:
        return False
    inner = roles.kept[-1]
    width = roles.extents[inner]
    if width >= SHORTEST_RUN and any(_turns(roles, inner, v) for v in roles.kept[:-1]):
        return False
    indices = [{*variables(a)} for f in roles.factors for a in _indices(f)]
    picked = any(inner in own for own in indices)
    if (
        picked
        and width >= WIDE_TILE
        and any(own != {inner} for own in indices)
        and not roles.places
    ):
        return False  # each place has an index of its own, or each row and column
    if width % 4 == 0:
        return True
    return width < LONG_LINE and (width > SHORTEST_ROW or len(roles.kept) > 2 or picked)


def _flat_sums(roles: Roles) -> tuple[str, ...]:
    """The places of sums, in the order in which they are walked one after the other: as the factor
    lies in memory that has a number for each point; or else as they are written, where rows of them
    are too short for a side of a tile, and are read in that order. Nothing where what is summed
    lies along memory, where it meets in places, or where each sum has a list of what it reads.
    """
    if roles.row or roles.absorbed or roles.places or not roles.summed or len(roles.kept) < 2:
        return ()
    every = {*roles.kept, *roles.summed}
    for factor in roles.factors:
        names = [i.var for i in factor.indices] if isinstance(factor, Access) else []
        if {*names} == every and len(names) == len(every):
            inner = str(names[-1])
            fills = roles.extents[inner] % WIDE_TILE == 0 or roles.extents[inner] >= LONG_LINE
            if inner in roles.summed or fills:
                return ()
            return tuple(v for v in names if v in roles.kept)
    inner = roles.kept[-1]
    if not roles.in_a_row or roles.extents[inner] >= 2 * SHORTEST_RUN or _summed_instead(roles):
        return ()
    lists = ({*variables(a)} for f in roles.factors for a in _indices(f))
    if any(own & {*roles.summed} and own & {*roles.kept} for own in lists):
        return ()
    long = (v for v in roles.summed if roles.extents[v] >= SHORTEST_RUN)
    along = max((_lies_along(roles, v) for v in (*long, *roles.kept[:-1])), default=0)
    return roles.kept if _lies_along(roles, inner) > along else ()


def _beside_runs(roles: Roles) -> str:
    """What is summed in steps of several: of the factor with a number for each point what lies next
    to the places in memory, where it is not short; else what is longest.
    """
    near: list[str] = []
    for factor in roles.factors:
        if {*variables(factor)} >= {*roles.kept, *roles.summed} and isinstance(factor, Access):
            names = (v for index in reversed(factor.indices) for v in variables(index))
            near = [v for v in names if v in roles.summed and roles.extents[v] >= SMALLEST_DOT]
            break
    return near[0] if near else max(roles.summed, key=lambda v: roles.extents[v], default="")


def _written_together(roles: Roles, m: str, n: str) -> tuple[str, ...]:
    """All kept variables around rows of the output that are not long, where nothing is summed: the
    rows of a tile then lie together in memory, and what is read for some of them is read once.
    """
    if roles.row or roles.summed or roles.absorbed or not m or n != roles.kept[-1]:
        return ()
    if roles.extents[n] >= LONG_LINE or _turns(roles, n, m):
        return ()
    return roles.kept[:-1]


def _beside_row(roles: Roles, axes: set[str]) -> tuple[str, ...]:
    """A short kept variable, such as the heads of an attention, that goes with the rows of a
    segmented output: its values share the entries' indices.
    """
    rest = [v for v in roles.kept if v not in axes]
    if (
        not roles.row
        or roles.row not in axes
        or not rest
        or not 1 < roles.extents[rest[-1]] <= BESIDE_UP_TO
    ):
        return ()
    return (rest[-1],)


def _innermost(roles: Roles, kept: Sequence[str]) -> str:
    """The innermost kept variable, unless it is tiny and another is not; one that a gathered row
    is read along all the same, for the other would read a row for every number. Of the rows of a
    segmented output all lie in memory one after the other, and half as much is wide enough. Where
    far more is read than written, that is what counts.
    """
    if not kept:
        return ""
    most = max(kept, key=functools.partial(_lies_along, roles))
    if not roles.row and roles.summed and len(kept) > 2 and roles.extents[most] >= SHORTEST_RUN:
        beside = max(_lies_along(roles, kept[-1]), math.prod(roles.extents[v] for v in kept))
        if _lies_along(roles, most) >= MOSTLY_READ * beside:
            return most
    inner, widest = kept[-1], max(kept, key=lambda v: (roles.extents[v], _lies_along(roles, v)))
    wide = (2 if roles.row else 1) * roles.extents[inner] >= min(16, roles.extents[widest])
    return inner if wide or _along_gathered_rows(roles, inner, widest) else widest


def _along_gathered_rows(roles: Roles, inner: str, outer: str) -> bool:
    """Whether all that is read along ``inner`` is rows, and ``outer`` finds them by an index."""
    reads = [a for f in roles.factors for a in accesses(f, nested=False) if a.indices]
    rows = [a for a in reads if a.indices[-1].var == inner and len(a.indices) > 1]
    return any(
        outer in variables(index) and index.var is None for a in rows for index in a.indices[:-1]
    ) and not any(a.indices[-1].var == outer for a in reads)


def _held_axis(roles: Roles) -> str:
    """Of the absorbed variables, the one that the fewest factors depend on: those are then read
    once for all of its values.
    """
    depends = [roles.depends(f) for f in range(len(roles.factors))]
    return max(
        roles.held, key=lambda v: (-sum(v in d for d in depends), roles.extents[v]), default=""
    )


def _summed_instead(roles: Roles) -> str:
    """A short summed variable for the N axis where the kept ones walk no innermost dimension and it
    does; a longer one where several do.

    Then the tile reads memory in order, and the axis is summed after the loop. Kept variables go to
    the grid, but for the rows of a segmented output, whose tiles are as deep as their entries.
    """
    if any(contiguity(roles.factors, v) for v in roles.kept):
        return ""
    along = [v for v in roles.summed if contiguity(roles.factors, v)]
    # where one factor lies along one, and another along another, a tile of both reads whole lines
    most = LONGEST_ROW if roles.row or len(along) > 1 else FLATTEN_UP_TO
    short = [v for v in along if SMALLEST_DOT <= roles.extents[v] <= most and v != roles.segment]
    if roles.row:
        return max(short, key=lambda v: contiguity(roles.factors, v), default="")
    long = [v for v in roles.summed if v not in short]
    work = math.prod(roles.extents[v] for v in roles.kept)
    if work >= MANY_SUMS and math.prod(roles.extents[v] for v in roles.summed) < LONG_SUM:
        return ""  # too little for programs of their own
    return (
        max(short, key=lambda v: contiguity(roles.factors, v))
        if short and (long or len(roles.summed) > 1) and (work >= 64 or len(along) > 1)
        else ""
    )


def contiguity(factors: Sequence[Expr], v: str) -> int:
    """In how many accesses of two dimensions or more ``v`` walks the innermost one."""
    reads = [a for f in factors if not isinstance(f, Number) for a in accesses(f)]
    return sum(1 for a in reads if len(a.indices) > 1 and a.indices[-1].var == v)


def _one(v: str) -> tuple[str, ...]:
    return (v,) if v else ()
