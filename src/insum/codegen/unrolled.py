"""Straight-line kernels for small constant patterns: index tensors have become constants, wide sums
are contracted first.

For ``Z[b,I[p],w] += V[p] * X[b,J[p],u] * Y[b,K[p]] * W[b,L[p],u,w]`` the points are grouped by the
factors that the summed variable ``u`` touches. Each such product of tiles is accumulated once, in
exact arithmetic, and then combined with the other factors' scalars into the output tiles. Points
that share the largest factor share its loads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from insum.codegen.emit import Emitter
from insum.codegen.frame import AFTER, Frame
from insum.codegen.functions import reduced
from insum.codegen.ir import (
    Assignment,
    KernelLine,
    Named,
    Tile,
    TileAxes,
    apply,
    as_tile,
    combine,
    loop,
    union,
    where,
)
from insum.codegen.kernel import Kernel, Shape, kernel_name
from insum.codegen.passes import STEP
from insum.lang.expr import Access, Expr, Number, variables
from insum.plan.config import Config
from insum.plan.plan import Beside, Pattern, PatternPoint, Plan
from insum.plan.sizes import OUT
from insum.plan.tiling import LONG

#: Factors that a summed variable touches -> (target, other factors) of the points that use them.
Cores: TypeAlias = dict[tuple[Expr, ...], list[PatternPoint]]
#: Parts of several results whose factors are read before a part is written: nothing can be read
#: earlier than what stands above it is stored.
AHEAD = 12
#: Values of the innermost summed variable that are written out in the loop, for loads in flight:
#: the first that divides it ...
UNROLL = (8, 4, 2, 1)
#: ... and that keeps the code of all points below this, for compilers take more than twice as long
#: for twice the code.
MOST_LINES = 400
#: Registers of a thread for tiles that are summed at the very end.
LATE_REGISTERS = 128


@functools.lru_cache(maxsize=256)
def emit_unrolled(plan: Plan, config: Config, shape: Shape) -> Kernel:
    """The kernel for a plan with a pattern."""
    roles = plan.roles
    points = len(plan.pattern.points) if plan.pattern else 0
    multiple = dict(shape.units).get(roles.loops[-1], 1) if roles.loops else 1
    unroll = next(
        u
        for u in UNROLL
        if u == 1 or not roles.loops or multiple % u == 0 and u * points <= MOST_LINES
    )
    return _Unrolled(Frame(plan, config, shape)).unrolled(kernel_name(plan), unroll)


def parts(plan: Plan) -> list[Plan]:
    """The plan, or several that do the work of a long pattern: points are kept together by a common
    output or a common largest factor, so that nothing large is read twice.
    """
    pattern = plan.pattern
    assert pattern is not None
    if len(pattern.points) <= LONG or not (plan.roles.loops or plan.roles.k) or plan.beside:
        return [plan]  # without sums nothing is held but what is read
    # Points are led together by numbers: expressions are long to compare.
    numbers: dict[Expr, int] = {}
    group: list[int] = []

    def first_of(number: int) -> int:
        while group[number] != number:
            number = group[number]
        return number

    def number_of(expr: Expr) -> int:
        number = numbers.setdefault(expr, len(group))
        if number == len(group):
            group.append(number)
        return first_of(number)

    firsts = []
    for target, factors in pattern.points:
        one = number_of(target)
        other = number_of(max(factors, key=lambda f: len(variables(f))))
        group[max(one, other)] = min(one, other)
        firsts.append(one)
    found: dict[int, list[PatternPoint]] = {}
    for point, number in zip(pattern.points, firsts):
        found.setdefault(first_of(number), []).append(point)
    return [
        replace(plan, pattern=replace(pattern, points=tuple(points))) for points in found.values()
    ]


@dataclass(frozen=True)
class _Part:
    """Of one of several results, what is added up and written for some points of its pattern.

    Attributes:
        number: of the first of them; points with the same number read much of the same.
        reads: their factors.
    """

    number: int
    reads: tuple[Expr, ...]
    write: Callable[[], None]


def _part(
    number: int, points: Sequence[PatternPoint], shared: tuple[Expr, ...], write: Any
) -> _Part:
    """``write`` takes ``points``, after what they share."""
    factors = [f for _, rest in points for f in rest]
    return _Part(
        number, tuple(dict.fromkeys([*factors, *shared])), functools.partial(write, *shared, points)
    )


class _Unrolled:
    """Writes one such kernel."""

    def __init__(self, frame: Frame) -> None:
        self.frame, self.emitter = frame, Emitter(frame)
        self.plan, self.config, self.shape = frame.plan, frame.config, frame.shape
        self.reads, self.contract = self.emitter.reads, self.emitter.contract
        self.output, self.entries = self.emitter.output, self.emitter.entries
        self.held: dict[Tile, Tile] = {}  # sums that several results have, by what they are of

    def unrolled(self, name: str, unroll: int) -> Kernel:
        self.emitter.leave_if_flagged()
        self.frame.program_ids()
        self.frame.axis("M", self.plan.roles.m, self.config.m, self.shape.even_m)
        self.frame.axis("N", self.plan.roles.n, self.config.n, self.shape.even_n)
        if self.plan.segment:
            self.over_entries()
        elif self.plan.roles.loops or self.plan.roles.k:
            self.with_sums(unroll)
        else:
            self.without_sums()
        self.frame.stages[1], self.frame.stages[2] = [], []
        self.frame.counters = []
        return self.emitter.written(name)

    # --- no summed variable: output tile by output tile ---

    def without_sums(self) -> None:
        pattern = self.plan.pattern
        assert pattern is not None
        if self.plan.beside:
            return self.write_parts(self.columns_of(OUT, pattern))
        for target, points in self.by_target().items():
            own = Pattern(pattern.variables, tuple(points))
            self.write_out(target, self.product_sum(own))

    def by_target(self) -> dict[Access, list[PatternPoint]]:
        found: dict[Access, list[PatternPoint]] = {}
        assert self.plan.pattern is not None
        for point in self.plan.pattern.points:
            found.setdefault(point[0], []).append(point)
        return found

    def targets(self) -> list[Access]:
        """Every place of the scattered dimension, also those that no point writes."""
        assert self.plan.pattern is not None
        return list(dict.fromkeys(target for target, _ in self.plan.pattern.points))

    # --- rows of a segmented output: all outputs of a row at once, entry by entry ---

    def over_entries(self) -> None:
        """Several entries of the row at a time, which are summed at the very end."""
        self.frame.segment_bounds()
        outputs = self.started(("K", "N"))
        self.frame.counters = [self.frame.k_count(True)]
        self.frame.segment_k_axis(STEP)
        self.frame.frame_lines = len(self.frame.stages[2])
        pattern = self.plan.pattern
        assert pattern is not None
        if self.plan.beside and len(pattern.points) > LONG:
            # what is the same for all entries, times numbers of the code, would be held all along
            self.frame.earliest = 2
        add = functools.partial(self.add, outputs)
        self.write_parts(
            [
                _part(number, points, (shared,), add)
                for shared, (number, points) in self.by_shared(pattern).items()
            ]
        )
        self.frame.stages[0] += self.emitter.loop_lines()
        self.frame.stages[2], self.frame.index_lines, self.frame.counters = [], [], []
        for target, value in outputs.items():
            self.write_out(target, self.frame.define("sum", reduced("sum", value, "K"), 0))

    def started(self, axes: TileAxes) -> dict[Access, Named]:
        """A sum for each output, of nothing yet."""
        return {
            target: self.frame.assign(0, f"z{i}", self.frame.zeros(axes))
            for i, target in enumerate(self.targets())
        }

    def add(
        self, outputs: Mapping[Access, Named], shared: Expr, points: Sequence[PatternPoint]
    ) -> None:
        """Points that share a factor, onto the sums of a row."""
        for target, scale in self.scales(points).items():
            value = self.reads.evaluate(shared, self.plan.accumulator)
            value = self.present(combine([scale, value], "*")).over(outputs[target].axes)
            if not self.ends_with_the_row():
                value = where(self.frame.masks["K"], value, 0)
            self.add_to(outputs[target], value, 2)

    def add_to(self, total: Named, value: Tile, stage: int) -> None:
        self.frame.assign(stage, total.name, value.over(total.axes), "+=")

    def by_shared(self, pattern: Pattern) -> dict[Expr, tuple[int, list[PatternPoint]]]:
        """Points by the factor that comes in most forms: each is read when it is used, for the
        others stay in registers all along. With the number of the first of them.
        """
        forms = [(len({point[1][f] for point in pattern.points}), f) for f in self.wide(pattern)]
        _, at = max(forms, default=(0, 0))
        return self.grouped(pattern, at)

    def wide(self, pattern: Pattern) -> list[int]:
        """Which factors have columns."""
        columns, (_, factors) = set(self.plan.roles.n), pattern.points[0]
        return [f for f, factor in enumerate(factors) if columns & set(variables(factor))]

    def grouped(self, pattern: Pattern, at: int) -> dict[Expr, tuple[int, list[PatternPoint]]]:
        """Points by one of their factors."""
        columns = set(self.plan.roles.n)
        found: dict[Expr, tuple[int, list[PatternPoint]]] = {}
        for number, (target, factors) in enumerate(pattern.points):
            rest = _narrow_first((*factors[:at], *factors[at + 1 :]), columns)
            _, points = found.setdefault(factors[at], (pattern.number(number), []))
            points.append((target, rest))
        return found

    # --- several results of the same points ---

    def write_parts(self, own: Sequence[_Part]) -> None:
        """Those of all results that read the same, one after the other; without other results as
        they are.
        """
        if not self.plan.beside:
            for part in own:
                part.write()
            return
        every = [*own, *(part for one in self.plan.beside for part in self.entries_of(one))]
        every.sort(key=lambda part: part.number)
        for at, part in enumerate(every):
            for later in every[at : at + AHEAD]:
                for factor in later.reads:
                    self.reads.evaluate(factor, self.plan.accumulator)
            part.write()

    def entries_of(self, one: Beside) -> list[_Part]:
        """What every entry has for itself: each column, or the sum over all of them."""
        column = self.plan.roles.n[0]
        if column in variables(one.pattern.points[0][0]):
            return self.columns_of(one.tensor, one.pattern)
        return self.sums_of(one.tensor, one.pattern)

    def columns_of(self, tensor: str, pattern: Pattern) -> list[_Part]:
        """Place by place: each is written as soon as it is known."""
        found: dict[Access, tuple[int, list[PatternPoint]]] = {}
        for number, point in enumerate(pattern.points):
            _, points = found.setdefault(point[0], (pattern.number(number), []))
            points.append(point)

        def write(points: list[PatternPoint]) -> None:
            own = Pattern(pattern.variables, tuple(points))
            self.entries.store(tensor, points[0][0], self.product_sum(own))

        return [_part(number, points, (), write) for number, points in found.values()]

    def product_sum(self, pattern: Pattern) -> Tile:
        """The sum of all points, which write one place: by the factor beside which other results
        have the same sums, else by the one with the fewest forms.
        """

        def known(at: int) -> tuple[int, int]:
            groups = [points for _, points in self.grouped(pattern, at).values()]
            sums = [value for points in groups for value in self.sums(points).values()]
            return sum(value in self.held for value in sums), -len(groups)

        parts = []
        at = max(self.wide(pattern), key=known, default=0)
        for shared, (_, points) in self.grouped(pattern, at).items():
            (scale,) = self.scales(points).values()
            value = self.reads.evaluate(shared, self.plan.accumulator)
            parts.append(value if scale == as_tile(1) else combine([scale, value], "*"))
        return self.frame.define("tile", combine(parts, "+"))

    def sums_of(self, tensor: str, pattern: Pattern) -> list[_Part]:
        """Sums over all columns: added up first, and threads meet at the end, once for each."""
        sums: dict[Access, Named] = {}
        axes = union((self.entry_axis, "N"))

        def add(shared: Expr, points: list[PatternPoint]) -> None:
            for target, scale in self.scales(points).items():
                value = combine([scale, self.reads.evaluate(shared, self.plan.accumulator)], "*")
                if target in sums:
                    self.add_to(sums[target], value, value.stage)
                else:
                    first = self.contract.full(value, axes)
                    name = self.frame.name("total")
                    sums[target] = self.frame.assign(first.stage, name, first)

        def end() -> None:
            for target, value in sums.items():
                kept = where(self.frame.masks["N"], value, 0) if "N" in self.frame.masks else value
                total = self.frame.define("sum", reduced("sum", kept, "N"), value.stage)
                self.entries.store(tensor, target, total)

        parts = [
            _part(number, points, (shared,), add)
            for shared, (number, points) in self.by_shared(pattern).items()
        ]
        return [*parts, _Part(len(pattern.points), (), end)]

    @property
    def entry_axis(self) -> str:
        return "K" if self.plan.segment else "M"

    def ends_with_the_row(self) -> bool:
        """Whether every factor is read as zero beyond the last entry of the row, so that none can
        be infinite there.
        """
        pattern, segment = self.plan.pattern, self.plan.segment
        assert pattern is not None and segment is not None
        every = {f for _, factors in pattern.points for f in factors}
        return all(isinstance(f, Number) or segment.var in variables(f) for f in every)

    # --- summed variables: contract the factors they touch, then combine ---

    def with_sums(self, unroll: int) -> None:
        axes = tuple(a for a, v in (("M", self.plan.roles.m), ("N", self.plan.roles.n)) if v)
        late = self.sums_late(axes)
        outputs = self.started(union((*axes, "K")) if late else axes)
        for leader, cores in self.by_leader().items():
            if late:
                self.frame.stages[0] += self.weighted(leader, cores, outputs)
            else:
                self.group(cores, outputs, axes, unroll)
        for target, value in outputs.items():
            total = self.frame.define("sum", reduced("sum", value, "K")) if late else value
            self.write_out(target, total)

    def sums_late(self, axes: TileAxes) -> bool:
        """Whether products are added up over all points before they are summed: threads meet once
        for each output instead of once for each product, but the outputs' tiles are as large as
        those of the largest factor until then.
        """
        if not self.plan.roles.k:
            return False
        elements = len(self.targets()) * math.prod(self.frame.tile(a) for a in (*axes, "K"))
        return elements <= LATE_REGISTERS * 32 * self.config.warps

    def weighted(
        self, leader: Expr, cores: Cores, outputs: Mapping[Access, Named]
    ) -> list[KernelLine]:
        """The largest factor, times what all points that use it have beside it, onto every output
        that they write.
        """
        before = dict(self.frame.loaded)
        terms: dict[Access, list[Tile]] = {}
        self.row_steps()
        for core, points in cores.items():
            others = list(core)
            others.remove(leader)
            for target, scale in self.scales(points).items():
                factors = [scale, *(self.reads.evaluate(f, self.plan.accumulator) for f in others)]
                terms.setdefault(target, []).append(combine(factors, "*"))
        value = self.reads.evaluate(leader, self.plan.accumulator)
        for target, parts in terms.items():
            factor = self.frame.define("a", combine(parts, "+"))
            self.add_to(outputs[target], self.present(combine([factor, value], "*")), 2)
        self.frame.loaded = {
            key: v
            for key, v in self.frame.loaded.items()
            if key in before or self.shape.single_k or v.stage < 2
        }
        return self.stepped()

    def by_leader(self) -> dict[Expr, Cores]:
        """Largest summed factor -> summed factors -> (target, other factors) of the points that use
        them.
        """
        pattern = self.plan.pattern
        assert pattern is not None
        summed = {*self.plan.roles.loops, *self.plan.roles.k}
        groups: dict[Expr, Cores] = {}
        count = len(pattern.points[0][1])
        forms = [len({point[1][f] for point in pattern.points}) for f in range(count)]
        for target, factors in pattern.points:
            core = tuple(f for f in factors if set(variables(f)) & summed)
            rest = tuple(f for f in factors if f not in core)
            leader = max(core, key=lambda f: (len(variables(f)), forms[factors.index(f)]))
            groups.setdefault(leader, {}).setdefault(core, []).append((target, rest))
        return groups

    def group(
        self, cores: Cores, outputs: Mapping[Access, Named], axes: TileAxes, unroll: int
    ) -> None:
        sums = {core: Named(self.frame.name("t"), axes) for core in cores}
        zero = self.frame.zeros(axes)
        lines: list[KernelLine] = [Assignment(value.name, zero) for value in sums.values()]
        lines += self.along_rows(sums) if self.plan.roles.k else self.along_loops(sums, unroll)
        self.frame.stages[0] += lines
        for core, points in cores.items():
            self.combine(sums[core], points, outputs)

    def along_loops(self, sums: Mapping[tuple[Expr, ...], Named], unroll: int) -> list[KernelLine]:
        """Sums over looped variables, several values of the innermost in each turn."""
        *outer, inner = self.plan.roles.loops
        for var in outer:
            self.frame.vars[var] = Named(f"{var}_i", (), 2)
        sizes = {var: self.frame.size(var) for var in (*outer, inner)}
        step = [unroll] if unroll > 1 else []
        body = self.unrolled_steps(inner, sums, unroll)
        lines: list[KernelLine] = [loop(f"{inner}_0", 0, sizes[inner], *step, body=body)]
        for var in reversed(outer):
            lines = [loop(f"{var}_i", sizes[var], body=lines)]
        return lines

    def along_rows(self, sums: Mapping[tuple[Expr, ...], Named]) -> list[KernelLine]:
        """Sums along the rows of the largest factor, a tile of them at a time."""
        before = dict(self.frame.loaded)
        self.row_steps()
        for core, total in sums.items():
            value = self.product_of(core)
            over = union((*total.axes, "K"))
            self.add_to(total, reduced("sum", value.over(over), "K"), 2)
        self.frame.loaded = before
        return self.stepped()

    def product_of(self, core: tuple[Expr, ...]) -> Tile:
        parts = [self.reads.evaluate(f, self.plan.accumulator) for f in core]
        return self.present(combine(parts, "*"))

    def row_steps(self) -> None:
        """The places of one step along the rows of the largest factor."""
        (var,) = self.plan.roles.k
        along = apply("tl.arange", 0, self.config.k, over=("K",))
        place = along if self.shape.single_k else Named(f"{var}_0", (), 2) + along
        self.frame.vars[var] = place = self.frame.assign(2, f"{var}_i", place)
        if not self.shape.even_k:
            self.frame.masks["K"] = self.frame.assign(2, "k_ok", place < self.frame.size(var))

    def stepped(self) -> list[KernelLine]:
        """What was written for one step, repeated for all."""
        (var,) = self.plan.roles.k
        lines, self.frame.stages[2] = self.frame.stages[2], []
        if self.shape.single_k:
            return lines
        return [loop(f"{var}_0", 0, self.frame.size(var), self.config.k, body=lines)]

    def unrolled_steps(
        self, inner: str, sums: Mapping[tuple[Expr, ...], Named], unroll: int
    ) -> list[KernelLine]:
        before, first = dict(self.frame.loaded), Named(f"{inner}_0", (), 2)
        for u in range(unroll):
            self.frame.loaded = dict(before)
            self.frame.vars[inner] = first if u == 0 else (first + u).grouped()
            for core, total in sums.items():
                self.add_to(total, self.product_of(core), 2)
        self.frame.loaded = before
        lines, self.frame.stages[2] = self.frame.stages[2], []
        return lines

    def present(self, value: Tile) -> Tile:
        """Zero where nothing is: functions make something else of the zeros loaded there."""
        return self.contract.masked(value) if self.plan.pointwise else value

    def combine(
        self, total: Tile, points: list[PatternPoint], outputs: Mapping[Access, Named]
    ) -> None:
        for target, scale in self.scales(points).items():
            self.add_to(outputs[target], combine([scale, total], "*"), 0)

    def scales(self, points: Sequence[PatternPoint]) -> dict[Access, Tile]:
        """What the points of one product of summed factors have beside it, by the output that they
        write; computed once, where several results have it.
        """
        found = self.sums(points)
        if not self.plan.beside:
            return found
        for value in found.values():
            if value not in self.held and value.axes:
                self.held[value] = self.frame.define("part", value)
        return {target: self.held.get(value, value) for target, value in found.items()}

    def sums(self, points: Sequence[PatternPoint]) -> dict[Access, Tile]:
        found: dict[Access, list[Tile]] = {}
        for target, rest in points:
            parts = [self.reads.evaluate(f, self.plan.accumulator) for f in rest]
            found.setdefault(target, []).append(combine(parts, "*") if parts else as_tile(1))
        return {target: combine(scales, "+").grouped() for target, scales in found.items()}

    def write_out(self, target: Access, value: Tile) -> None:
        self.output.emit_store(target, self.output.sum_unkept(value))
        self.frame.stages[0] += self.frame.stages[AFTER]
        self.frame.stages[AFTER] = []


def _narrow_first(factors: tuple[Expr, ...], columns: set[str]) -> tuple[Expr, ...]:
    """What is the same for all columns first: the product of it and a number is needed often."""
    return tuple(sorted(factors, key=lambda f: bool(columns & set(variables(f)))))
