"""The launches that copy a factor, before those that read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from insum.codegen.arguments import ExtentArgument
from insum.codegen.copies import FITTED_AT_ONCE, emit_aligning, emit_fitting, rows_at_once
from insum.codegen.kernel import Kernel
from insum.lang.expr import fresh
from insum.plan.aligning import Alignment
from insum.plan.config import Config
from insum.plan.fitting import Fit
from insum.plan.plan import Plan
from insum.plan.recipes import OfLength, SizeExpr
from insum.plan.sizes import FITTED
from insum.runtime import launch
from insum.runtime.build_product import ProductBuild, as_comment
from insum.runtime.program import CopyRoom, Grid, Launch


def fitted(product: ProductBuild, fit: Fit) -> tuple[Launch, CopyRoom]:
    """The launch that copies a factor into whole tiles, and the memory for it."""
    matrices = tuple(OfLength(fit.tensor, dim) for dim in fit.dims[:-2])
    plan, rows = _copying(product, FITTED, fit.tensor, (*matrices, fit.sides[0]))
    kernel = emit_fitting(plan, fit, dict(product.units()))
    room = _room_of(product, FITTED, fit.tensor, (*matrices, *fit.sides))
    return _copy(product, plan, kernel, fit.tensor, rows, FITTED_AT_ONCE, fit.counts), room


def aligned(product: ProductBuild, alignment: Alignment) -> tuple[Launch, CopyRoom]:
    """The launch that copies a factor into rows which begin at whole loads."""
    tensor, name = alignment.tensor, alignment.name
    every = OfLength(tensor, 0), alignment.middle
    plan, rows = _copying(product, name, tensor, every)
    kernel = emit_aligning(plan, alignment, dict(product.units()))
    room = _room_of(product, name, tensor, (*every, alignment.row))
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
