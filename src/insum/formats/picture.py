"""Pictures of formats with matplotlib: where the entries are, how they are grouped and blocked, how
full the rows are.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from insum.accepted import TEXT, takes
from insum.errors import FormatError
from insum.formats import entries as E
from insum.formats.base import FORMAT, SparseFormat
from insum.formats.grouped import rows_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_POINTS = 100_000
_MOST_BLOCKS = 4_000


@takes(FormatError, x=FORMAT, title=TEXT)
def draw(x: SparseFormat, *, title: str = "") -> Figure:
    """A spy plot, points of one group in one colour and blocks outlined, beside a histogram of the
    rows' occupancy.

    Tensors of more than two dimensions are shown as a matrix: the grouped dimensions (or the first)
    against all others.

    Args:
        x: What is drawn.
        title: What stands above it.

    Returns:
        A figure of Matplotlib, which has to be installed.

    Examples:
        >>> from insum.formats import GroupCOO
        >>> draw(GroupCOO.from_dense(torch.eye(4))).savefig("picture.png")  # doctest: +SKIP
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    spy, histogram = figure.subplots(1, 2)
    _draw_spy(spy, x)
    _draw_histogram(histogram, x)
    figure.suptitle(title or repr(x), fontsize=9)
    return figure


def _row_dims(x: SparseFormat) -> tuple[int, ...]:
    return getattr(x, "group_dims", ()) or ((0,) if x.ndim > 1 else ())


def _draw_spy(axes: Any, x: SparseFormat) -> None:
    dims = _row_dims(x)
    rest = tuple(d for d in range(x.ndim) if d not in dims)
    mask, positions = x.mask(), x.positions
    owner = (
        torch.arange(positions[0], device=x.device)
        .reshape(-1, *[1] * (len(positions) - 1))
        .expand(positions)
    )
    keep = torch.ones(positions, dtype=torch.bool, device=x.device) if mask is None else mask
    coords = [c.long()[keep] for c in x.coordinates()]
    block = x.block_shape_or_none
    if block is None:
        _draw_points(axes, x, coords, dims, rest, owner[keep])
    else:
        if x.ndim == 2:
            _draw_blocks(axes, coords, owner[keep], block, dims, rest)
        _draw_points(axes, x, [c.long() for c in E.to_elements(x.entries()).coords], dims, rest)
    height, width = (max(math.prod(x.shape[d] for d in group), 1) for group in (dims, rest))
    axes.set(
        xlim=(-0.5, width - 0.5),
        ylim=(height - 0.5, -0.5),
        xlabel=f"dimension {rest}",
        ylabel=f"dimension {dims}",
        title=f"{type(x).__name__} {x.shape}",
    )


def _draw_points(
    axes: Any,
    x: SparseFormat,
    coords: list[torch.Tensor],
    dims: tuple[int, ...],
    rest: tuple[int, ...],
    owner: torch.Tensor | None = None,
) -> None:
    """One square per entry (every so many of a great number), in the colour of its group or in
    black.
    """
    step = max(1, -(-coords[0].numel() // _MOST_POINTS))
    rows, columns = (E.linear(coords, x.shape, d)[::step].cpu() for d in (dims, rest))
    colours = (
        {"color": "black"} if owner is None else {"c": owner[::step].cpu() % 20, "cmap": "tab20"}
    )
    axes.scatter(
        columns,
        rows,
        s=max(0.2, min(20.0, 4000 / max(rows.numel(), 1))),
        marker="s",
        linewidths=0,
        zorder=2,
        **colours,
    )


def _draw_blocks(
    axes: Any,
    coords: list[torch.Tensor],
    owner: torch.Tensor,
    block: tuple[int, ...],
    dims: tuple[int, ...],
    rest: tuple[int, ...],
) -> None:
    from matplotlib import colormaps
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    step = max(1, -(-coords[0].numel() // _MOST_BLOCKS))
    high, wide = block[dims[0]], block[rest[0]]
    corners = zip(
        (coords[rest[0]] * wide)[::step].tolist(), (coords[dims[0]] * high)[::step].tolist()
    )
    patches = [Rectangle((left - 0.5, top - 0.5), wide, high) for left, top in corners]
    colours = colormaps["tab20"]((owner[::step].cpu() % 20).numpy())
    axes.add_collection(
        PatchCollection(patches, facecolor=colours, edgecolor="black", linewidth=0.3)
    )


def _draw_histogram(axes: Any, x: SparseFormat) -> None:
    dims = _row_dims(x)
    entries = x.entries()
    entries = E.ordered(entries, (*dims, *(d for d in range(x.ndim) if d not in dims)))
    counts = (
        torch.bincount(rows_of(entries, dims).counts.cpu())
        if entries.count
        else torch.zeros(1, dtype=torch.int64)
    )
    axes.bar(range(counts.numel()), counts.tolist(), width=1.0)
    size = getattr(x, "group_size", None)
    few = counts.numel() <= 100
    for edge in range(size, counts.numel(), size) if size and few else ():
        axes.axvline(edge + 0.5, color="tab:red", linewidth=0.5)
    what = "blocks" if x.block_shape_or_none else "entries"
    axes.set(
        xlabel=f"{what} per row" + (" (red: multiples of the group size)" if size and few else ""),
        ylabel="rows",
        title="occupancy",
    )
    if not few:
        axes.set(xscale="symlog", yscale="symlog", ylim=(0, None))
