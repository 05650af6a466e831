"""Which voxel meets which under each offset of a kernel: built on the device, kept with the voxels.

A map is a sparse tensor ``Map[z,x,y]``: offset ``z`` takes input voxel ``y`` to output voxel ``x``.
It is held in one of two formats, and the statement of a convolution is spelled by the format:

    NeighborTable    Out[x,m] = In[Nb[z,x],c] * W[z,c,m]
        a place for every offset and output, -1 where there is no input
    GroupCOO         Out[X[p,q],m] = In[Y[p,q],c] * W[Z[p],c,m]
        the pairs that there are, grouped by offset, scattered

On a GPU a map is searched in a hash table, and nothing waits for the device; but where the voxels
that a kernel reaches are asked for, once, for their number.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from insum import facts, memory
from insum.bounded import keep
from insum.compat.calls import is_intercepted
from insum.compat.contexts import untracked
from insum.compat.streams import is_recorded
from insum.errors import BindingError
from insum.formats import GroupCOO, NeighborTable, SparseFormat
from insum.nn.checks import sent
from insum.nn.voxels import Box, Sizes, Voxels, check_box, keys_of
from insum.runtime.handwritten import hashing, packs, reaching

#: Kernel maps that are kept with the voxels they start from.
MOST_MAPS = 64
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
    """A kernel in any number of dimensions: where its offsets lead. ``transposed`` exchanges the
    roles of inputs and outputs, as in `torch.nn.ConvTranspose3d`. What is left empty is what does
    nothing: a stride and a dilation of 1, no padding.
    """

    kernel: Sizes
    stride: Sizes = ()
    padding: Sizes = ()
    dilation: Sizes = ()
    output_padding: Sizes = ()
    transposed: bool = False
    submanifold: bool = False

    def __post_init__(self) -> None:
        for name, usual in (("stride", 1), ("padding", 0), ("dilation", 1), ("output_padding", 0)):
            object.__setattr__(self, name, getattr(self, name) or (usual,) * self.ndim)
        _ = self.key  # now: before Python 3.12 the first time takes a lock, which is not traced

    @functools.cached_property
    def key(self) -> tuple[object, ...]:
        """What tells kernels apart: every call of a layer looks for its map, and hashing plain
        numbers takes no call of Python.
        """
        sizes = self.kernel, self.stride, self.padding, self.dilation, self.output_padding
        return *sizes, self.transposed, self.submanifold

    @functools.cached_property
    def back(self) -> tuple[object, ...] | None:
        """The key of the kernel that leads from outputs to inputs by the same offsets: that of a
        strided convolution is transposed. None where outputs are where inputs are.
        """
        sizes = self.kernel, self.stride, self.padding, self.dilation, (0,) * self.ndim
        return None if self.submanifold else (*sizes, not self.transposed, False)

    @property
    def ndim(self) -> int:
        return len(self.kernel)

    @functools.cached_property
    def volume(self) -> int:
        return math.prod(self.kernel)

    @functools.cached_property
    def reach(self) -> Sizes:
        """From the first offset to the last, along each axis."""
        return tuple(d * (k - 1) for d, k in zip(self.dilation, self.kernel))

    @functools.cached_property
    def mirrored(self) -> bool:
        """Whether an offset leads back where the opposite one leads to: the kernel ends where it
        starts, and has a centre.
        """
        return self.submanifold and all(2 * p == r for p, r in zip(self.padding, self.reach))

    @property
    def meets_itself(self) -> bool:
        """Whether every voxel reaches the output at its own place."""
        every = zip(self.stride, self.padding, self.dilation, self.reach)
        return all(s == 1 and p % d == 0 and p <= r for s, p, d, r in every)

    def offsets(self, device: torch.device) -> Tensor:
        """One row (0, dx, dy, ...) for every weight, in the order of a dense kernel."""
        return _sent(tuple((0, *offset) for offset in self.places()), device)

    def places(self) -> list[Sizes]:
        """(dx, dy, ...) for every weight, in the order of a dense kernel."""
        return _places(self.kernel, self.dilation)

    def stencil(self, device: torch.device) -> hashing.Stencil:
        """Where the inputs of outputs are searched. The offsets that are nearest to the centre are
        taken for the most frequent ones.
        """
        return _stencil(
            self.kernel, self.dilation, self.stride, self.padding, self.transposed, device
        )

    def fine(self, coarse: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor | None]:
        """``coarse * stride - padding + offset``, (offsets, N, 1 + axes): inputs of outputs, or
        outputs of a transposed kernel's inputs.
        """
        first = coarse * _with_batch(self.stride, coarse, 1) - _with_batch(self.padding, coarse)
        return first + offsets[:, None], None

    def coarse(self, fine: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor | None]:
        """The reverse, and where it is a whole number."""
        shifted, stride = (
            fine + _with_batch(self.padding, fine) - offsets[:, None],
            _with_batch(self.stride, fine, 1),
        )
        whole = shifted.div(stride, rounding_mode="floor")
        return whole, (whole * stride == shifted).all(-1) if max(self.stride) > 1 else None

    def steps(self, device: torch.device) -> Tensor:
        """How many outputs back from the last that it reaches an input may reach others, a row for
        each combination; of a transposed kernel: its offsets. A kernel that is no wider than its
        stride has one.
        """
        if self.transposed:
            return self.offsets(device)
        along = (range(r // s + 1) for r, s in zip(self.reach, self.stride))
        return _sent(tuple((0, *step) for step in itertools.product(*along)), device)

    def reached(self, coords: Tensor, steps: Tensor) -> tuple[Tensor, Tensor | None]:
        """The outputs that inputs reach, (steps, N, 1 + axes), and where they do."""
        if self.transposed:
            return self.fine(coords, steps)
        stride = _with_batch(self.stride, coords, 1)
        shifted = coords + _with_batch(self.padding, coords)
        outputs = shifted.div(stride, rounding_mode="floor") - steps[:, None]
        offset = shifted - outputs * stride
        there = (offset <= _with_batch(self.reach, coords)).all(-1)
        if max(self.dilation) > 1:
            there &= (offset % _with_batch(self.dilation, coords, 1) == 0).all(-1)
        return outputs, there

    def bounds(self, low: Sequence[int], high: Sequence[int]) -> tuple[Sizes, Sizes]:
        """The box of the outputs that voxels in a box reach; both ends are part of it."""
        every = zip(low, high, (1, *self.stride), (0, *self.padding), (0, *self.reach))
        ends = [
            (a * s - p, b * s - p + r) if self.transposed else (-((r - a - p) // s), (b + p) // s)
            for a, b, s, p, r in every
        ]
        return tuple(a for a, _ in ends), tuple(b for _, b in ends)

    def spatial_shape(self, shape: Sizes | None) -> Sizes | None:
        """The size of the outputs, as PyTorch's dense convolutions have it."""
        if shape is None or self.submanifold:
            return shape
        every = zip(shape, self.stride, self.padding, self.reach, self.output_padding)
        sizes = tuple(
            (n - 1) * s - 2 * p + r + o + 1 if self.transposed else (n + 2 * p - r - 1) // s + 1
            for n, s, p, r, o in every
        )
        if min(sizes) < 1:
            raise BindingError(
                f"a grid of {shape} is too small for a kernel of {self.kernel}",
                expected="at least one output in every dimension",
            )
        return sizes


def _places(kernel: Sizes, dilation: Sizes) -> list[Sizes]:
    return list(itertools.product(*(range(0, k * d, d) for k, d in zip(kernel, dilation))))


@functools.lru_cache(maxsize=256)
def _stencil(
    kernel: Sizes,
    dilation: Sizes,
    stride: Sizes,
    padding: Sizes,
    transposed: bool,
    device: torch.device,
) -> hashing.Stencil:
    places = _places(kernel, dilation)
    centre = [d * (k - 1) / 2 for k, d in zip(kernel, dilation)]
    distance = [sum((a - b) ** 2 for a, b in zip(place, centre)) for place in places]
    names = sorted(range(len(places)), key=distance.__getitem__)
    return hashing.Stencil(
        sent(places, torch.int64, device),
        sent(names, torch.int32, device),
        stride,
        padding,
        transposed,
    )


def kernel_map(
    inputs: Voxels, geometry: Geometry, target: Voxels | None = None
) -> tuple[Voxels, SparseFormat]:
    """The voxels that a kernel leads to (or those of ``target``) and the map to them; built once
    for each kernel and kept with ``inputs``.
    """
    if geometry.submanifold:
        target = inputs
        made: SparseFormat | None = inputs.maps.get(geometry.key)
        if made is not None:
            return inputs, made
    elif target is None:
        reached: tuple[Voxels, SparseFormat] | None = inputs.maps.get(geometry.key)
        if reached is not None:
            return reached
    else:
        held = inputs.maps.get((geometry.key, id(target)))
        if held is not None and held[0]() is target:
            return target, held[1]
    if not torch.compiler.is_dynamo_compiling():
        return _built_once(inputs, geometry, target)
    from insum.nn.untraced import built  # which loads the compiler

    found: tuple[Voxels, SparseFormat] = built(_built_once, inputs, geometry, target)
    return found  # made of values, which a graph does not have


def _built_once(
    inputs: Voxels, geometry: Geometry, target: Voxels | None
) -> tuple[Voxels, SparseFormat]:
    """The voxels that a kernel reaches, unless they are given, and the map to them; kept, to voxels
    that are given as long as they are.
    """
    with untracked(inputs.coords):
        outputs = _reached(inputs, geometry) if target is None else target
        made = build_map(inputs, outputs, geometry)
    if is_recorded(inputs.coords.device):
        return outputs, made
    maps = inputs.maps
    if geometry.submanifold:
        keep(maps, geometry.key, made, MOST_MAPS)
    elif target is None:
        keep(maps, geometry.key, (outputs, made), MOST_MAPS)
    else:
        key = geometry.key, id(target)
        gone = functools.partial(_let_go, weakref.ref(inputs), key)
        maps.pop(key, None)
        keep(maps, key, (weakref.ref(target, gone), made), MOST_MAPS)
    return outputs, made


def _let_go(owner: weakref.ref[Voxels], key: object, _: object) -> None:
    """The map to voxels that are gone; by references that keep nothing alive themselves."""
    inputs = owner()
    if inputs is not None:
        inputs.maps.pop(key, None)


def build_map(inputs: Voxels, outputs: Voxels, geometry: Geometry) -> SparseFormat:
    """``Map[z,x,y]`` as a table where enough of it is filled, else as groups of pairs; as a table
    where counting would wait.
    """
    if "table" in inputs.__dict__ or inputs.is_hashed:
        return _table_on_device(inputs, outputs, geometry)
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


def _table_on_device(inputs: Voxels, outputs: Voxels, geometry: Geometry) -> NeighborTable:
    """The table, with what statements over it ask for: it is not known to come back."""
    stencil = geometry.stencil(outputs.coords.device)
    table, words = hashing.find(inputs.table, outputs.coords, stencil)
    shape = (*table.shape, inputs.coords.shape[0])
    entry = memory.made(table)
    entry.given = True
    note = packs.KernelMap(stencil.names, words, mirrored=geometry.mirrored)
    known = facts.IndexFacts(0, shape[2] - 1, False, False, padded=True)
    entry.note({"facts": known, packs.MAP: note})
    back = None if geometry.submanifold else _way_back(inputs, outputs, geometry)
    other = None if back is None else memory.known(back)
    if back is not None and other is not None and packs.MAP in other.things:
        other.things[packs.MAP].inverse = weakref.ref(table)
        note.inverse = weakref.ref(back)
    return NeighborTable._make(table=table, shape=shape, dim=2, values=None)


def _way_back(inputs: Voxels, outputs: Voxels, geometry: Geometry) -> Tensor | None:
    """The table of the map from outputs to inputs by the same offsets, where it was built."""
    to_reached = outputs.maps.get(geometry.back)
    held = outputs.maps.get((geometry.back, id(inputs)))
    found = to_reached[1] if to_reached is not None and to_reached[0] is inputs else None
    if found is None and held is not None and held[0]() is inputs:
        found = held[1]
    return found.table if isinstance(found, NeighborTable) else None


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
    """Every voxel that some input contributes to."""
    hashed = inputs.is_hashed and inputs.count
    return (_reached_at_once if hashed else _reached_in_box)(inputs, geometry).in_batches(inputs)


def _reached_in_box(inputs: Voxels, geometry: Geometry) -> Voxels:
    """Every voxel that some input contributes to, in ascending order."""
    shape = geometry.spatial_shape(inputs.spatial_shape)
    box = inputs.box
    low, high = geometry.bounds(box.low, box.high)
    if shape is not None:
        low, high = (0,) * len(low), (high[0], *(s - 1 for s in shape))
    size = tuple(max(1, b - a + 1) for a, b in zip(low, high))
    check_box(low, size)
    keys = [
        _keys_inside(*geometry.reached(inputs.coords, part), low, size)
        for part in _parts(geometry.steps(inputs.coords.device), inputs.count)
    ]
    return Voxels.of_sorted(_unique(torch.cat(keys)), Box(low, size), shape)


def _reached_at_once(inputs: Voxels, geometry: Geometry) -> Voxels:
    """The same on a GPU, where it waits once, for their number and the box that they lie in."""
    shape, known = geometry.spatial_shape(inputs.spatial_shape), inputs.__dict__.get("box")
    ends = None if known is None else (known.low, known.high)
    found = reaching.ranked(inputs.coords, _steps(geometry, shape, inputs.coords.device), ends)
    count, *corners = found.numbers()
    axes = geometry.ndim + 1
    box = Box(tuple(corners[:axes]), tuple(corners[axes:]))
    check_box(box.low, box.size)
    made = Voxels(found.coords(count), shape)
    made.__dict__["box"] = box
    return made


@functools.lru_cache(maxsize=256)
def _steps(geometry: Geometry, shape: Sizes | None, device: torch.device) -> reaching.Steps:
    return reaching.Steps(
        geometry.steps(device)[:, 1:].contiguous(),
        geometry.stride,
        geometry.padding,
        geometry.reach,
        geometry.dilation,
        geometry.transposed,
        shape,
    )


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


def _with_batch(sizes: Sizes, like: Tensor, batch: int = 0) -> Tensor:
    return _sent((batch, *sizes), like.device)


def _sent(values: tuple[object, ...], device: torch.device) -> Tensor:
    """Numbers on a device, once; under a mode of torch's they may be fakes, which are not kept."""
    return (_sent_numbers.__wrapped__ if is_intercepted() else _sent_numbers)(values, device)


@functools.lru_cache(maxsize=256)
def _sent_numbers(values: tuple[object, ...], device: torch.device) -> Tensor:
    return sent(values, torch.int64, device)
