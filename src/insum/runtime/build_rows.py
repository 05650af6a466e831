"""The launches of a product with rows of a segmented output in the tile: short rows, long ones, and
those that are cut into pieces, which are put together out of a workspace.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from insum.codegen.arguments import (
    COUNT,
    CUT_ROW,
    CUT_START,
    END,
    ROW,
    START,
    SUM_END,
    SUM_ROW,
    SUM_START,
    Argument,
    Count,
    ExtentArgument,
    Pointer,
)
from insum.codegen.cut_rows import beside_rows
from insum.codegen.emit import Written, emit, emit_joined
from insum.codegen.kernel import Shape
from insum.lang.expr import Access, index_of
from insum.plan import first_guess, guess_rows, tiling
from insum.plan.aligning import aligned_rows
from insum.plan.config import Config
from insum.plan.plan import Plan, Segment
from insum.plan.recipes import (
    CeilDivided,
    OfCount,
    OfExtent,
    Pieces,
    Recipe,
    SizeExpr,
    Sorted,
    Tasks,
)
from insum.plan.roles import Contraction
from insum.plan.sizes import WORK, power_of_two
from insum.runtime.build_copies import aligned
from insum.runtime.build_product import PIECES, ProductBuild
from insum.runtime.program import WIDE, Grid, Launch, ProductLaunches, Workspace

#: Entries of the pieces that a sorted index tensor is cut into which was never seen.
UNSEEN_PIECE = 64


def rows(product: ProductBuild) -> ProductLaunches:
    """The launches of sums of rows; a factor is copied first where that pays."""
    alignment = aligned_rows(product.planned)
    if alignment is None:
        return _rows(product)
    copy, room = aligned(product, alignment)
    step = _rows(replace(product, plan=alignment.reading(product.plan)))
    return replace(step, launches=(copy, *step.launches), copies=(room,))


def _rows(product: ProductBuild) -> ProductLaunches:
    """Rows of which nothing is known are pieces of equal length. Of others the short ones and the
    long ones have a config each, in one launch where little is to be done.
    """
    base = product.planned.segments
    assert base is not None
    short, long = product.choice
    if not product.planned.longest and isinstance(base, Sorted):
        return _unseen_rows(product, base, short)
    longest = product.planned.longest
    recipe = Tasks(base, short.split or max(1, longest))  # type: ignore[arg-type]
    split = bool(short.split) and longest > short.split
    if split:
        product = _widened(product, short.split)
    plan = replace(product.plan, split=split)
    tasks, longer = OfCount(recipe, "tasks"), OfCount(recipe, "long")
    if longest <= tiling.SHORT and not split:
        return product.step([_row_launch(product, plan, short, recipe, longer, tasks)])
    together = first_guess.in_one_launch(product.choice, product.planned.entries)
    if together and (_may_wait(product) or not split):
        workspace = _workspace(plan, recipe, long)
        return product.step([_joined_rows(product, plan, recipe)], workspace=workspace)
    launches = (
        _row_launch(product, plan, long, recipe, 0, longer),
        _sums_and_rows(product, plan, recipe)
        if split
        else _row_launch(product, plan, short, recipe, longer, tasks),
    )
    return product.step(launches, workspace=_workspace(plan, recipe))


def _widened(product: ProductBuild, limit: int) -> ProductBuild:
    """Offsets of 64 bits where pieces of so many entries may be too many for others: few rows
    with many pieces each are, though all that is passed is small.
    """
    # extents are typical of their class, in which none is above the next power of two
    slots = 2 * (1 + power_of_two(product.planned.entries) // limit)
    kept = math.prod(power_of_two(product.extents[v]) for v in beside_rows(product.plan))
    if slots * kept < 2**31 - 1:
        return product
    return replace(product, plan=replace(product.plan, wide=True))


def _may_wait(product: ProductBuild) -> bool:
    """Whether programs may wait for each other. Not on AMD's GPUs: there a barrier waits for no
    store to global memory, and what one warp releases says nothing of what others have stored.
    """
    return not product.wishes.architecture.startswith("gfx")


def _joined_rows(product: ProductBuild, plan: Plan, recipe: Recipe) -> Launch:
    """Pieces and long rows in the first programs of a launch, short rows in the others."""
    _, long = product.choice
    first = plan, long, replace(_row_shape(product, long), waits=plan.split)
    before = first, _row_grid(plan, long, "task_first")
    arrays, counts = _waiting(recipe) if plan.split else ({}, {})
    return _before_short_rows(
        product, recipe, before, {"task_last": Count("task_first")}, arrays, counts
    )


def _sums_and_rows(product: ProductBuild, plan: Plan, recipe: Recipe) -> Launch:
    """The rows that were cut, put together out of the workspace by the first programs of a
    launch; short rows in the others.
    """
    sums = _sum_of_pieces(product, plan, product.choice[0].warps)
    before = sums, _row_grid(sums[0], sums[1], "cut_count")
    parts = {SUM_START: START, SUM_END: END, SUM_ROW: ROW}
    own: dict[str, Argument] = {Pointer(old).name: Pointer(new) for new, old in parts.items()}
    arrays = {name: (recipe, name[1:-1]) for name in parts}
    counts = {"cut_count": OfCount(recipe, "cut")}
    own["task_last"] = Count("cut_count")
    return _before_short_rows(product, recipe, before, own, arrays, counts)


def _before_short_rows(
    product: ProductBuild,
    recipe: Recipe,
    before: tuple[Written, Grid],
    own: Mapping[str, Argument],
    arrays: Mapping[str, tuple[Recipe, str]],
    counts: Mapping[str, OfCount],
) -> Launch:
    """Short rows in the programs of a launch that come behind those of something else, which
    has arguments of its own.
    """
    first, grid = before
    short = product.choice[0]
    kernel = emit_joined(first, (product.plan, short, _row_shape(product, short)), own)
    tasks = {"task_first": OfCount(recipe, "long"), "task_last": OfCount(recipe, "tasks")}
    one = product.launch(
        *(product.plan, short, kernel, _row_grid(product.plan, short)),
        *({**_tasks(recipe), **arrays}, {**tasks, **counts}),
        also=first[1],
    )
    return replace(one, before=grid)


def _unseen_rows(product: ProductBuild, base: Sorted, config: Config) -> ProductLaunches:
    """Rows of which nothing is known: their entries are cut into pieces of equal length."""
    recipe = Pieces(base, UNSEEN_PIECE)
    product = _widened(product, UNSEEN_PIECE)
    plan = replace(product.plan, split=True)
    most, few = OfCount(recipe, "tasks"), product.planned.entries < first_guess.ONE_LAUNCH
    waits = few and _may_wait(product)
    rows = _row_launch(product, plan, config, recipe, 0, most, counted="count", waits=waits)
    launches = [rows] if waits else [rows, _unseen_sums(product, plan, recipe)]
    planned = replace(product.planned, fill=True)  # rows without entries have no task
    workspace = _workspace(plan, recipe, config if waits else None)
    return replace(product.step(launches, workspace=workspace), planned=planned)


def _unseen_sums(product: ProductBuild, plan: Plan, recipe: Recipe) -> Launch:
    plan, config, shape = _sum_of_pieces(product, plan, 1)
    kernel = emit(plan, config, replace(shape, counted=True), prefetch=False, suffix=PIECES)
    arrays = {**_tasks(recipe, "sum_"), COUNT: (recipe, "sum_count")}
    counts: dict[str, int | OfCount] = {"task_first": 0, "task_last": OfCount(recipe, "cut")}
    return product.launch(plan, config, kernel, _row_grid(plan, config), arrays, counts)


def _sum_of_pieces(product: ProductBuild, plan: Plan, warps: int) -> Written:
    """Adds up the pieces of each cut row: the same kind of kernel, over the workspace."""
    segment, others = plan.segment, beside_rows(plan)
    assert segment is not None
    n = tuple(v for v in plan.roles.n if v in others)  # what was summed at its end is gone
    read = Access(WORK, (index_of(segment.var), *(index_of(v) for v in others)))
    grid = tuple(v for v in others if v not in n)
    strides = dict(plan.strides) | {WORK: product.work_strides(others)}
    plan = replace(
        plan,
        factors=(read,),
        roles=Contraction((segment.row,), n, (segment.var,), (), (), grid, False, post=(0,)),
        segment=Segment(segment.row, segment.var, True),
        home=None,
        split=False,
        padded=frozenset(),
        guarded=frozenset(),
        wraps=frozenset(),
        kinds=((WORK, plan.accumulator),),
        strides=tuple(sorted(strides.items())),
        views=(),
        numbers=(),
        beside=(),
    )
    # a row for each warp, for most have few pieces; a single one beside rows of half precision,
    # which take fewer registers: a launch takes for all of it what the larger part does
    m = warps if guess_rows.row_bytes(product.plan) >= 4 else 1
    config = replace(first_guess.first_guess(plan, product.extents), m=m, k=8, warps=warps)
    return plan, config, Shape(even_n=product.multiple(n) % config.n == 0, units=product.units())


def _workspace(plan: Plan, recipe: Recipe, waits: Config | None = None) -> Workspace:
    """Pieces of rows; where programs wait for each other, a mark of 8 bytes for every tile."""
    if not plan.split:
        return ()
    slots, kept, n = OfCount(recipe, "slots"), beside_rows(plan), plan.roles.n
    pieces: SizeExpr = (slots, *(OfExtent(v) for v in kept))
    if waits is None:
        return (pieces,)
    others = [OfExtent(v) for v in kept if v not in n]
    tiles = [CeilDivided(OfExtent(v), waits.n if v == n[0] else 1) for v in n]
    words = 8 // WIDE[plan.accumulator].itemsize
    return pieces, (words, slots, *others, *tiles)


def _row_shape(product: ProductBuild, config: Config) -> Shape:
    return replace(product.shape(config), even_m=False, inner=1)


def _row_launch(
    product: ProductBuild,
    plan: Plan,
    config: Config,
    recipe: Recipe,
    first: int | OfCount,
    last: int | OfCount,
    *,
    counted: str = "",
    waits: bool = False,
) -> Launch:
    shape = replace(_row_shape(product, config), counted=bool(counted), waits=waits)
    kernel = emit(plan, config, shape, prefetch=False)
    arrays = _tasks(recipe) | ({COUNT: (recipe, counted)} if counted else {})
    counts: dict[str, int | OfCount] = {"task_first": first, "task_last": last}
    if waits:
        more, slots = _waiting(recipe)
        arrays, counts = {**arrays, **more}, {**counts, **slots}
    return product.launch(plan, config, kernel, _row_grid(plan, config), arrays, counts)


def _row_grid(plan: Plan, config: Config, tasks: str = "task_count") -> Grid:
    beside = tuple(ExtentArgument(v) for v in plan.roles.m[1:])
    found: list[tuple[tuple[ExtentArgument | Count, ...], int]] = [
        ((Count(tasks), *beside), config.m)
    ]
    if plan.roles.n:
        found.append((tuple(ExtentArgument(v) for v in plan.roles.n), config.n))
    return (*found, *(((ExtentArgument(v),), 1) for v in plan.roles.grid))


def _tasks(recipe: Recipe, of: str = "") -> dict[str, tuple[Recipe, str]]:
    """The arrays of a schedule."""
    return {START: (recipe, f"{of}start"), END: (recipe, f"{of}end"), ROW: (recipe, f"{of}row")}


def _waiting(recipe: Recipe) -> tuple[dict[str, tuple[Recipe, str]], dict[str, OfCount]]:
    """What programs know of the pieces of rows that wait for each other."""
    arrays = {CUT_ROW: (recipe, "cut_row"), CUT_START: (recipe, "cut_start")}
    return arrays, {"slot_count": OfCount(recipe, "slots")}
