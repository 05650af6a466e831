"""Straight-line kernels for small constant patterns: index tensors have become constants, wide sums are contracted first.

For ``Z[b,I[p],w] += V[p] * X[b,J[p],u] * Y[b,K[p]] * W[b,L[p],u,w]`` the points are grouped by the factors that the summed
variable ``u`` touches. Each such product of tiles is accumulated once, in exact arithmetic, and then combined with the other
factors' scalars into the output tiles. Points that share the largest factor share its loads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

from insum.codegen.emit import AFTER, Emitter, Kernel, Shape
from insum.codegen.values import Val, combine, union
from insum.lang.expr import Access, Expr, Number, variables
from insum.plan.config import Config
from insum.plan.patterns import LONG
from insum.plan.plan import Plan

#: Factors that a summed variable touches -> (target, other factors) of the points that use them.
Cores: TypeAlias = dict[tuple[Expr, ...], list[tuple[Access, tuple[Expr, ...]]]]
#: Values of the innermost summed variable that are written out in the loop, for loads in flight: the first that divides it ...
UNROLL = (8, 4, 2, 1)
#: ... and that keeps the code of all points below this, for compilers take more than twice as long for twice the code.
MOST_LINES = 400


def emit_unrolled(plan: Plan, config: Config, extents: Mapping[str, int], name: str = "insum_kernel") -> tuple[Kernel, int]:
    """The kernel for a plan with a pattern, and how many programs it takes."""
    roles = plan.roles
    tiles = [math.ceil(math.prod(extents[v] for v in axis) / tile) for axis, tile in ((roles.m, config.m), (roles.n, config.n))]
    even = [math.prod(extents[v] for v in axis) % tile == 0 for axis, tile in ((roles.m, config.m), (roles.n, config.n))]
    points = len(plan.pattern.points) if plan.pattern else 0
    unroll = next(u for u in UNROLL if u == 1 or not roles.loops or extents[roles.loops[-1]] % u == 0 and u * points <= MOST_LINES)
    k = extents[roles.k[0]] if roles.k else 1
    emitter = _Unrolled(plan, config, Shape(even_m=even[0], even_n=even[1], even_k=k % config.k == 0, single_k=k <= config.k))
    kernel = emitter.unrolled(name, unroll)
    return kernel, math.prod(tiles) * math.prod(extents[v] for v in roles.grid)


def parts(plan: Plan) -> list[Plan]:
    """The plan, or several that do the work of a long pattern: points are kept together by a common output or a common largest factor, so that
    nothing large is read twice."""
    pattern = plan.pattern
    assert pattern is not None
    if len(pattern.points) <= LONG:
        return [plan]
    leader = {point: max(point[1], key=lambda f: len(variables(f))) for point in pattern.points}
    part: dict[Expr, int] = {}  # of outputs and largest factors
    for number, point in enumerate(pattern.points):
        old = {part[e] for e in (point[0], leader[point]) if e in part}
        part |= dict.fromkeys((point[0], leader[point]), number) | {e: number for e, n in part.items() if n in old}
    found: dict[int, list[tuple[Access, tuple[Expr, ...]]]] = {}
    for point in pattern.points:
        found.setdefault(part[point[0]], []).append(point)
    return [replace(plan, pattern=replace(pattern, points=tuple(points))) for points in found.values()]


class _Unrolled(Emitter):
    def unrolled(self, name: str, unroll: int) -> Kernel:
        self.program_ids()
        self.axis("M", self.plan.roles.m, self.config.m, self.shape.even_m)
        self.axis("N", self.plan.roles.n, self.config.n, self.shape.even_n)
        if self.plan.roles.loops or self.plan.roles.k:
            self.with_sums(unroll)
        else:
            self.without_sums()
        return Kernel(name, self.text(name), tuple(self.arguments))

    # --- no summed variable: output tile by output tile ---

    def without_sums(self) -> None:
        for target, products in self.by_target().items():
            values = [combine([self.evaluate(f, self.plan.accumulator) for f in factors], "*") for factors in products]
            total = self.define("tile", combine(values, "+"))
            self.write_out(target, total)

    def by_target(self) -> dict[Access, list[tuple[Expr, ...]]]:
        found: dict[Access, list[tuple[Expr, ...]]] = {target: [] for target in self.targets()}
        assert self.plan.pattern is not None
        for target, factors in self.plan.pattern.points:
            found[target].append(factors)
        return {target: products or [(Number(0),)] for target, products in found.items()}

    def targets(self) -> list[Access]:
        """Every place of the scattered dimension, also those that no point writes."""
        assert self.plan.pattern is not None
        return list(dict.fromkeys(target for target, _ in self.plan.pattern.points))

    # --- summed variables: contract the factors they touch, then combine ---

    def with_sums(self, unroll: int) -> None:
        pattern = self.plan.pattern
        assert pattern is not None
        axes = tuple(a for a, v in (("M", self.plan.roles.m), ("N", self.plan.roles.n)) if v)
        tile = ", ".join(str(self.tile(a)) for a in axes)
        zero = f"tl.zeros([{tile}], dtype=tl.{self.plan.accumulator})"
        outputs = {target: Val(f"z{i}", axes) for i, target in enumerate(self.targets())}
        for value in outputs.values():
            self.line(0, f"{value.text} = {zero}", axes)
        for cores in self.by_leader().values():
            self.group(cores, outputs, zero, axes, unroll)
        for target, value in outputs.items():
            self.write_out(target, value)

    def by_leader(self) -> dict[Expr, Cores]:
        """Largest summed factor -> summed factors -> (target, other factors) of the points that use them."""
        pattern = self.plan.pattern
        assert pattern is not None
        summed = {*self.plan.roles.loops, *self.plan.roles.k}
        groups: dict[Expr, Cores] = {}
        for target, factors in pattern.points:
            core = tuple(f for f in factors if set(variables(f)) & summed)
            rest = tuple(f for f in factors if f not in core)
            leader = max(core, key=lambda f: len(variables(f)))
            groups.setdefault(leader, {}).setdefault(core, []).append((target, rest))
        return groups

    def group(self, cores: Cores, outputs: Mapping[Access, Val], zero: str, axes: tuple[str, ...], unroll: int) -> None:
        sums = {core: Val(self.name("t"), axes) for core in cores}
        lines = [f"{value.text} = {zero}" for value in sums.values()]
        if self.plan.roles.k:
            self.stages[0] += lines + self.along_rows(sums)
            for core, points in cores.items():
                self.combine(sums[core], points, outputs)
            return
        *outer, inner = self.plan.roles.loops
        for depth, var in enumerate(outer):
            lines.append("    " * depth + f"for {var}_i in range({self.size(var)}):")
            self.vars[var] = Val(f"{var}_i", (), 2)
        depth = len(outer)
        step = f", {unroll}" if unroll > 1 else ""
        lines.append("    " * depth + f"for {inner}_0 in range(0, {self.size(inner)}{step}):")
        lines += ["    " * (depth + 1) + line for line in self.body(inner, sums, unroll)]
        self.stages[0] += lines
        for core, points in cores.items():
            self.combine(sums[core], points, outputs)

    def along_rows(self, sums: Mapping[tuple[Expr, ...], Val]) -> list[str]:
        """Sums along the rows of the largest factor, a tile of them at a time."""
        (var,), tile, before = self.plan.roles.k, self.config.k, dict(self.loaded)
        first = "" if self.shape.single_k else f"{var}_0 + "
        self.line(2, f"{var}_i = {first}tl.arange(0, {tile})", ("K",))
        self.vars[var] = Val(f"{var}_i", ("K",), 2)
        if not self.shape.even_k:
            self.line(2, f"k_ok = {var}_i < {self.size(var)}", ("K",))
            self.masks["K"] = Val("k_ok", ("K",), 2)
        for core, total in sums.items():
            value = combine([self.evaluate(f, self.plan.accumulator) for f in core], "*")
            axes = union((*total.axes, "K"))
            self.line(2, f"{total.text} += tl.sum({value.over(axes)}, axis={axes.index('K')})", total.axes)
        self.loaded = before
        lines, self.stages[2] = self.stages[2], []
        return lines if self.shape.single_k else [f"for {var}_0 in range(0, {self.size(var)}, {tile}):", *("    " + line for line in lines)]

    def body(self, inner: str, sums: Mapping[tuple[Expr, ...], Val], unroll: int) -> list[str]:
        before = dict(self.loaded)
        for u in range(unroll):
            self.loaded = dict(before)
            self.vars[inner] = Val(f"{inner}_0" if u == 0 else f"({inner}_0 + {u})", (), 2)
            for core, total in sums.items():
                value = combine([self.evaluate(f, self.plan.accumulator) for f in core], "*")
                self.line(2, f"{total.text} += {value.over(total.axes)}", total.axes)
        self.loaded = before
        lines, self.stages[2] = self.stages[2], []
        return lines

    def combine(self, total: Val, points: list[tuple[Access, tuple[Expr, ...]]], outputs: Mapping[Access, Val]) -> None:
        by_target: dict[Access, list[Val]] = {}
        for target, rest in points:
            one = combine([self.evaluate(f, self.plan.accumulator) for f in rest], "*") if rest else Val("1")
            by_target.setdefault(target, []).append(one)
        for target, scales in by_target.items():
            scale = combine(scales, "+")
            out = outputs[target]
            text = Val(f"({scale.text})", scale.axes) if len(scales) > 1 else scale
            self.line(0, f"{out.text} += {combine([text, total], '*').over(out.axes)}", out.axes)

    def write_out(self, target: Access, value: Val) -> None:
        self.emit_store(target, self.sum_unkept(value))
        self.stages[0] += self.stages[AFTER]
        self.stages[AFTER] = []

    def text(self, name: str) -> str:
        self.stages[1], self.stages[2] = [], []
        self.counters = []
        return self.write(name)
