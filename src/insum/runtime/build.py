"""Planned products + choices -> a program: kernels written, arguments and grids as recipes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

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
from insum.codegen.checking import BLOCK, emit_check
from insum.codegen.copies import emit_aligning, emit_fitting, rows_at_once
from insum.codegen.cut_rows import beside_rows
from insum.codegen.emit import Kernel, Shape, Written, emit, emit_joined
from insum.codegen.unrolled import emit_unrolled, parts
from insum.lang.bind import Problem
from insum.lang.expr import Access, accesses, fresh, index_of, variables
from insum.lang.types import identity
from insum.plan import first_guess, tiling
from insum.plan.aligning import Alignment, alignment_of
from insum.plan.config import Choice, Config
from insum.plan.draft import Planned, Wishes
from insum.plan.fitting import Fit, fit_of
from insum.plan.orientation import oriented
from insum.plan.plan import Plan, Segment
from insum.plan.recipes import (
    CeilDivided,
    OfCount,
    OfExtent,
    OfLength,
    Pieces,
    Recipe,
    SizeExpr,
    Sorted,
    Tasks,
)
from insum.plan.roles import Contraction, Roles, contraction
from insum.plan.sizes import ALIGNED, BASE, FITTED, NEW, OUT, WORK, Strides, power_of_two
from insum.plan.uses import Use
from insum.runtime import launch
from insum.runtime.program import (
    WIDE,
    CopyRoom,
    Grid,
    Launch,
    ProductLaunches,
    Program,
    Room,
    Workspace,
)

#: Entries of the pieces that a sorted index tensor is cut into which was never seen.
UNSEEN_PIECE = 64
#: Masks compare with extents in units of at most so many elements: a wide load of halves.
MOST_UNIT = 8
#: Of the names of kernels that put pieces together.
PIECES = "pieces"


def assemble(
    problem: Problem,
    planned: Sequence[Planned],
    wishes: Wishes,
    choices: Sequence[Choice],
    unchecked: tuple[Use, ...] = (),
    room: Room | None = None,
) -> Program:
    """The launches of all products of a statement, each by its choice; ``room``: where their
    kernels are counted.
    """
    widest = WIDE[planned[0].plan.accumulator]
    buffered = widest != problem.dtype and _meet(planned)
    if buffered:  # contributions meet in a new tensor, whatever strides the passed one has
        planned = [_into_new(one) for one in planned]
    if unchecked and wishes.base == OUT:  # all products of a call in place are added, or none is
        planned = [replace(one, plan=replace(one.plan, leaves=True)) for one in planned]
    steps = tuple(
        step_of(one, wishes, choice, room) for one, choice in zip(planned, choices, strict=True)
    )
    cut = widest != problem.dtype and any(step.atomic for step in steps)
    buffer = widest if buffered or cut else None
    start = identity(problem.statement.operator, buffer or problem.dtype)
    check = _check(problem, planned[0], unchecked, start, room) if unchecked else None
    return Program(problem, wishes, steps, buffer, start, unchecked, check)


def _check(
    problem: Problem,
    planned: Planned,
    unchecked: tuple[Use, ...],
    start: bool | int | float,
    room: Room | None,
) -> Launch:
    """The launch that looks at index values before the others."""
    plan, general = planned.plan, planned.sizes.general
    numbers = frozenset(n for n, kind in problem.kinds.items() if kind.device is None)
    fill = repr(start) if math.isfinite(start) else f'float("{start}")'
    kernel = emit_check(unchecked, problem.padded, numbers, fill)
    header = f'"""Looks at the indices of {_comment(plan.statement)}"""'
    function = launch.load(kernel, header)
    grid: Grid = (((Count("most"),), BLOCK),)
    wide = replace(plan, wide=True, made=())
    return Launch(wide, kernel, function, header, Config(), grid, {}, {}, general, room)


def _meet(planned: Sequence[Planned]) -> bool:
    """Whether contributions of several launches, or of several programs, meet in one place."""
    return len(planned) > 1 or any(one.plan.strategy == "atomic" for one in planned)


def _into_new(planned: Planned) -> Planned:
    strides = dict(planned.plan.strides) | {OUT: planned.sizes.strides[NEW]}
    return replace(planned, plan=replace(planned.plan, strides=tuple(sorted(strides.items()))))


def first_choice(planned: Planned, wishes: Wishes) -> Choice:
    """What the model says, without any search."""
    plan = oriented(planned.plan, planned.extents, allowed=wishes.settings.swap)
    choice = first_guess.first_choice(
        plan, planned.extents, longest=planned.longest, entries=planned.entries
    )
    return first_guess.suited(planned.plan, choice, wishes.architecture)


def step_of(planned: Planned, wishes: Wishes, choice: Choice, room: Room | None) -> ProductLaunches:
    """The launches of one product."""
    plan = oriented(planned.plan, planned.extents, choice[0].swap, allowed=wishes.settings.swap)
    build = _Build(replace(planned, plan=plan), wishes, choice, room)
    if plan.pattern:
        return build.unrolled()
    return build.rows() if tiling.in_rows(plan) else build.tiles()


class _Build:
    """Turns one planned product into launches."""

    def __init__(self, planned: Planned, wishes: Wishes, choice: Choice, room: Room | None) -> None:
        self.planned, self.wishes, self.choice, self.room = planned, wishes, choice, room
        self.plan, self.extents = planned.plan, planned.extents

    def step(
        self, launches: Sequence[Launch], *, atomic: bool = False, workspace: Workspace = ()
    ) -> ProductLaunches:
        used = {*variables(self.plan.target), *(v for f in self.plan.factors for v in variables(f))}
        made = dict(self.plan.made)
        inner = {one.var for v in used for one in made.get(v, ()) if isinstance(one, OfExtent)}
        inner |= {bound.var for bound in self.plan.bounds}
        names = tuple(v for v in (*used, *inner) if v not in made)
        return ProductLaunches(self.planned, tuple(launches), workspace, atomic, self.choice, names)

    # --- what the text depends on ---

    def multiple(self, axis: Sequence[str]) -> int:
        """What the extent of an axis is a multiple of, whatever the call."""
        own = self.planned.multiples
        rest = [v for v in axis if v not in own]
        return math.prod(own[v] for v in axis if v in own) * self.planned.sizes.multiple(rest)

    def shape(self, config: Config, pieces: int = 1) -> Shape:
        roles, plan = self.plan.roles, self.plan
        segmented = plan.segment is not None and plan.segment.var in (*roles.k, *roles.loops)
        alone = not roles.loops and not segmented
        k, tiles = roles.k[:1], self.k_tiles(config)
        return Shape(
            even_m=(1 if self.has_any_rows() else self.multiple(roles.m)) % config.m == 0,
            even_n=self.multiple(roles.n) % config.n == 0,
            even_k=self.multiple(k) % config.k == 0,
            inner=tiling.inner_extent(plan, self.extents),
            onehot=power_of_two(self.planned.sizes.shape[plan.onehot]) if plan.onehot >= 0 else 0,
            k_tiles=tiles,
            single_k=tiles == 1 and alone,
            pieces=pieces > 1,
            units=self.units(),
        )

    def k_tiles(self, config: Config) -> int:
        """How many tiles cover the K axis, where that is the same for every extent of the class;
        else 0, as for the entries of segments.
        """
        k, segment = self.plan.roles.k[:1], self.plan.segment
        if not k or segment is not None and segment.var in k:
            return 0
        if self.fits_one_tile(k, config.k):
            return 1
        size = self.planned.sizes.extents.get(k[0])
        if size is None or size.open:
            return 0
        least, most = (-(-n // config.k) for n in (size.least, size.most))
        return most if least == most else 0

    def fits_one_tile(self, axis: tuple[str, ...], tile: int) -> bool:
        """Whether every extent of the class does."""
        found = 1
        for var in axis:
            most = self.most((OfExtent(var),))
            if most is None:
                return False
            found *= most
        return found <= tile

    def most(self, size: SizeExpr) -> int | None:
        """What no size of the class exceeds; None where the class does not say."""
        made, classes, found = dict(self.plan.made), self.planned.sizes.extents, 1
        for one in size:
            match one:
                case int():
                    most: int | None = one
                case OfExtent(var) if var in made:
                    most = self.most(made[var])
                case OfExtent(var) if var in classes:
                    most = None if classes[var].open else classes[var].most
                case CeilDivided(inner, by):
                    whole = self.most((inner,))
                    most = None if whole is None else -(-whole // by)
                case _:
                    most = None
            if most is None:
                return None
            found *= most
        return found

    def units(self) -> tuple[tuple[str, int], ...]:
        odd = self.plan.roles.m if self.has_any_rows() else ()
        found = {v: min(MOST_UNIT, self.multiple((v,))) for v in self.planned.sizes.extents}
        return tuple((v, unit) for v, unit in found.items() if unit > 1 and v not in odd)

    def has_any_rows(self) -> bool:
        """Whether one text is for any number of rows: patterns, and sums of threads, whose rows lie
        apart in memory. A mask costs them next to nothing; a compilation whenever a batch has an
        even number of items costs seconds.
        """
        plan = self.plan
        if plan.pattern is None and (plan.roles.dot or plan.strategy != "store"):
            return False
        return not {*plan.roles.m} & _along_memory(plan)

    # --- dense tiles, with or without segments looped over inside ---

    def tiles(self) -> ProductLaunches:
        (config,) = self.choice
        pieces, apart = self.pieces(config)
        fit = fit_of(self.planned, config) if pieces == 1 else None
        alignment = alignment_of(self.planned, config) if pieces == 1 else None
        plan = self.plan
        for copy in (fit, alignment):
            plan = plan if copy is None else copy.reading(plan)
        wished = self.wishes.settings
        kernel = emit(
            plan,
            config,
            replace(self.shape(config, pieces), apart=apart),
            prefetch=wished.prefetch,
            lazy=wished.lazy_broadcasting,
        )
        grid = (*tile_grid(plan.roles, config), ((Count("piece_count"),), 1))
        counts = {"piece_count": pieces}
        one = self.launch(plan, config, kernel, grid, self.segment_arrays(), counts)
        copies = [
            *([self.fitted(fit)] if fit else []),
            *([self.aligned(alignment)] if alignment else []),
        ]
        if copies:
            launches = (*(copy for copy, _ in copies), one)
            return replace(self.step(launches), copies=tuple(room for _, room in copies))
        if apart:
            kept = dict.fromkeys(variables(self.plan.target))
            made = dict(self.plan.made)
            workspace = (pieces, *(one for v in kept for one in made.get(v, (OfExtent(v),))))
            return self.step((one, self.together(pieces)), workspace=(workspace,))
        return self.step((one,), atomic=self.plan.strategy == "atomic" or pieces > 1)

    def fitted(self, fit: Fit) -> tuple[Launch, CopyRoom]:
        """The launch that copies a factor into whole tiles, and the memory for it."""
        matrices = tuple(OfLength(fit.tensor, dim) for dim in fit.dims[:-2])
        plan, rows = self.copying(FITTED, fit.tensor, (*matrices, fit.sides[0]))
        kernel = emit_fitting(plan, fit, dict(self.units()))
        room = self.room_of(FITTED, fit.tensor, (*matrices, *fit.sides))
        return self.copy(plan, kernel, fit.tensor, rows, rows_at_once(fit.sides[1])), room

    def aligned(self, alignment: Alignment) -> tuple[Launch, CopyRoom]:
        """The launch that copies a factor into rows which begin at whole loads."""
        tensor, length = alignment.tensor, OfLength(alignment.tensor, 0)
        plan, rows = self.copying(ALIGNED, tensor, (length,))
        kernel = emit_aligning(plan, alignment, dict(self.units()))
        room = self.room_of(ALIGNED, tensor, (length, alignment.row))
        return self.copy(plan, kernel, tensor, rows, rows_at_once(alignment.row)), room

    def copying(self, name: str, tensor: str, rows: SizeExpr) -> tuple[Plan, str]:
        """The plan of a launch that writes a copy, and the variable of the copy's rows."""
        plan, var = self.plan, fresh("rows", {*self.extents, *dict(self.plan.made)})
        kinds = (*plan.kinds, (name, dict(plan.kinds)[tensor]))
        return replace(plan, made=(*plan.made, (var, rows)), kinds=kinds), var

    def copy(self, plan: Plan, kernel: Kernel, tensor: str, rows: str, at_once: int) -> Launch:
        header = f'"""Copies {tensor} for {_comment(plan.statement)}"""'
        grid: Grid = (((ExtentArgument(rows),), at_once),)
        config, function = Config(warps=4, stages=1), launch.load(kernel, header)
        return Launch(plan, kernel, function, header, config, grid, {}, {}, room=self.room)

    def room_of(self, name: str, tensor: str, shape: SizeExpr) -> CopyRoom:
        return CopyRoom(name, shape, getattr(torch, dict(self.plan.kinds)[tensor]))

    def together(self, pieces: int) -> Launch:
        """The pieces of a long reduction, from the workspace: a reduction over them."""
        plan, kept = self.plan, tuple(dict.fromkeys(variables(self.plan.target)))
        piece = fresh("piece", {*self.extents, *dict(plan.made)})
        read = Access(WORK, (index_of(piece), *map(index_of, kept)))
        extents = {**self.extents, piece: pieces}
        used = {OUT, BASE, *(a.tensor for i in plan.target.indices for a in accesses(i))}
        plan = replace(
            plan,
            factors=(read,),
            roles=contraction(Roles((read,), kept, (piece,), extents), allow_dot=False),
            kinds=(*((n, kind) for n, kind in plan.kinds if n in used), (WORK, plan.accumulator)),
            strides=(
                *((n, s) for n, s in plan.strides if n in used),
                (WORK, self.work_strides(kept)),
            ),
            views=tuple((n, view) for n, view in plan.views if n in used),
            made=(*plan.made, (piece, (pieces,))),
            numbers=(),
            operand="",
            precision="",
            idle=None,
            bounds=(),
        )
        config = first_guess.first_guess(plan, extents)
        kernel = emit(plan, config, Shape(units=self.units()), prefetch=False, suffix=PIECES)
        return self.launch(plan, config, kernel, tile_grid(plan.roles, config), {}, {})

    def segment_arrays(self) -> dict[str, tuple[Recipe, str]]:
        recipe = self.planned.segments
        return {} if recipe is None else {START: (recipe, "start"), END: (recipe, "end")}

    def pieces(self, config: Config) -> tuple[int, bool]:
        """Into how many pieces a long reduction is cut, and whether each has a buffer of its own:
        all of them are to be little beside what is read. Sums whose order may differ need one,
        they meet in atomics.
        """
        wanted = tiling.pieces(self.plan, config, self.extents)
        alone = self.plan.reduce != "sum" or self.wishes.deterministic or self.wishes.accumulate
        most = self.planned.buffers if alone or not self.planned.buffers else wanted
        found = max(1, min(wanted, most))
        return found, alone and found > 1

    # --- rows of a segmented output in the tile ---

    def rows(self) -> ProductLaunches:
        base = self.planned.segments
        assert base is not None
        short, long = self.choice
        if not self.planned.longest and isinstance(base, Sorted):
            return self.unseen_rows(base, short)
        longest = self.planned.longest
        recipe = Tasks(base, short.split or max(1, longest))  # type: ignore[arg-type]
        split = bool(short.split) and longest > short.split
        if split:
            self.widen(short.split)
        plan = replace(self.plan, split=split)
        tasks, longer = OfCount(recipe, "tasks"), OfCount(recipe, "long")
        if longest <= tiling.SHORT and not split:
            return self.step([self.row_launch(plan, short, recipe, longer, tasks)])
        together = first_guess.in_one_launch(self.choice, self.planned.entries)
        if together and (self.may_wait() or not split):
            workspace = self.workspace(plan, recipe, long)
            return self.step([self.joined_rows(plan, recipe)], workspace=workspace)
        launches = (
            self.row_launch(plan, long, recipe, 0, longer),
            self.sums_and_rows(plan, recipe)
            if split
            else self.row_launch(plan, short, recipe, longer, tasks),
        )
        return self.step(launches, workspace=self.workspace(plan, recipe))

    def widen(self, limit: int) -> None:
        """Offsets of 64 bits where pieces of so many entries may be too many for others: few rows
        with many pieces each are, though all that is passed is small.
        """
        slots = 2 * (1 + self.planned.entries // limit)
        kept = math.prod(self.extents[v] for v in beside_rows(self.plan))
        if slots * kept >= 2**31 - 1:
            self.plan = replace(self.plan, wide=True)

    def may_wait(self) -> bool:
        """Whether programs may wait for each other. Not on AMD's GPUs: there a barrier waits for no
        store to global memory, and what one warp releases says nothing of what others have stored.
        """
        return not self.wishes.architecture.startswith("gfx")

    def joined_rows(self, plan: Plan, recipe: Recipe) -> Launch:
        """Pieces and long rows in the first programs of a launch, short rows in the others."""
        _, long = self.choice
        first = plan, long, replace(self.row_shape(long), waits=plan.split)
        before = first, self.row_grid(plan, long, "task_first")
        arrays, counts = _waiting(recipe) if plan.split else ({}, {})
        return self.before_short_rows(
            recipe, before, {"task_last": Count("task_first")}, arrays, counts
        )

    def sums_and_rows(self, plan: Plan, recipe: Recipe) -> Launch:
        """The rows that were cut, put together out of the workspace by the first programs of a
        launch; short rows in the others.
        """
        sums = self.sum_of_pieces(plan, self.choice[0].warps)
        before = sums, self.row_grid(sums[0], sums[1], "cut_count")
        parts = {SUM_START: START, SUM_END: END, SUM_ROW: ROW}
        own: dict[str, Argument] = {Pointer(old).name: Pointer(new) for new, old in parts.items()}
        arrays = {name: (recipe, name[1:-1]) for name in parts}
        counts = {"cut_count": OfCount(recipe, "cut")}
        own["task_last"] = Count("cut_count")
        return self.before_short_rows(recipe, before, own, arrays, counts)

    def before_short_rows(
        self,
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
        short = self.choice[0]
        kernel = emit_joined(first, (self.plan, short, self.row_shape(short)), own)
        tasks = {"task_first": OfCount(recipe, "long"), "task_last": OfCount(recipe, "tasks")}
        one = self.launch(
            *(self.plan, short, kernel, self.row_grid(self.plan, short)),
            *({**_tasks(recipe), **arrays}, {**tasks, **counts}),
            also=first[1],
        )
        return replace(one, before=grid)

    def unseen_rows(self, base: Sorted, config: Config) -> ProductLaunches:
        """Rows of which nothing is known: their entries are cut into pieces of equal length."""
        recipe = Pieces(base, UNSEEN_PIECE)
        self.widen(UNSEEN_PIECE)
        plan = replace(self.plan, split=True)
        most, few = OfCount(recipe, "tasks"), self.planned.entries < first_guess.ONE_LAUNCH
        waits = few and self.may_wait()
        rows = self.row_launch(plan, config, recipe, 0, most, counted="count", waits=waits)
        launches = [rows] if waits else [rows, self.unseen_sums(plan, recipe)]
        planned = replace(self.planned, fill=True)  # rows without entries have no task
        workspace = self.workspace(plan, recipe, config if waits else None)
        return replace(self.step(launches, workspace=workspace), planned=planned)

    def unseen_sums(self, plan: Plan, recipe: Recipe) -> Launch:
        plan, config, shape = self.sum_of_pieces(plan, 1)
        kernel = emit(plan, config, replace(shape, counted=True), prefetch=False, suffix=PIECES)
        arrays = {**_tasks(recipe, "sum_"), COUNT: (recipe, "sum_count")}
        counts: dict[str, int | OfCount] = {"task_first": 0, "task_last": OfCount(recipe, "cut")}
        return self.launch(plan, config, kernel, self.row_grid(plan, config), arrays, counts)

    def sum_of_pieces(self, plan: Plan, warps: int) -> Written:
        """Adds up the pieces of each cut row: the same kind of kernel, over the workspace."""
        segment, n = plan.segment, plan.roles.n
        assert segment is not None
        others = beside_rows(plan)
        read = Access(WORK, (index_of(segment.var), *(index_of(v) for v in others)))
        grid = tuple(v for v in others if v not in n)
        strides = dict(plan.strides) | {WORK: self.work_strides(others)}
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
        )
        # a row for each warp, for most have few pieces; a single one beside rows of half precision,
        # which take fewer registers: a launch takes for all of it what the larger part does
        m = warps if first_guess.row_bytes(self.plan) >= 4 else 1
        config = replace(first_guess.first_guess(plan, self.extents), m=m, k=8, warps=warps)
        return plan, config, Shape(even_n=self.multiple(n) % config.n == 0, units=self.units())

    def workspace(self, plan: Plan, recipe: Recipe, waits: Config | None = None) -> Workspace:
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

    def row_shape(self, config: Config) -> Shape:
        return replace(self.shape(config), even_m=False, inner=1)

    def row_launch(
        self,
        plan: Plan,
        config: Config,
        recipe: Recipe,
        first: int | OfCount,
        last: int | OfCount,
        *,
        counted: str = "",
        waits: bool = False,
    ) -> Launch:
        shape = replace(self.row_shape(config), counted=bool(counted), waits=waits)
        kernel = emit(plan, config, shape, prefetch=False)
        arrays = _tasks(recipe) | ({COUNT: (recipe, counted)} if counted else {})
        counts: dict[str, int | OfCount] = {"task_first": first, "task_last": last}
        if waits:
            more, slots = _waiting(recipe)
            arrays, counts = {**arrays, **more}, {**counts, **slots}
        return self.launch(plan, config, kernel, self.row_grid(plan, config), arrays, counts)

    def row_grid(self, plan: Plan, config: Config, tasks: str = "task_count") -> Grid:
        beside = tuple(ExtentArgument(v) for v in plan.roles.m[1:])
        found: list[tuple[tuple[ExtentArgument | Count, ...], int]] = [
            ((Count(tasks), *beside), config.m)
        ]
        if plan.roles.n:
            found.append((tuple(ExtentArgument(v) for v in plan.roles.n), config.n))
        return (*found, *(((ExtentArgument(v),), 1) for v in plan.roles.grid))

    def work_strides(self, others: Sequence[str]) -> Strides:
        """Of the workspace: slots, and behind them the other variables of the output."""
        steps = [min(MOST_UNIT, self.multiple(others[at:])) for at in range(len(others))]
        units = (*(-step for step in steps), 1)
        return Strides(units, (True,) * len(others))

    # --- unrolled patterns ---

    def unrolled(self) -> ProductLaunches:
        (config,) = self.choice
        shape = self.shape(config)
        grid, arrays = tile_grid(self.plan.roles, config), self.segment_arrays()
        if self.plan.segment:
            shape = replace(shape, even_k=False)
            grid = (*grid, ((ExtentArgument(self.plan.segment.row),), 1))
        launches = [
            self.launch(
                part, config, emit_unrolled(part, config, shape, self.extents), grid, arrays, {}
            )
            for part in parts(self.plan)
        ]
        return self.step(launches, atomic=self.plan.strategy == "atomic")

    # --- launches ---

    def launch(
        self,
        plan: Plan,
        config: Config,
        kernel: Kernel,
        grid: Grid,
        arrays: Mapping[str, tuple[Recipe, str]],
        counts: Mapping[str, int | OfCount],
        also: Config | None = None,
    ) -> Launch:
        """``also``: the config of programs that come before the others."""
        header = self.header(plan, config, also)
        own = {name: (array.recipe, array.part) for name, array in self.planned.arrays.items()}
        function = launch.load(kernel, header)
        general = self.planned.sizes.general
        return Launch(
            *(plan, kernel, function, header, config, grid, {**own, **arrays}, counts),
            *(general, self.room),
        )

    def header(self, plan: Plan, config: Config, also: Config | None) -> str:
        lines = [
            f'"""{_comment(plan.statement)}',
            "",
            *plan.describe(self.planned.shown()).splitlines(),
            f"config       {config}",
            *([f"             {also} in the first programs"] if also else []),
            '"""',
        ]
        return "\n".join(lines)


def _along_memory(plan: Plan) -> set[str]:
    """Variables whose neighbours lie together in some tensor."""
    strides = {**dict(plan.strides), plan.target.tensor: dict(plan.strides)[OUT]}
    found: set[str] = set()
    for access in (plan.target, *(a for f in plan.factors for a in accesses(f))):
        units = strides[access.tensor].units if access.tensor in strides else ()
        for index, unit in zip(access.indices, units):
            found |= {*variables(index)} if unit == 1 else set()
    return found


def tile_grid(roles: Contraction, config: Config) -> Grid:
    axes = ((roles.m, config.m), (roles.n, config.n))
    found: list[tuple[tuple[ExtentArgument | Count, ...], int]] = [
        (tuple(ExtentArgument(v) for v in axis), tile) for axis, tile in axes if axis
    ]
    return (*found, *(((ExtentArgument(v),), 1) for v in roles.grid))


def _tasks(recipe: Recipe, of: str = "") -> dict[str, tuple[Recipe, str]]:
    """The arrays of a schedule."""
    return {START: (recipe, f"{of}start"), END: (recipe, f"{of}end"), ROW: (recipe, f"{of}row")}


def _waiting(recipe: Recipe) -> tuple[dict[str, tuple[Recipe, str]], dict[str, OfCount]]:
    """What programs know of the pieces of rows that wait for each other."""
    arrays = {CUT_ROW: (recipe, "cut_row"), CUT_START: (recipe, "cut_start")}
    return arrays, {"slot_count": OfCount(recipe, "slots")}


def _comment(text: str) -> str:
    """User text inside a docstring of generated source: printable ASCII without quotes or
    backslashes, whatever was passed.
    """
    return "".join(
        c if c.isascii() and (c.isalnum() or c in " _[]()+-*=.,") else "?" for c in text
    )[:400]
