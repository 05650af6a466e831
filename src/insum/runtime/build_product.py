"""One planned product: what the text of its kernels depends on, and what launches them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from insum.codegen.arguments import END, START, Count, ExtentArgument
from insum.codegen.kernel import Kernel, Shape
from insum.lang.expr import accesses, variables
from insum.plan import tiling
from insum.plan.config import Choice, Config
from insum.plan.draft import Planned, Wishes
from insum.plan.plan import Plan
from insum.plan.recipes import CeilDivided, OfCount, OfExtent, Recipe, SizeExpr
from insum.plan.roles import Contraction
from insum.plan.sizes import OUT, Strides, power_of_two
from insum.runtime import launch
from insum.runtime.program import Grid, Launch, ProductLaunches, Room, Workspace

#: Masks compare with extents in units of at most so many elements: a wide load of halves.
MOST_UNIT = 8
#: Of the names of kernels that put pieces together.
PIECES = "pieces"


@dataclass(frozen=True, eq=False)
class ProductBuild:
    """A planned product with its choice of configs.

    Attributes:
        plan: that of ``planned``, with the sides that its choice wants.
        room: where its kernels are counted.
    """

    planned: Planned
    plan: Plan
    wishes: Wishes
    choice: Choice
    room: Room | None

    @property
    def extents(self) -> Mapping[str, int]:
        return self.planned.extents

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
            even_n=not roles.flat and self.multiple(roles.n) % config.n == 0,
            even_k=self.multiple(k) % config.k == 0,
            inner=tiling.inner_extent(plan, self.extents),
            onehot=power_of_two(self.planned.sizes.shape[plan.onehot]) if plan.onehot >= 0 else 0,
            k_tiles=tiles,
            single_k=tiles == 1 and alone,
            pieces=pieces > 1,
            outer=pieces > 1 and tiling.cuts_outer_loop(plan, config, self.extents),
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
        if self.plan.roles.flat:
            odd = self.beyond_loads(self.plan.roles.n)
        found = {v: min(MOST_UNIT, self.multiple((v,))) for v in self.planned.sizes.extents}
        return tuple((v, unit) for v, unit in found.items() if unit > 1 and v not in odd)

    def beyond_loads(self, axis: Sequence[str]) -> tuple[str, ...]:
        """Of variables that are walked as one those that decide nothing: places are a multiple of
        what the widest load takes because of those behind them.
        """
        behind = (self.multiple(axis[at + 1 :]) for at in range(len(axis)))
        return tuple(v for v, unit in zip(axis, behind) if unit % MOST_UNIT == 0)

    def has_any_rows(self) -> bool:
        """Whether one text is for any number of rows: patterns, and sums of threads, whose rows lie
        apart in memory. A mask costs them next to nothing; a compilation whenever a batch has an
        even number of items costs seconds.
        """
        plan = self.plan
        if plan.pattern is None and (plan.roles.dot or plan.strategy != "store"):
            return False
        return not {*plan.roles.m} & _along_memory(plan)

    # --- launches ---

    def work_strides(self, others: Sequence[str]) -> Strides:
        """Of the workspace: slots, and behind them the other variables of the output."""
        steps = [min(MOST_UNIT, self.multiple(others[at:])) for at in range(len(others))]
        units = (*(-step for step in steps), 1)
        return Strides(units, (True,) * len(others))

    def segment_arrays(self) -> dict[str, tuple[Recipe, str]]:
        recipe = self.planned.segments
        return {} if recipe is None else {START: (recipe, "start"), END: (recipe, "end")}

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
            f'"""{as_comment(plan.statement)}',
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


def as_comment(text: str) -> str:
    """User text inside a docstring of generated source: printable ASCII without quotes or
    backslashes, whatever was passed.
    """
    return "".join(
        c if c.isascii() and (c.isalnum() or c in " _[]()+-*=.,") else "?" for c in text
    )[:400]
