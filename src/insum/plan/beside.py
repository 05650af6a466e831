"""Statements over the same points as one kernel with several results: what several of them read is
read once.

One of them owns the kernel's loops. It sums the entries of rows, or has a place for every entry;
the others write a place for every entry, of all columns or of each, while the first walks them. So
are all gradients of a product along edges: by what the edges start from, which is a sum over them,
and by what each edge has. The product of a statement without a pattern is a pattern of one point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from insum.lang.expr import (
    Access,
    Affine,
    Expr,
    Number,
    Var,
    accesses,
    index_of,
    substitute,
    variables,
)
from insum.plan.draft import Planned
from insum.plan.joining import union_of
from insum.plan.plan import Beside, Pattern, PatternPoint, Plan
from insum.plan.recipes import Composed, Segments, Sorted
from insum.plan.sizes import OUT, WIDE_LOAD, beside
from insum.plan.substitution import replace_atom
from insum.plan.tiling import BYTES

#: Tiles that a kernel holds all along, of two elements for each thread: beyond it registers are
#: spilled, or too few programs run at once, and results are quicker one by one.
MOST_HELD = 48
#: Points of all results of a kernel: compilers take minutes for more.
MOST_POINTS = 600
#: Columns that one tile holds, where a result is summed over all of them.
MOST_COLUMNS = 256
#: Bytes of a row that two results read from which on it is worth reading once: each entry is
#: written where it stands, which narrow rows save less than it costs; and the same where an entry
#: has as many columns as the row.
LEAST_BYTES, LEAST_ENTRY_BYTES = 64, 256

EntryWalk = Callable[[Expr], Expr]  # an access is one afterwards, too


def beside_each_other(planned: Mapping[int, Planned]) -> list[int]:
    """Of several, by number, those that one kernel may write; first the one that owns its loops:
    the shortest that sums rows, else one that has a place for every entry and column. None where
    that is too much for one kernel.
    """
    plain = {k: one for k, one in planned.items() if _is_plain(one.plan)}
    rows = [k for k, one in plain.items() if one.plan.segment is not None]
    every = [k for k, one in plain.items() if _has_every_place(one.plan)]
    first = min(rows or every, key=lambda k: _points(plain[k]), default=None)
    if first is None:
        return []
    if plain[first].plan.pattern is None:
        return _of_single_products(plain, rows)
    found = [first, *(k for k, one in plain.items() if k != first and _is_entrywise(one))]
    return found if _fits([plain[k] for k in found]) else []


def _of_single_products(plain: Mapping[int, Planned], rows: Sequence[int]) -> list[int]:
    """The same of statements without a pattern: the sum of rows that most others share what they
    gather with, and those.
    """
    found: list[int] = []
    for first in rows:
        others = [k for k, one in plain.items() if k != first and _shares(plain[first], one)]
        if len(others) >= max(1, len(found)):
            found = [first, *others]
    return found


def _shares(first: Planned, other: Planned) -> bool:
    """Whether both read the same rows, entry by entry, and these are not narrow."""
    walk = _walk_of(first)
    if walk is None or other.plan.pattern is not None or not _is_entrywise(other):
        return False
    assert first.plan.segment is not None
    (column,) = first.plan.roles.n
    home, slot = walk(_index_of_rows(first)), first.plan.segment.var
    gathered = {
        one
        for one in _reads(first)
        if {slot, column} <= set(variables(one)) and home not in {*accesses(one)}
    }
    shared = gathered.intersection(map(walk, _reads(other)))
    columns_kept = column in variables(other.plan.target)
    least = LEAST_ENTRY_BYTES if columns_kept else LEAST_BYTES
    return any(_row_bytes(first, read, {slot}) >= least for read in shared)


def _row_bytes(one: Planned, read: Access, apart: set[str]) -> int:
    """Of what is read at one place of the variables ``apart``."""
    size = BYTES.get(dict(one.plan.kinds)[read.tensor], WIDE_LOAD)
    return size * math.prod(one.extents[v] for v in variables(read) if v not in apart)


def _reads(one: Planned) -> set[Access]:
    return {read for factor in one.plan.factors for read in accesses(factor, nested=False)}


def _fits(planned: Sequence[Planned]) -> bool:
    """Whether one kernel can hold what it sums, and what it reads for several of its results."""
    if sum(map(_points, planned)) > MOST_POINTS:
        return False
    columns = _columns(planned[0].plan)
    points = [point for one in planned for point in _pattern(one).points]
    sums = {
        (number, target)
        for number, one in enumerate(planned)
        for target, _ in _pattern(one).points
        if not number or not columns <= set(variables(target))
    }
    reads: dict[str, set[tuple[int, ...]]] = {}  # places of the pattern, however entries are called
    for factor in (f for _, factors in points for f in factors if isinstance(f, Access)):
        if columns <= set(variables(factor)):
            fixed = tuple(index.offset for index in factor.indices if not index.terms)
            reads.setdefault(factor.tensor, set()).add(fixed)
    # those that come in most forms are read when they are used
    most = max(map(len, reads.values()), default=0)
    return len(sums) + sum(len(forms) for forms in reads.values() if len(forms) < most) <= MOST_HELD


def together(first: Planned, others: Sequence[Planned]) -> Planned | None:
    """The first with what the others write beside it; None where they are not walked alike. A
    variable means the same in all of them.
    """
    walk = _walk_of(first)
    if walk is None or not all(_is_entrywise(one) for one in others):
        return None
    every = [first, *others]
    if len({one.plan.pattern is None for one in every}) > 1:
        return None
    if len({(one.plan.accumulator, one.plan.wide) for one in every}) > 1:
        return None
    parts = [
        union_of([_without_out(dict(getattr(one.plan, name))) for one in every])
        for name in ("kinds", "strides", "made")
    ]
    kinds, strides, made = parts
    if kinds is None or strides is None or made is None:
        return None
    results = tuple(_beside(number, one, walk) for number, one in enumerate(others, 1))
    if not all(_is_walked(result, first) for result in results):
        return None
    own = {OUT: dict(first.plan.strides)[OUT]}
    own |= {result.tensor: dict(o.plan.strides)[OUT] for result, o in zip(results, others)}
    plan = replace(
        first.plan,
        beside=results,
        home=first.plan.home or _home(first, walk, results),
        kinds=tuple(sorted(kinds.items())),
        strides=tuple(sorted({**strides, **own}.items())),
        made=tuple(sorted(made.items())),
        why=(*first.plan.why, f"{len(others)} more results of the same points are written beside"),
    )
    return replace(first, plan=plan)


def _is_plain(plan: Plan) -> bool:
    """Whether a plan is straight-line code of which nothing is absent, out of range or added to."""
    odd = plan.padded or plan.guarded or plan.wraps or plan.numbers or plan.bounds or plan.views
    if plan.reduce != "sum" or plan.accumulate or odd:
        return False
    if plan.pattern is None:
        return plan.strategy == "store" or _sums_rows(plan)
    if any(not isinstance(f, Number | Access) for f in plan.factors):
        return False
    if plan.segment is not None:
        return plan.strategy == "segment" and not plan.segment.tiled and not plan.roles.grid
    return plan.strategy == "unrolled"


def _sums_rows(plan: Plan) -> bool:
    """Whether tiles hold rows of entries, of which nothing but columns is beside them."""
    roles, segment = plan.roles, plan.segment
    if segment is None or not segment.tiled or roles.dot or len(roles.n) != 1:
        return False
    return roles.k == (segment.var,) and not roles.loops and not roles.outer


def _is_entrywise(one: Planned) -> bool:
    """Whether a result has a place for every entry, and no other."""
    plain = _is_plain(one.plan) and one.plan.segment is None and not one.arrays
    targets = [target for target, _ in _pattern(one).points]
    scattered = any(True for target in targets for i in target.indices for _ in accesses(i))
    # where a pattern leads is all there is; windows may lie apart
    every = one.plan.pattern is not None or all(i.var for i in one.plan.target.indices)
    return plain and every and not scattered


def _has_every_place(plan: Plan) -> bool:
    """Whether nothing is summed but points of the pattern: rows are entries."""
    roles = plan.roles
    summed = roles.k or roles.loops or roles.grid or plan.segment or plan.pattern is None
    return not summed and len(roles.m) == 1 and len(roles.n) == 1 and _columns(plan) <= _kept(plan)


def _columns(plan: Plan) -> set[str]:
    return set(plan.roles.n)


def _kept(plan: Plan) -> set[str]:
    return set(variables(plan.target))


def _pattern(one: Planned) -> Pattern:
    return one.plan.pattern or Pattern((), ((one.plan.target, one.plan.factors),))


def _points(one: Planned) -> int:
    return len(_pattern(one).points)


def _without_out(strides: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in strides.items() if name != OUT}


def _walk_of(first: Planned) -> EntryWalk | None:
    """What an expression over entries is called where the first walks them."""
    segment = first.plan.segment
    if segment is None:
        return lambda expr: expr
    slot, entry = segment.var, _entry_of(first)
    order = None if isinstance(first.segments, Segments) else _array(first, "order")
    if not entry or order is None and not isinstance(first.segments, Segments):
        return None
    changes: list[tuple[Access, Var | Access]] = []
    if not segment.tiled:  # a tile of rows also has pieces of some, which know their row as entries
        changes.append((_index_of_rows(first), Var(segment.row)))
    for name, array in first.arrays.items():
        if isinstance(array.recipe, Composed) and array.recipe.dims == (0,):
            changes.append((_at(array.recipe.source, entry), _at(name, slot)))
    places = {} if order is None else {entry: Affine(((1, _at(order, slot)),))}

    def walk(expr: Expr) -> Expr:
        for old, new in changes:
            expr = replace_atom(expr, old, new)
        return substitute(expr, places)

    return walk


def _entry_of(first: Planned) -> str:
    """What entries are called where they are not in order, or ''."""
    assert first.plan.segment is not None
    slot = first.plan.segment.var
    match first.segments:
        case Segments():
            return slot
        case Sorted(str()):
            size = dict(first.plan.made)[slot]
            return getattr(size[0], "var", "") if len(size) == 1 else ""
    return ""


def _index_of_rows(first: Planned) -> Access:
    """The index that rows are made of, by entries."""
    assert isinstance(first.segments, Segments | Sorted)
    assert isinstance(first.segments.index, str)  # else entries have no name
    return _at(first.segments.index, _entry_of(first))


def _home(first: Planned, walk: EntryWalk, results: Sequence[Beside]) -> Access | None:
    """The same as entries are walked, where tiles of rows read it for some result."""
    if first.plan.segment is None or not first.plan.segment.tiled:
        return None
    home = walk(_index_of_rows(first))
    assert isinstance(home, Access)
    points = (point for result in results for point in result.pattern.points)
    read = {a for _, factors in points for factor in factors for a in accesses(factor)}
    return home if home in read else None


def _array(first: Planned, part: str) -> str | None:
    """The name of an array of the order in which the first walks entries."""
    return next(
        (n for n, a in first.arrays.items() if a.recipe == first.segments and a.part == part), None
    )


def _at(tensor: str, var: str) -> Access:
    return Access(tensor, (index_of(var),))


def _beside(number: int, one: Planned, walk: EntryWalk) -> Beside:
    pattern = _pattern(one)
    known: dict[int, Expr] = {}  # points share their expressions

    def once(expr: Expr) -> Expr:
        if id(expr) not in known:
            known[id(expr)] = walk(expr)
        return known[id(expr)]

    def walked(point: PatternPoint) -> PatternPoint:
        target, factors = point
        place = once(target)
        assert isinstance(place, Access)
        return place, tuple(map(once, factors))

    return Beside(beside(number), replace(pattern, points=tuple(map(walked, pattern.points))))


def _is_walked(result: Beside, first: Planned) -> bool:
    """Whether a result has a place for every entry, and nothing runs but what the first runs over;
    all of the columns are in one tile, where they are summed.
    """
    plan, columns = first.plan, _columns(first.plan)
    rows = {plan.segment.row, plan.segment.var} if plan.segment else set(plan.roles.m)
    entry = plan.segment.var if plan.segment else plan.roles.m[0]
    # what else tells the tiles of rows apart: an entry is walked once for each of its values
    apart = {*plan.roles.m[1:], *plan.roles.grid} if plan.segment else set()
    for target, factors in result.pattern.points:
        kept = set(variables(target))
        used = kept.union(*(variables(f) for f in factors))
        if not apart | {entry} <= kept or not used <= rows | apart | columns:
            return False
        if not kept <= apart | {entry} | columns:
            return False
        (column,) = columns
        if column not in kept and first.sizes.extents[column].most > MOST_COLUMNS:
            return False
    return True
