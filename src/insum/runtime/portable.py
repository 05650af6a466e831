"""Kernels for calls whose index values are not known yet, and some of whose sizes may be symbols:
what an exported program can hold.

Nothing is asked of index tensors: scatters use atomics, padding is always looked for, and no axis
whose size may change is taken to divide evenly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from insum.codegen.emit import Kernel, Shape, emit
from insum.compat.sizes import size_or
from insum.lang.bind import Problem, Size, Value
from insum.lang.types import identity
from insum.plan import model
from insum.plan.config import Config
from insum.plan.facts import declare
from insum.plan.plan import Plan
from insum.plan.prepare import CannotFuse, Prepared, Wishes, prepare
from insum.runtime import launch
from insum.runtime.build import first_choice
from insum.runtime.program import WIDE

#: Sizes for which a kernel is laid out where a size is a symbol that gives no example.
TYPICAL = 4096


@dataclass(frozen=True, slots=True)
class Part:
    """One product of the statement: a kernel that serves every size."""

    plan: Plan
    config: Config
    kernel: Kernel
    header: str
    fill: bool

    def grid(self, extents: Mapping[str, Size]) -> Any:
        """How many programs there are; a symbol where extents are."""
        roles = self.plan.roles
        programs: Any = 1
        for axis, tile in ((roles.m, self.config.m), (roles.n, self.config.n)):
            extent: Any = 1
            for v in axis:
                extent = extent * extents[v]
            programs = programs * ((extent + tile - 1) // tile)
        for v in roles.grid:
            programs = programs * extents[v]
        return programs


@dataclass(frozen=True, slots=True)
class Portable:
    """The products of a statement, and what they write to."""

    parts: tuple[Part, ...]
    dtype: torch.dtype
    fill: bool

    def run(
        self,
        problem: Problem,
        values: Mapping[str, Value],
        start: Callable[..., Any],
        target: Tensor | None = None,
    ) -> Tensor:
        """Launch everything; with ``target``, add to it. ``start`` makes of a jitted function
        something that is launched like one, and can be traced.
        """
        shape = tuple(problem.shape)
        if self.fill:
            out = torch.full(
                shape,
                identity(problem.statement.operator, self.dtype),
                dtype=self.dtype,
                device=problem.device,
            )
        else:
            out = torch.empty(shape, dtype=self.dtype, device=problem.device)
        for part in self.parts:
            arguments = [_argument(name, problem, values, out) for name in part.kernel.arguments]
            kernel = start(launch.load(part.kernel, part.header))
            kernel[(part.grid(problem.extents),)](
                *arguments, num_warps=part.config.warps, num_stages=part.config.stages
            )
        if target is not None:
            return target.add_(out)
        return out if self.dtype == problem.dtype else out.to(problem.dtype)


def portable(problem: Problem, values: Mapping[str, Value], wishes: Wishes) -> Portable:
    """The kernels of a problem, or `CannotFuse`."""
    if wishes.deterministic:
        raise CannotFuse("deterministic mode, and nothing is known of the index tensors")
    if launch.available():
        raise CannotFuse(launch.available())
    wishes = replace(
        wishes, settings=replace(wishes.settings, scatter="atomic", effort="none"), accumulate=False
    )
    stand_ins, known = _stand_ins(problem, values), _with_examples(problem)
    symbols = {v for v, size in problem.extents.items() if not isinstance(size, int)}
    prepared = [
        prepare(known, term, stand_ins, wishes if i == 0 else replace(wishes, accumulate=True))
        for i, term in enumerate(known.terms)
    ]
    wide = WIDE[prepared[0].plan.accumulator]
    atomic = any(p.plan.strategy == "atomic" for p in prepared)
    buffered = wide != problem.dtype and (len(prepared) > 1 or atomic)
    parts = tuple(_part(problem, one, wishes, symbols) for one in prepared)
    return Portable(parts, wide if buffered else problem.dtype, parts[0].fill)


def _part(problem: Problem, prepared: Prepared, wishes: Wishes, symbols: set[str]) -> Part:
    if (
        prepared.arrays
        or prepared.views
        or prepared.segments
        or prepared.plan.strategy not in ("store", "atomic")
    ):
        raise CannotFuse("its kernel needs values of index tensors")
    if 0 in prepared.extents.values():
        raise CannotFuse("there is nothing to compute")
    choice = first_choice(prepared, wishes)
    plan = model.oriented(
        prepared.plan, prepared.extents, choice[0].swap, allowed=wishes.settings.swap
    )
    if model.in_rows(plan) or len(choice) != 1:
        raise CannotFuse("its kernel needs values of index tensors")
    # A tensor of changing size may grow past what 32 bits can address.
    moving = any(
        not isinstance(s, int) for kind in problem.kinds.values() for s in kind.shape
    ) or bool(symbols)
    plan = replace(plan, wide=plan.wide or moving)
    kernel = emit(
        plan,
        choice[0],
        _shape(plan, choice[0], prepared.extents, symbols),
        prefetch=wishes.settings.prefetch,
    )
    part = Part(
        plan,
        choice[0],
        kernel,
        '"""A kernel that knows nothing of index values."""',
        prepared.fill or plan.strategy == "atomic",
    )
    if part.grid(prepared.extents) >= 2**31:
        raise CannotFuse(f"the grid would have {part.grid(prepared.extents)} programs")
    return part


def _shape(plan: Plan, config: Config, extents: Mapping[str, int], symbols: set[str]) -> Shape:
    roles = plan.roles
    if len(roles.k) > 1 and symbols & set(roles.k[1:]):
        raise CannotFuse("the size of a flattened variable is a symbol")
    fixed: Callable[[tuple[str, ...]], bool] = lambda axis: not symbols & set(axis)
    k = extents[roles.k[0]] if roles.k else 1
    return Shape(
        even_m=fixed(roles.m) and model.extent(roles.m, extents) % config.m == 0,
        even_n=fixed(roles.n) and model.extent(roles.n, extents) % config.n == 0,
        even_k=fixed(roles.k) and k % config.k == 0,
        inner=model.inner_extent(plan, extents),
        single_k=bool(roles.k) and fixed(roles.k) and not roles.loops and k <= config.k,
    )


def _argument(name: str, problem: Problem, values: Mapping[str, Value], out: Tensor) -> Any:
    match name:
        case "out_at":
            return out
        case "piece_count":
            return 1
    if name.removeprefix("out_stride").isdigit():
        return out.stride(int(name.removeprefix("out_stride")))
    base, _, suffix = name.rpartition("_")
    if suffix in ("ptr", "number"):
        value = values[base]
        # a truth value counts as a number here
        return int(value) if isinstance(value, bool) else value
    if suffix == "size":
        return problem.extents[base]
    tensor = values[base]
    assert isinstance(tensor, Tensor)
    return tensor.stride(int(suffix.removeprefix("s")))


# --- what stands for tensors that are not there ---------------------------------------------------


def example(size: Size) -> int:
    """A size, or one that a symbol may well have."""
    return size if isinstance(size, int) else size_or(size, 0) or TYPICAL


def _with_examples(problem: Problem) -> Problem:
    kinds = {
        name: replace(kind, shape=tuple(map(example, kind.shape)))
        for name, kind in problem.kinds.items()
    }
    return replace(
        problem,
        extents={v: example(e) for v, e in problem.extents.items()},
        shape=tuple(map(example, problem.shape)),
        kinds=kinds,
    )


def _stand_ins(problem: Problem, values: Mapping[str, Value]) -> dict[str, Value]:
    """Tensors without data, of which only that is known which must be so."""
    found: dict[str, Value] = {}
    for name, value in values.items():
        if not isinstance(value, Tensor):
            found[name] = value
            continue
        sizes, strides = [example(s) for s in value.shape], [example(s) for s in value.stride()]
        found[name] = stand_in = torch.empty_strided(
            sizes, strides, dtype=value.dtype, device="meta"
        )
        if not (value.dtype.is_floating_point or value.dtype.is_complex):
            declare(
                stand_in,
                low=0,
                high=max(0, math.prod(sizes)),
                sorted=False,
                unique=False,
                padded=name in problem.padded,
            )
    return found
