"""From points to voxels, and back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from insum.accepted import (
    ELEMENTS,
    FLAG,
    NUMBER,
    NUMBERS,
    TEXT,
    VALUES,
    Accepted,
    takes,
)
from insum.api import insum
from insum.errors import BindingError, IndexRangeError
from insum.nn.checks import integers, one_device
from insum.nn.pool import check_reduction, scattered
from insum.nn.sparse_tensor import VOXELS, SparseTensor
from insum.nn.voxels import AXES, Box, Voxels, axes_of, check_box, keys_of

POINTS = Accepted(
    "a dense tensor of floating-point numbers that are here",
    lambda v: ELEMENTS.fits(v) and v.dtype.is_floating_point and VALUES.fits(v),
)
#: Coordinates of voxels are whole numbers, which a double holds up to here.
_LARGEST = 2.0**53


@overload
def voxelize(
    points: Tensor,
    size: float | Sequence[float],
    features: Tensor | None = None,
    *,
    batch: Tensor | None = None,
    reduce: str = "mean",
    return_inverse: Literal[False] = False,
) -> SparseTensor: ...


@overload
def voxelize(
    points: Tensor,
    size: float | Sequence[float],
    features: Tensor | None = None,
    *,
    batch: Tensor | None = None,
    reduce: str = "mean",
    return_inverse: Literal[True],
) -> tuple[SparseTensor, Tensor]: ...


@takes(
    points=POINTS,
    size=NUMBER | NUMBERS,
    features=VALUES.optional,
    batch=ELEMENTS.optional,
    reduce=TEXT,
    return_inverse=FLAG,
)
def voxelize(
    points: Tensor,
    size: float | Sequence[float],
    features: Tensor | None = None,
    *,
    batch: Tensor | None = None,
    reduce: str = "mean",
    return_inverse: bool = False,
) -> SparseTensor | tuple[SparseTensor, Tensor]:
    """The voxels that points lie in, with what their points have, reduced: ``Out[v[p],c] =
    In[p,c]``.

    Args:
        points: (points, dimensions), one to four.
        size: The edge of a voxel, or one for each axis; voxel ``c`` is what lies from ``c * size``
            up to ``(c + 1) * size``.
        features: (points, channels); the points themselves where there are none.
        batch: (points,), the number of the cloud that a point belongs to; 0 where it is not given.
        reduce: ``"mean"``, ``"sum"``, ``"max"`` or ``"min"`` over the points of a voxel.
        return_inverse: Whether the voxel of every point is returned, too.

    Returns:
        The tensor, in ascending order of its coordinates, and, where asked for, the row of each
        point.

    Raises:
        BindingError: Shapes that do not fit, or sizes that are not positive.
        IndexRangeError: A point that is not finite, or a negative batch.

    Examples:
        >>> points = torch.tensor([[0.1, 0.2, 0.0], [0.3, 0.1, 0.2], [1.9, 0.0, 0.0]])
        >>> features = torch.tensor([[1.0], [3.0], [7.0]])
        >>> x, of_point = voxelize(points, 0.5, features, return_inverse=True)
        >>> x.coords, x.features, of_point
        (tensor([[0, 0, 0, 0],
                [0, 3, 0, 0]]), tensor([[2.],
                [7.]]), tensor([0, 0, 1]))
    """
    check_reduction(reduce, ("mean", "sum", "max", "min"))
    edges = _edges(points, size)
    given = points if features is None else features
    if given.dim() != 2 or given.shape[0] != points.shape[0]:
        raise BindingError(
            f"features have shape {tuple(given.shape)}, but there are {points.shape[0]} points",
            expected=f"({points.shape[0]}, channels)",
        )
    one_device(points=points, features=features, batch=batch)
    places = torch.floor(points.detach().double() / edges)
    _check_places(points, places)
    coords = torch.cat([_batches(batch, points)[:, None], places.long()], 1)
    box = _box_of(coords)
    keys, inverse = torch.unique(keys_of(coords, box.low, box.size), return_inverse=True)
    voxels = Voxels.of_sorted(keys, box, None)
    reduced = scattered(given, inverse, voxels.count, reduce)
    made = SparseTensor(voxels.coords, reduced, None, voxels)
    return (made, inverse) if return_inverse else made


@takes(x=VOXELS, points=POINTS, size=NUMBER | NUMBERS, batch=ELEMENTS.optional, mode=TEXT)
def devoxelize(
    x: SparseTensor,
    points: Tensor,
    size: float | Sequence[float],
    *,
    batch: Tensor | None = None,
    mode: str = "linear",
) -> Tensor:
    """Features at points, between voxels: ``Out[p,c] = Share[k,p] * In[Nb[k,p],c]``.

    Args:
        x: Features of voxels.
        points: (points, dimensions), in the units of ``size``; they get gradients, too.
        size: The edge of a voxel: of a tensor that was made coarser with stride 2, twice that
            which was passed to `voxelize`.
        batch: (points,), the number of the cloud that a point belongs to; 0 where it is not given.
        mode: ``"linear"``, between the centres of the voxels around a point, those that there are;
            ``"nearest"``, that of the voxel which a point lies in.

    Returns:
        (points, channels); 0 where there is no voxel. Between integers are numbers of float32.

    Raises:
        BindingError: Shapes that do not fit, or sizes that are not positive.
        IndexRangeError: A point that is not finite, or a negative batch.

    Examples:
        >>> x = SparseTensor(torch.tensor([[0], [1]]), torch.tensor([[1.0], [3.0]]), ndim=1)
        >>> devoxelize(x, torch.tensor([[0.5], [1.0], [1.25], [9.0]]), 1.0)
        tensor([[1.0000],
                [2.0000],
                [2.5000],
                [0.0000]])
    """
    check_reduction(mode, ("linear", "nearest"))
    edges = _edges(points, size)
    if points.shape[1] != x.ndim:
        raise BindingError(
            f"points have shape {tuple(points.shape)}, but the voxels {x.ndim} dimension(s)",
            expected=f"(points, {x.ndim}): {axes_of(x.ndim)}",
        )
    one_device(features=x.features, points=points, batch=batch)
    scaled = points.double() / edges - (0.5 if mode == "linear" else 0.0)
    first = torch.floor(scaled.detach())
    _check_places(points, first)
    corners = (
        list(itertools.product((0, 1), repeat=x.ndim)) if mode == "linear" else [(0,) * x.ndim]
    )
    steps = torch.tensor(corners, device=points.device)
    base = torch.cat([_batches(batch, points)[:, None], first.long()], 1)
    found = x.voxels.find(base + torch.nn.functional.pad(steps, (1, 0))[:, None])
    within = scaled - first
    share = torch.where(steps[:, None] > 0, within, 1 - within).prod(-1) * (found >= 0)
    if mode == "nearest":
        share = (found >= 0).double()
    share = share / share.sum(0).clamp(min=1e-12)
    kind = x.dtype if x.dtype.is_floating_point or x.dtype.is_complex else torch.float32
    return insum(
        "Out[p,c] = Share[k,p] * In[Nb[k,p],c]",
        padded=("Nb",),
        Share=share.to(kind),
        Nb=found,
        In=x.features,
    )


# --- checks ---


def _edges(points: Tensor, size: float | Sequence[float]) -> Tensor:
    """The edges of a voxel, and the shape of points."""
    if points.dim() != 2 or not 1 <= points.shape[1] <= len(AXES):
        raise BindingError(
            f"points have shape {tuple(points.shape)}", expected="(points, 1 to 4 dimensions)"
        )
    ndim = points.shape[1]
    given: Any = size
    edges = [float(s) for s in (given if isinstance(given, tuple | list) else [given] * ndim)]
    if len(edges) != ndim or not all(0 < edge < float("inf") for edge in edges):
        raise BindingError(
            f"size is {size!r}", expected=f"a positive number, or {ndim}: {axes_of(ndim)}"
        )
    return torch.tensor(edges, dtype=torch.float64, device=points.device)


def _check_places(points: Tensor, places: Tensor) -> None:
    """Every point is at a place that an integer holds, which NaN and infinity are not."""
    wrong = ~(places.abs() < _LARGEST).all(1)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise IndexRangeError(
            f"points[{row}] is {tuple(points[row].tolist())}",
            expected="finite numbers, at most 2**53 voxels from the origin",
        )


def _batches(batch: Tensor | None, points: Tensor) -> Tensor:
    if batch is None:
        return torch.zeros(points.shape[0], dtype=torch.int64, device=points.device)
    integers("batch", batch)
    if batch.shape != points.shape[:1]:
        raise BindingError(
            f"batch has shape {tuple(batch.shape)}, but there are {points.shape[0]} points",
            expected=f"({points.shape[0]},)",
        )
    signed = batch.long()  # torch compares no unsigned integers of more than 8 bits
    if signed.numel() and int(signed.min()) < 0:
        row = int((signed < 0).nonzero()[0])
        raise IndexRangeError(f"batch[{row}] is {int(batch[row])}", expected="batches from 0")
    return signed


def _box_of(coords: Tensor) -> Box:
    if coords.shape[0] == 0:
        return Box((0,) * coords.shape[1], (1,) * coords.shape[1])
    low, high = torch.stack(torch.aminmax(coords, dim=0)).tolist()
    size = tuple(b - a + 1 for a, b in zip((0, *low[1:]), high))
    check_box((0, *low[1:]), size, coords)
    return Box((0, *low[1:]), size)
