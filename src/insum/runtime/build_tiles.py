"""The launches of a product in dense tiles, with or without segments looped over inside: factors
copied first where that pays, and long reductions cut into pieces.
"""

from __future__ import annotations

from dataclasses import replace

from insum.codegen.arguments import Count
from insum.codegen.emit import emit
from insum.codegen.kernel import Shape
from insum.lang.expr import Access, accesses, fresh, index_of, variables
from insum.plan import first_guess, tiling
from insum.plan.aligning import aligned_operands
from insum.plan.config import Config
from insum.plan.draft import SMALL_BYTES
from insum.plan.fitting import fit_of
from insum.plan.recipes import OfExtent, SizeExpr
from insum.plan.roles import Roles, contraction
from insum.plan.sizes import BASE, OUT, WORK
from insum.runtime.build_copies import aligned, fitted
from insum.runtime.build_product import PIECES, ProductBuild, tile_grid
from insum.runtime.program import Launch, ProductLaunches

#: Kernels of a statement up to which others are written for lists of steps that are cut: a network
#: of many widths needs its room for these.
MOST_TO_CUT = 4
#: Numbers of a workspace that are added up in no more time than a launch takes, and those of a
#: tile of so many places.
SOON_ADDED, SOON_ADDED_UP, SIDE_BY_SIDE = 2**17, 2**12, 32


def tiles(product: ProductBuild) -> ProductLaunches:
    (config,) = product.choice
    pieces, apart = _pieces(product, config)
    plan = product.plan
    # dense pieces of half precision read few rows each
    copied = pieces == 1 or plan.segment is not None or plan.operand == "float32"
    fit = fit_of(product.planned, config) if copied else None
    alignments = aligned_operands(product.planned, config, fitted=fit.place if fit else None)
    if fit:
        plan = fit.reading(plan)
    for alignment in alignments:
        plan = alignment.reading(plan)
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
        *([fitted(product, fit)] if fit else []),
        *(aligned(product, alignment) for alignment in alignments),
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
    if _are_soon_rounded(product, wanted):
        return wanted, wanted > 1
    alone = plan.reduce != "sum" or wishes.deterministic or wishes.accumulate
    found = max(1, min(wanted, buffers if alone or not buffers else wanted))
    if found == 1 < wanted and _is_long(product, config):
        found = max(1, min(wanted, product.planned.altogether))
        return found, found > 1
    return found, alone and found > 1


def _are_soon_rounded(product: ProductBuild, pieces: int) -> bool:
    """Whether so few numbers are rounded that to add them up takes no longer than that alone."""
    planned, places = product.planned, tiling.output_places(product.plan, product.extents)
    fits = pieces <= planned.altogether and pieces * places <= SOON_ADDED
    return planned.rounds and fits and pieces * min(places, SIDE_BY_SIDE) <= SOON_ADDED_UP


def _is_long(product: ProductBuild, config: Config) -> bool:
    """Whether programs take so many steps that to round their sums in another launch is little."""
    plan = product.plan
    whole = not plan.roles.post or tiling.cuts_outer_loop(plan, config, product.extents)
    if not plan.roles.dot or not whole:
        return False
    return tiling.steps_of_program(plan, config, product.extents) >= tiling.MANY_STEPS


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
