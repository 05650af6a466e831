"""The launches of a product in dense tiles, with or without segments looped over inside: factors
copied first where that pays, and long reductions cut into pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from insum.codegen.arguments import Count, ExtentArgument
from insum.codegen.copies import FITTED_AT_ONCE, emit_aligning, emit_fitting, rows_at_once
from insum.codegen.emit import emit
from insum.codegen.kernel import Kernel, Shape
from insum.lang.expr import Access, accesses, fresh, index_of, variables
from insum.plan import first_guess, tiling
from insum.plan.aligning import Alignment, alignment_of
from insum.plan.config import Config
from insum.plan.draft import SMALL_BYTES
from insum.plan.fitting import Fit, fit_of
from insum.plan.plan import Plan
from insum.plan.recipes import OfExtent, OfLength, SizeExpr
from insum.plan.roles import Roles, contraction
from insum.plan.sizes import ALIGNED, BASE, FITTED, OUT, WORK
from insum.runtime import launch
from insum.runtime.build_product import PIECES, ProductBuild, as_comment, tile_grid
from insum.runtime.program import CopyRoom, Grid, Launch, ProductLaunches

#: Kernels of a statement up to which others are written for lists of steps that are cut: a network
#: of many widths needs its room for these.
MOST_TO_CUT = 4


def tiles(product: ProductBuild) -> ProductLaunches:
    (config,) = product.choice
    pieces, apart = _pieces(product, config)
    plan = product.plan
    # dense pieces of half precision read few rows each
    copied = pieces == 1 or plan.segment is not None or plan.operand == "float32"
    fit = fit_of(product.planned, config) if copied else None
    alignment = alignment_of(product.planned, config) if copied else None
    for copy in (fit, alignment):
        plan = plan if copy is None else copy.reading(plan)
    wished = product.wishes.settings
    kernel = emit(
        plan,
        config,
        replace(product.shape(config, pieces), apart=apart),
        prefetch=wished.prefetch,
        lazy=wished.lazy_broadcasting,
    )
    grid = (*tile_grid(plan.roles, config), ((Count("piece_count"),), 1))
    counts = {"piece_count": pieces, **(fit.counts if fit else {})}
    one = product.launch(plan, config, kernel, grid, product.segment_arrays(), counts)
    copies = [
        *([_fitted(product, fit)] if fit else []),
        *([_aligned(product, alignment)] if alignment else []),
    ]
    launches = [*(copy for copy, _ in copies), one]
    if apart:
        launches.append(_together(product, pieces))
    step = product.step(
        launches,
        atomic=product.plan.strategy == "atomic" or pieces > 1 and not apart,
        workspace=(_slots(product, pieces),) if apart else (),
    )
    return replace(step, copies=tuple(room for _, room in copies))


def _slots(product: ProductBuild, pieces: int) -> SizeExpr:
    """What is in the workspace: the output, piece by piece."""
    kept, made = dict.fromkeys(variables(product.plan.target)), dict(product.plan.made)
    return pieces, *(one for v in kept for one in made.get(v, (OfExtent(v),)))


def _fitted(product: ProductBuild, fit: Fit) -> tuple[Launch, CopyRoom]:
    """The launch that copies a factor into whole tiles, and the memory for it."""
    matrices = tuple(OfLength(fit.tensor, dim) for dim in fit.dims[:-2])
    plan, rows = _copying(product, FITTED, fit.tensor, (*matrices, fit.sides[0]))
    kernel = emit_fitting(plan, fit, dict(product.units()))
    room = _room_of(product, FITTED, fit.tensor, (*matrices, *fit.sides))
    return _copy(product, plan, kernel, fit.tensor, rows, FITTED_AT_ONCE, fit.counts), room


def _aligned(product: ProductBuild, alignment: Alignment) -> tuple[Launch, CopyRoom]:
    """The launch that copies a factor into rows which begin at whole loads."""
    tensor, length = alignment.tensor, OfLength(alignment.tensor, 0)
    plan, rows = _copying(product, ALIGNED, tensor, (length,))
    kernel = emit_aligning(plan, alignment, dict(product.units()))
    room = _room_of(product, ALIGNED, tensor, (length, alignment.row))
    return _copy(product, plan, kernel, tensor, rows, rows_at_once(alignment.row), {}), room


def _copying(product: ProductBuild, name: str, tensor: str, rows: SizeExpr) -> tuple[Plan, str]:
    """The plan of a launch that writes a copy, and the variable of the copy's rows."""
    plan, var = product.plan, fresh("rows", {*product.extents, *dict(product.plan.made)})
    kinds = (*plan.kinds, (name, dict(plan.kinds)[tensor]))
    return replace(plan, made=(*plan.made, (var, rows)), kinds=kinds), var


def _copy(
    product: ProductBuild,
    plan: Plan,
    kernel: Kernel,
    tensor: str,
    rows: str,
    at_once: int,
    counts: Mapping[str, int],
) -> Launch:
    header = f'"""Copies {tensor} for {as_comment(plan.statement)}"""'
    grid: Grid = (((ExtentArgument(rows),), at_once),)
    config, function = Config(warps=4, stages=1), launch.load(kernel, header)
    return Launch(plan, kernel, function, header, config, grid, {}, counts, room=product.room)


def _room_of(product: ProductBuild, name: str, tensor: str, shape: SizeExpr) -> CopyRoom:
    return CopyRoom(name, shape, getattr(torch, dict(product.plan.kinds)[tensor]))


def _together(product: ProductBuild, pieces: int) -> Launch:
    """The pieces of a long reduction, from the workspace: a reduction over them."""
    plan, kept = product.plan, tuple(dict.fromkeys(variables(product.plan.target)))
    piece = fresh("piece", {*product.extents, *dict(plan.made)})
    read = Access(WORK, (index_of(piece), *map(index_of, kept)))
    extents = {**product.extents, piece: pieces}
    used = {OUT, BASE, *(a.tensor for i in plan.target.indices for a in accesses(i))}
    plan = replace(
        plan,
        factors=(read,),
        roles=contraction(Roles((read,), kept, (piece,), extents), allow_dot=False),
        kinds=(*((n, kind) for n, kind in plan.kinds if n in used), (WORK, plan.accumulator)),
        strides=(
            *((n, s) for n, s in plan.strides if n in used),
            (WORK, product.work_strides(kept)),
        ),
        views=tuple((n, view) for n, view in plan.views if n in used),
        made=(*plan.made, (piece, (pieces,))),
        numbers=(),
        operand="",
        precision="",
        idle=None,
        bounds=(),
        segment=None,
    )
    config = first_guess.first_guess(plan, extents)
    kernel = emit(plan, config, Shape(units=product.units()), prefetch=False, suffix=PIECES)
    return product.launch(plan, config, kernel, tile_grid(plan.roles, config), {}, {})


def _pieces(product: ProductBuild, config: Config) -> tuple[int, bool]:
    """Into how many pieces a long reduction is cut, and whether each has a buffer of its own:
    all of them are to be little beside what is read, or altogether.
    Sums whose order may differ need one, they meet in atomics.
    """
    plan, wishes, buffers = product.plan, product.wishes, product.planned.buffers
    wanted = tiling.pieces(plan, config, product.extents)
    if plan.segment is not None:  # few tiles: an output that is filled first costs more than a sum
        if not _may_cut_lists(product, asked=bool(config.split)):
            return 1, False
        one = tiling.output_places(plan, product.extents) * tiling.BYTES.get(plan.accumulator, 8)
        found = max(1, min(wanted, max(buffers, SMALL_BYTES // max(1, one))))
        return found, found > 1
    alone = plan.reduce != "sum" or wishes.deterministic or wishes.accumulate
    found = max(1, min(wanted, buffers if alone or not buffers else wanted))
    return found, alone and found > 1


def _may_cut_lists(product: ProductBuild, *, asked: bool) -> bool:
    """While there is room for more kernels, or where a config ``asked`` for it; not where sizes
    have no bound, for then the workspace has none, and not where a factor is multiplied with each
    piece: an infinite one makes NaN of those that have nothing.
    """
    sizes, room = product.planned.sizes, product.room
    bounded = not any(one.open for one in sizes.extents.values())
    return (
        bounded
        and not product.plan.roles.post
        and (asked or room is None or len(room.kernels) < MOST_TO_CUT)
    )
