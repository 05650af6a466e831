"""Which voxel meets which under each offset of a kernel: built by sorting and searching on the
device, kept with the voxels.

A map is a sparse tensor ``Map[z,x,y]``: offset ``z`` takes input voxel ``y`` to output voxel ``x``.
It is held in one of two formats, and the statement of a convolution is spelled by the format:

    NeighborTable    Out[x,m] = In[Nb[z,x],c] * W[z,c,m]            a place for every offset and
    output, -1 where there is no input GroupCOO         Out[X[p,q],m] = In[Y[p,q],c] * W[Z[p],c,m]
    the pairs that there are, grouped by offset, scattered
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from insum.errors import BindingError
from insum.formats import GroupCOO, NeighborTable, SparseFormat
from insum.nn.voxels import Triple, Voxels, keys_of

#: The table has a place for every offset and output, of which tiles of similar outputs skip most
#: (insum/plan/packing.py); the groups have pairs alone, and add with atomics. The table was the
#: faster at the lowest share of filled places measured, 13 % (`insum bench conv`); far below, its
#: memory decides: a place takes half of what a pair takes.
TABLE_FROM = 0.04
#: Pairs in a group: the rows of one matrix product. More than an offset has on average would be
#: padding.
GROUP = 64
#: Places that are searched at once.
AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Geometry:
    """A kernel: where its offsets lead. ``transposed`` exchanges the roles of inputs and outputs,
    as in `torch.nn.ConvTranspose3d`.
    """

    kernel: Triple
    stride: Triple = (1, 1, 1)
    padding: Triple = (0, 0, 0)
    dilation: Triple = (1, 1, 1)
    output_padding: Triple = (0, 0, 0)
    transposed: bool = False
    submanifold: bool = False

    @property
    def volume(self) -> int:
        return math.prod(self.kernel)

    def offsets(self, device: torch.device) -> Tensor:
        """One row (0, dx, dy, dz) for every weight, in the order of a dense kernel."""
        steps = [torch.arange(k, device=device) * d for k, d in zip(self.kernel, self.dilation)]
        grid = torch.stack(torch.meshgrid(*steps, indexing="ij"), -1).reshape(-1, 3)
        return torch.nn.functional.pad(grid, (1, 0))

    def fine(self, coarse: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor | None]:
        """``coarse * stride - padding + offset``, (offsets, N, 4): inputs of outputs, or outputs of
        a transposed kernel's inputs.
        """
        return coarse * _four(self.stride, coarse, 1) - _four(self.padding, coarse) + offsets[
            :, None
        ], None

    def coarse(self, fine: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor | None]:
        """The reverse, and where it is a whole number."""
        shifted, stride = (
            fine + _four(self.padding, fine) - offsets[:, None],
            _four(self.stride, fine, 1),
        )
        whole = shifted.div(stride, rounding_mode="floor")
        return whole, (whole * stride == shifted).all(-1) if max(self.stride) > 1 else None

    def spatial_shape(self, shape: Triple | None) -> Triple | None:
        """The size of the outputs, as PyTorch's dense convolutions have it."""
        if shape is None or self.submanifold:
            return shape
        reach = [d * (k - 1) for d, k in zip(self.dilation, self.kernel)]
        if self.transposed:
            sizes = [
                (n - 1) * s - 2 * p + r + o + 1
                for n, s, p, r, o in zip(
                    shape, self.stride, self.padding, reach, self.output_padding
                )
            ]
        else:
            sizes = [
                (n + 2 * p - r - 1) // s + 1
                for n, s, p, r in zip(shape, self.stride, self.padding, reach)
            ]
        if min(sizes) < 1:
            raise BindingError(
                f"a grid of {shape} is too small for a kernel of {self.kernel}",
                expected="at least one output in every dimension",
            )
        return (sizes[0], sizes[1], sizes[2])


def kernel_map(
    inputs: Voxels, geometry: Geometry, target: Voxels | None = None
) -> tuple[Voxels, SparseFormat]:
    """The voxels that a kernel leads to (or those of ``target``) and the map to them; built once
    for each kernel and kept with ``inputs``.
    """
    target = inputs if geometry.submanifold else target
    if target is None:
        if geometry not in inputs.maps:
            outputs = _reached(inputs, geometry)
            inputs.maps[geometry] = outputs, build_map(inputs, outputs, geometry)
        made: tuple[Voxels, SparseFormat] = inputs.maps[geometry]
        return made
    key = geometry, id(target)
    held = inputs.maps.get(key)
    if held is None or held[0]() is not target:
        held = inputs.maps[key] = weakref.ref(target), build_map(inputs, target, geometry)
    return target, held[1]


def build_map(inputs: Voxels, outputs: Voxels, geometry: Geometry) -> SparseFormat:
    """``Map[z,x,y]`` as a table where enough of it is filled, else as groups of pairs."""
    table = _searched(inputs, outputs, geometry)
    pairs = int((table >= 0).sum())
    shape = (geometry.volume, outputs.count, inputs.count)
    if pairs >= TABLE_FROM * table.numel():
        return NeighborTable(table, shape, dim=2, validate=False)
    z, x = (table >= 0).nonzero(as_tuple=True)
    group = min(GROUP, 1 << max(0, math.ceil(pairs / geometry.volume) - 1).bit_length())
    return GroupCOO.from_entries(
        (z, x, table[z, x]), None, shape, group_dims=0, group_size=group, validate=False
    )


def _searched(inputs: Voxels, outputs: Voxels, geometry: Geometry) -> Tensor:
    """The input voxel for every offset and output, or -1: (offsets, outputs)."""
    sources = geometry.coarse if geometry.transposed else geometry.fine
    found = []
    for offsets in _parts(geometry.offsets(outputs.coords.device), outputs.count):
        wanted, whole = sources(outputs.coords, offsets)
        rows = inputs.find(wanted)
        found.append(rows if whole is None else torch.where(whole, rows, -1))
    return torch.cat(found)


def _reached(inputs: Voxels, geometry: Geometry) -> Voxels:
    """Every voxel that some input contributes to, in ascending order."""
    shape = geometry.spatial_shape(inputs.spatial_shape)
    targets = geometry.fine if geometry.transposed else geometry.coarse
    offsets = geometry.offsets(inputs.coords.device)
    corners, _ = targets(
        torch.tensor([inputs.low, [a + b - 1 for a, b in zip(inputs.low, inputs.size)]]),
        offsets.cpu()[[0, -1]],
    )
    low, high = corners.amin((0, 1)).tolist(), corners.amax((0, 1)).tolist()
    low, high = (low, high) if shape is None else ([0, 0, 0, 0], [high[0], *(s - 1 for s in shape)])
    size = tuple(b - a + 1 for a, b in zip(low, high))
    keys = [
        _keys_inside(*targets(inputs.coords, part), low, size)
        for part in _parts(offsets, inputs.count)
    ]
    return Voxels.of_sorted(_unique(torch.cat(keys)), tuple(low), size, shape)


def _keys_inside(
    coords: Tensor, whole: Tensor | None, low: Sequence[int], size: tuple[int, ...]
) -> Tensor:
    first, last = (
        torch.tensor(t, device=coords.device) for t in (low, [a + b for a, b in zip(low, size)])
    )
    keep = ((coords >= first) & (coords < last)).all(-1)
    keep = keep if whole is None else keep & whole
    return _unique(keys_of(coords, low, size)[keep])


def _unique(keys: Tensor) -> Tensor:
    found: Tensor = torch.unique_consecutive(keys.sort().values)
    return found


def _parts(offsets: Tensor, voxels: int) -> list[Tensor]:
    """Offsets in portions that bound the memory that searching takes."""
    step = max(1, AT_ONCE // max(1, voxels))
    return [offsets[start : start + step] for start in range(0, offsets.shape[0], step)]


def _four(triple: Triple, like: Tensor, batch: int = 0) -> Tensor:
    return torch.tensor((batch, *triple), device=like.device)
