"""Pictures of tensor products; Matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from insum.errors import UnsupportedError
from insum.nn.irreps import Irreps
from insum.nn.paths import MODES, Instruction

#: Where terms of the first input, the second and the output stand: two ends of a line each.
SIDES = (((0.0, 0.1), (0.0, 0.9)), ((1.0, 0.1), (1.0, 0.9)), ((0.15, -0.4), (0.85, -0.4)))


def paths_drawn(
    irreps: tuple[Irreps, Irreps, Irreps],
    paths: Sequence[Instruction],
    sizes: Mapping[int, float],
    ax: Any,
) -> tuple[Any, Any]:
    """Inputs at the left and right, the output below, and three lines for every path, which meet;
    ``sizes``: of the weights of paths.
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise UnsupportedError(
            "Matplotlib is not installed",
            expected="it, for pictures",
            remedy="pip install matplotlib",
        ) from error
    if ax is None:
        _, ax = pyplot.subplots(figsize=(6, 6))
    ends = [_places(number, irreps[number]) for number in range(3)]
    most = max(sizes.values(), default=0.0) or 1.0
    for number, path in enumerate(paths):
        corners = [ends[0][path.i_in1], ends[1][path.i_in2], ends[2][path.i_out]]
        middle = tuple(sum(axis) / 3 for axis in zip(*corners))
        colour = f"C{list(MODES).index(path.mode)}"
        weighed = sizes.get(number)
        strength = 1.0 if weighed is None else 0.15 + 0.85 * weighed / most
        for x, y in corners:
            style = "-" if path.has_weight else ":"
            ax.plot([x, middle[0]], [y, middle[1]], style, color=colour, alpha=strength, lw=1.2)
    for side, (terms, where) in enumerate(zip(irreps, ends)):
        for (mul, ir), (x, y) in zip(terms, where):
            anchor = ("right", "left", "center")[side]
            ax.text(x, y, f" {mul}x{ir} ", ha=anchor, va="top" if side == 2 else "center")
    used = {path.mode: f"C{list(MODES).index(path.mode)}" for path in paths}
    for mode, colour in used.items():
        ax.plot([], [], color=colour, label=mode)
    if used:
        ax.legend(title="mode", loc="upper center", ncols=len(used), frameon=False)
    ax.set_axis_off()
    return ax.figure, ax


def _places(side: int, irreps: Irreps) -> list[tuple[float, float]]:
    """Points along a side, in the middle where there is one."""
    (x0, y0), (x1, y1) = SIDES[side]
    shares = [(n + 0.5) / max(1, len(irreps)) for n in range(len(irreps))]
    return [(x0 + (x1 - x0) * s, y0 + (y1 - y0) * s) for s in shares]
