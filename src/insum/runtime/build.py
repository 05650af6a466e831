"""Planned products + choices -> a program: kernels written, arguments and grids as recipes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from insum.codegen.arguments import (
    Count,
    ExtentArgument,
)
from insum.codegen.checking import BLOCK, emit_check
from insum.codegen.unrolled import emit_unrolled, parts
from insum.lang.bind import Problem
from insum.lang.types import identity
from insum.plan import first_guess, tiling
from insum.plan.aligning import aligned_operands, aligned_rows, sides_by_numbers
from insum.plan.config import Choice, Config
from insum.plan.draft import Planned, Wishes
from insum.plan.fitting import fit_of, is_along_sum
from insum.plan.guess_products import by_numbers
from insum.plan.orientation import oriented
from insum.plan.sizes import BASE, NEW, OUT
from insum.plan.uses import Use
from insum.runtime import launch
from insum.runtime.build_product import ProductBuild, as_comment, tile_grid
from insum.runtime.build_rows import rows
from insum.runtime.build_tiles import tiles
from insum.runtime.program import (
    WIDE,
    Grid,
    Launch,
    ProductLaunches,
    Program,
    Room,
)


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
    fill = _number(start) if wishes.base != BASE else len(problem.shape)
    check = _check(problem, planned[0], unchecked, fill, room) if unchecked else None
    return Program(problem, wishes, steps, buffer, start, unchecked, check)


def _check(
    problem: Problem,
    planned: Planned,
    unchecked: tuple[Use, ...],
    fill: str | int,
    room: Room | None,
) -> Launch:
    """The launch that looks at index values before the others."""
    plan, general = planned.plan, planned.sizes.general
    numbers = frozenset(n for n, kind in problem.kinds.items() if kind.device is None)
    kernel = emit_check(unchecked, problem.padded, numbers, fill)
    header = f'"""Looks at the indices of {as_comment(plan.statement)}"""'
    function = launch.load(kernel, header)
    grid: Grid = (((Count("most"),), BLOCK),)
    wide = replace(plan, wide=True, made=())
    return Launch(wide, kernel, function, header, Config(), grid, {}, {}, general, room)


def _number(start: bool | int | float) -> str:
    return repr(start) if math.isfinite(start) else f'float("{start}")'


def _meet(planned: Sequence[Planned]) -> bool:
    """Whether contributions of several launches, or of several programs, meet in one place."""
    return len(planned) > 1 or any(one.plan.strategy == "atomic" for one in planned)


def _into_new(planned: Planned) -> Planned:
    strides = dict(planned.plan.strides) | {OUT: planned.sizes.strides[NEW]}
    return replace(planned, plan=replace(planned.plan, strides=tuple(sorted(strides.items()))))


def first_choice(planned: Planned, wishes: Wishes) -> Choice:
    """What the model says, without any search."""
    planned = replace(
        planned, plan=oriented(planned.plan, planned.extents, allowed=wishes.settings.swap)
    )
    plan, copy = planned.plan, aligned_rows(planned)
    choice = first_guess.first_choice(
        plan if copy is None else copy.reading(plan),
        planned.extents,
        longest=planned.longest,
        entries=planned.entries,
        along_sum=is_along_sum(planned),
    )
    if plan.roles.dot and not plan.pattern:
        choice = _for_operands_as_they_lie(planned, choice)
    return first_guess.suited(plan, planned.extents, choice, wishes.architecture)


def _for_operands_as_they_lie(planned: Planned, choice: Choice) -> Choice:
    """A smaller tile where operands are read one number at a time, because no copy of them pays."""
    (config,) = choice
    fit = fit_of(planned, config)
    places = [one.place for one in aligned_operands(planned, config)]
    sides = sides_by_numbers(planned, config, [*places, *([fit.place] if fit else [])])
    if not sides:
        return choice
    least_m, _ = tiling.held(planned.plan, planned.extents, 1, 1)
    return (by_numbers(planned.plan, config, sides, least_m),)


def step_of(planned: Planned, wishes: Wishes, choice: Choice, room: Room | None) -> ProductLaunches:
    """The launches of one product."""
    plan = oriented(planned.plan, planned.extents, choice[0].swap, allowed=wishes.settings.swap)
    product = ProductBuild(replace(planned, plan=plan), plan, wishes, choice, room)
    if plan.pattern:
        return _unrolled(product)
    return rows(product) if tiling.in_rows(plan) else tiles(product)


def _unrolled(product: ProductBuild) -> ProductLaunches:
    (config,) = product.choice
    shape = product.shape(config)
    grid, arrays = tile_grid(product.plan.roles, config), product.segment_arrays()
    if product.plan.segment:
        shape = replace(shape, even_k=False)
        grid = (*grid, ((ExtentArgument(product.plan.segment.row),), 1))
    launches = [
        product.launch(part, config, emit_unrolled(part, config, shape), grid, arrays, {})
        for part in parts(product.plan)
    ]
    return product.step(launches, atomic=product.plan.strategy == "atomic")
