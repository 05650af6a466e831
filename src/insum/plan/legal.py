"""Which configs a plan can be compiled with. Each rule is one line of `broken`; users get it as an
error, the search as a filter.
"""

from __future__ import annotations

from collections.abc import Mapping

from insum.errors import SettingsError
from insum.plan import tiling
from insum.plan.config import Choice, Config
from insum.plan.plan import Plan
from insum.plan.sizes import power_of_two

#: Sides of `tl.dot` are at least this long.
LEAST_DOT = 16
#: Triton's limit on the elements of one tile.
MOST_ELEMENTS = 2**20
#: Straight-line kernels and tiles of rows launch two kinds of kernels at most; their names, for
#: messages.
KINDS = {
    "tiles": ("tiles",),
    "rows": ("short rows", "long rows"),
    "unrolled": ("straight-line code",),
}


def kinds(plan: Plan) -> tuple[str, ...]:
    """The kinds of launches of a plan, in the order of its choice."""
    return KINDS["unrolled" if plan.pattern else "rows" if tiling.in_rows(plan) else "tiles"]


def broken(plan: Plan, extents: Mapping[str, int], choice: Choice) -> str:
    """The rule that a choice breaks for a plan whose sides are as the choice wants them, or ''."""
    names = kinds(plan)
    if len(choice) != len(names):
        return (
            f"this statement takes {len(names)} config{'s' if len(names) > 1 else ''} "
            f"({', '.join(names)}), not {len(choice)}"
        )
    if len({one.swap for one in choice}) > 1:
        return "all configs of one product agree on swap"
    return next(
        (
            f"{name}: {rule}"
            for name, one in zip(names, choice, strict=True)
            if (rule := _broken(plan, extents, one))
        ),
        "",
    )


def _broken(plan: Plan, extents: Mapping[str, int], config: Config) -> str:
    roles = plan.roles
    if plan.pattern and not roles.k and config.k != 1:
        return "straight-line code has no K axis: k=1"
    for axis, used in (("m", roles.m), ("n", roles.n), ("k", roles.k)):
        if not used and getattr(config, axis) != 1:
            return f"the {axis.upper()} axis is not used: {axis}=1"
    if roles.dot and (min(config.m, config.k) < LEAST_DOT or config.n < tiling.least_n(plan)):
        return (
            f"sides of tl.dot are at least {LEAST_DOT}, but m={config.m}, n={config.n}, "
            f"k={config.k}"
        )
    inner = tiling.inner_extent(plan, extents)
    if inner == power_of_two(inner) and config.k % inner:
        return f"k is a multiple of {inner}, the extent of {roles.k[1]}, but k={config.k}"
    return _too_small(plan, extents, config) or _too_large(plan, config)


def _too_small(plan: Plan, extents: Mapping[str, int], config: Config) -> str:
    """A tile covers the whole of an axis that is summed after the product, or that scatters into a
    register tile.
    """
    roles = plan.roles
    if plan.pattern or tiling.in_rows(plan):
        fits = not tiling.sums_columns(plan) or config.n >= tiling.extent(roles.n, extents)
        return (
            ""
            if fits
            else f"one tile holds all of the N axis ({roles.n[0]}), which is summed at the end"
        )
    least = dict(zip("mn", tiling.held(plan, extents, 1, 1), strict=True))
    for axis, tile in least.items():
        if getattr(config, axis) < tile:
            return (
                f"one tile holds all of the {axis.upper()} axis "
                f"({', '.join(getattr(plan.roles, axis))}): {axis} is at least {tile}"
            )
    return ""


def _too_large(plan: Plan, config: Config) -> str:
    if plan.roles.dot:
        largest = max(config.m * config.n, config.m * config.k, config.k * config.n)
    else:
        largest = config.m * config.n * config.k
    return (
        f"a tile has at most {MOST_ELEMENTS} elements, but this one has {largest}"
        if largest > MOST_ELEMENTS
        else ""
    )


def check(plan: Plan, extents: Mapping[str, int], choice: Choice) -> None:
    """Raise where a choice that a user gave cannot be compiled."""
    rule = broken(plan, extents, choice)
    if rule:
        raise SettingsError(
            f"the config does not fit: {rule}",
            remedy="leave config= out, or take one that insum.tune printed for this statement",
        )
