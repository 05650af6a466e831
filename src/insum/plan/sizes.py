"""What about sizes and strides decides a plan: classes, so that programs are few.

Extents that index tensors run over (nonzeros, edges, voxels) are known by their power of two alone.
Extents of other variables (channels, columns, sides of blocks) also by what they are multiples of,
which is what tiles and vector loads ask. Strides are 0, 1, or passed in units that keep loads of
16, 8 or 4 bytes provable. A plan is made for one class; its kernels are right for every size of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

#: Names, among those of tensors, of what is written: the output, and the workspace for pieces of
#: rows, and copies of factors. No statement can spell them.
OUT, WORK, FITTED = "<out>", "<work>", "<fitted>"
ALIGNED, ALSO_ALIGNED = "<aligned>", "<also_aligned>"
#: What a new output is accumulated from, which is read where the output is stored.
BASE = "<base>"
#: Stands for the strides of a new contiguous output, beside those of one that was passed.
NEW = "<new>"

#: Extents are told apart by powers of two that divide them up to this one, the side of the largest
#: tile of a first guess: where it divides, nothing is masked.
MOST_MULTIPLE = 256
#: Up to so many entries an extent is taken for a side of groups, which stays, although index
#: tensors run over it.
FEW = 128
#: Bytes of the widest load, of the next narrower one, and of all that are told apart.
WIDE_LOAD, NARROW_LOAD = 16, 8
LOADS = (WIDE_LOAD, NARROW_LOAD, 4)

#: Of each dimension how its stride is passed: ``-u`` in units of ``u`` elements. 0, 1 and other
#: numbers that the code knows are not passed at all.
Units: TypeAlias = tuple[int, ...]
#: Of each dimension of a tensor the variables that its index is made of; None where an index tensor
#: tells the place, so that no variable is as long as it.
Walked: TypeAlias = tuple[tuple[str, ...] | None, ...]


def beside(number: int) -> str:
    """The name, among those of what is written, of one more result; from 1 on."""
    return f"<out{number}>"


@dataclass(frozen=True, slots=True)
class Extent:
    """A class of extents: a typical one, and what all of them are multiples of.

    Every extent of the class is greater than half of ``most`` and at most that, unless it is
    ``open``: the extent is a symbol, and what is typical is an example.
    """

    typical: int
    multiple: int = 1
    open: bool = False

    @property
    def most(self) -> int:
        return power_of_two(self.typical) if self.typical else 0

    @property
    def least(self) -> int:
        """What no extent of the class falls below.

        >>> Extent(96).least, Extent(128, 128).least, Extent(104, 8).least
        (65, 128, 72)
        """
        return self.typical if self.exact else self.most // 2 + self.multiple

    @property
    def exact(self) -> bool:
        """Whether there is one extent in the class."""
        return not self.open and self.typical in (self.multiple, 0)

    def __str__(self) -> str:
        if self.typical in (self.multiple, 0):
            return str(self.typical)
        return f"<={self.most}" + (f" by {self.multiple}" if self.multiple > 1 else "")


def power_of_two(at_least: int) -> int:
    """The smallest power of two that is no smaller than the argument.

    >>> [power_of_two(n) for n in (0, 1, 3, 16, 17)]
    [1, 1, 4, 16, 32]
    """
    return 1 if at_least <= 1 else 1 << (at_least - 1).bit_length()


def class_of(extent: int, *, runs: bool) -> Extent:
    """The class of an extent; ``runs``: index tensors run over the variable, so that every call
    may have another.

    >>> print(class_of(200, runs=False), class_of(256, runs=False), class_of(250_000, runs=True))
    <=256 by 8 256 <=262144
    """
    if extent <= 2:
        return Extent(extent, max(1, extent))
    most = power_of_two(extent)
    if runs and extent > FEW:
        return Extent(most * 3 // 4)
    if extent == most:
        return Extent(extent, extent)
    multiple = min(extent & -extent, MOST_MULTIPLE)
    return Extent(_odd_multiple(most * 3 // 4, multiple), multiple)


def _odd_multiple(near: int, multiple: int) -> int:
    """An odd multiple near a number: what is typical must not divide better than the rest."""
    count = near // multiple
    return multiple * (count if count % 2 else count + 1)


def typical(size: int) -> int:
    """A size that stands for all of its power of two."""
    return size if size <= 2 else power_of_two(size) * 3 // 4


@dataclass(frozen=True, slots=True)
class Strides:
    """How a tensor lies in memory: its strides as they are passed, and of each dimension but the
    last whether walking it goes on where walking the next one ends, so that both can be one.
    """

    units: Units
    joins: tuple[bool, ...]

    @property
    def is_contiguous(self) -> bool:
        return not self.units or self.units[-1] == 1 and all(self.joins)

    def joined(self, at: int, count: int) -> Strides:
        """With ``count`` dimensions from ``at`` on walked as one."""
        units = (*self.units[:at], *self.units[at + count - 1 :])
        return Strides(units, (*self.joins[:at], *self.joins[at + count - 1 :]))

    def can_join(self, at: int, count: int) -> bool:
        return all(self.joins[at : at + count - 1])


def unit_of(stride: int, itemsize: int, *, vector: bool) -> int:
    """How a stride is passed; ``vector``: values are loaded several at a time.

    >>> [unit_of(s, 2, vector=True) for s in (0, 1, 200, 100, 10, 7)]
    [0, 1, -8, -4, -2, -1]
    """
    if stride in (0, 1):
        return stride
    if vector:
        for width in LOADS:
            if width > itemsize and stride * itemsize % width == 0:
                return -(width // itemsize)
    return -1


def strides_of(
    shape: Sequence[int], strides: Sequence[int], itemsize: int, *, vector: bool
) -> Strides:
    """The class of a tensor's strides."""
    units = tuple(unit_of(s, itemsize, vector=vector) for s in strides)
    joins = tuple(
        math.prod(shape[: d + 1]) <= 1 or strides[d] == strides[d + 1] * shape[d + 1]
        for d in range(len(shape) - 1)
    )
    return Strides(units, joins)


def spread_strides(
    shape: Sequence[int], strides: Sequence[int], over: Sequence[int]
) -> tuple[int, ...]:
    """The strides by which a tensor is read that is broadcast ``over`` another shape.

    >>> spread_strides((4,), (1,), (3, 4)), spread_strides((3, 1), (1, 1), (3, 4))
    ((0, 1), (1, 0))
    """
    own = [0 if size == 1 else stride for size, stride in zip(shape, strides)]
    return (*[0] * (len(over) - len(own)), *own)


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """How a tensor lies in memory.

    Attributes:
        along: the dimension whose neighbours lie together; -1 where none has such.
        aligned: whether all else keeps wide loads aligned.
        fills: of each dimension, whether its size is a multiple of the widest load.
    """

    along: int
    aligned: bool
    fills: tuple[bool, ...]


def layout_of(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> MemoryLayout:
    """
    >>> layout_of((32, 256, 2050), (524800, 2050, 1), 2)
    MemoryLayout(along=2, aligned=False, fills=(True, True, False))
    """
    steps = [(step, dim) for dim, step in enumerate(strides) if shape[dim] > 1]
    along = next((dim for step, dim in steps if step == 1), -1)
    aligned = all(step * itemsize % NARROW_LOAD == 0 for step, dim in steps if dim != along)
    return MemoryLayout(along, aligned, tuple(size * itemsize % WIDE_LOAD == 0 for size in shape))


def contiguous(rank: int) -> Strides:
    """Of arrays that are derived from index tensors."""
    return Strides((*[-1] * (rank - 1), 1)[-rank:] if rank else (), (True,) * max(0, rank - 1))


def passed(rank: int) -> Strides:
    """Of any tensor: all strides are passed."""
    return Strides((-1,) * rank, (False,) * max(0, rank - 1))


@dataclass(frozen=True, eq=False)
class SizeClass:
    """Everything about sizes and strides that a plan may depend on, for one kind of call."""

    extents: Mapping[str, Extent]
    shape: tuple[int, ...]  # typical sizes of the output
    numel: Mapping[str, int]  # of tensors, typical
    strides: Mapping[str, Strides]
    wide: bool  # offsets do not fit into 32 bits
    runs: frozenset[str] = frozenset()  # variables that index tensors run over
    walked: Mapping[str, Walked] = field(default_factory=dict)  # tensors and the output, by what
    general: bool = False  # it stands for all sizes

    def typical(self) -> dict[str, int]:
        """An extent for every variable."""
        return {name: extent.typical for name, extent in self.extents.items()}

    def multiple(self, names: Sequence[str]) -> int:
        """What the product of these extents is a multiple of."""
        found = 1
        for name in names:
            found *= self.extents[name].multiple if name in self.extents else 1
        return found

    @property
    def key(self) -> tuple[object, ...]:
        """What equal classes of one kind of call have in common, and others have not."""
        return (
            *self.extents.values(),
            self.shape,
            *self.numel.values(),
            *self.strides.values(),
            self.wide,
        )


#: What is typical of the extents of a class for all sizes: more than any tile holds whole
#: (`roles.FLATTEN_UP_TO`), and of those that index tensors run over.
WIDTH, LENGTH = 96, 3072


#: What is typical of lengths where classes are few: those that leave most of a device without work,
#: those that fill it once or twice, those that fill it many times, and all others.
LENGTHS = (1 << 10, 1 << 14, 1 << 17, 1 << 20)
#: Where there must be fewer still: what takes little time has no kernels of its own.
FEWER_LENGTHS = LENGTHS[1:]
#: Of others that are no widths of a network, which has few: up to which they are narrower than a
#: large tile, and what tells them apart: whether wide loads and small tiles divide them.
NARROW, EVEN = 64, 16
#: Numbers of a tensor from which on those that share a class take 64-bit offsets: what is copied
#: into longer rows could pass 32 bits, and the class does not tell.
MANY = 1 << 27


#: What calls differ by: a variable, or a dimension of the output.
Differing: TypeAlias = str | int
#: What is typical of sizes like one.
Alike: TypeAlias = Callable[[int], int]


def coarse(
    sizes: SizeClass,
    moving: frozenset[Differing] = frozenset(),
    lengths: tuple[int, ...] = LENGTHS,
) -> SizeClass:
    """The class of all calls of such widths: lengths, of which every batch has another, are told
    apart by how many tiles they make, and nothing bounds them. These are the extents that index
    tensors run over, and whatever was found to be ``moving``; ``lengths``: up to which they are
    taken for alike.
    """
    alike = functools.partial(_length, lengths)
    long = {
        v
        for v, extent in sizes.extents.items()
        if v in moving or v in sizes.runs and extent.typical > FEW
    }
    extents = {
        v: _any_length(e, alike, even=v not in sizes.runs) if v in long else e
        for v, e in sizes.extents.items()
    }
    return replace(
        sizes,
        extents=extents,
        shape=tuple(
            alike(n) if dim in moving and walked is None else _side(n, walked, extents, long, alike)
            for dim, (n, walked) in enumerate(zip(sizes.shape, sizes.walked[OUT], strict=True))
        ),
        numel={
            name: _numel(n, sizes.walked[name], sizes.extents, extents, long, alike)
            for name, n in sizes.numel.items()
        },
        wide=sizes.wide or max(sizes.numel.values(), default=0) >= MANY,
    )


def _any_length(extent: Extent, alike: Alike, *, even: bool) -> Extent:
    """Any extent that makes about as many tiles; ``even``: it may be one that tiles divide."""
    if not even:
        return Extent(alike(extent.typical), open=True)
    multiple = EVEN if extent.multiple % EVEN == 0 else 1
    near = NARROW * 3 // 4 if extent.most <= NARROW else alike(extent.typical)
    return Extent(_odd_multiple(near, multiple), multiple, open=True)


def _side(
    size: int,
    walked: tuple[str, ...] | None,
    extents: Mapping[str, Extent],
    long: set[str],
    alike: Alike,
) -> int:
    """What is typical of a dimension of the output."""
    if walked is not None and not long & {*walked}:
        return size
    if walked is not None and len(walked) == 1:
        return extents[walked[0]].typical
    return size if size <= FEW else alike(size)


def _numel(
    numel: int,
    walked: Walked,
    before: Mapping[str, Extent],
    extents: Mapping[str, Extent],
    long: set[str],
    alike: Alike,
) -> int:
    """What is typical of the numbers of a tensor: its rows, where index tensors tell them, are
    those that its other dimensions leave. A few may be matrices of a layer.
    """
    if not any(one is None or long & {*one} for one in walked):
        return numel
    plain = [one[0] for one in walked if one is not None and len(one) == 1]
    rows = max(1, numel // max(1, math.prod(before[v].typical for v in plain)))
    rest = rows if rows <= FEW else alike(rows)
    return math.prod(extents[v].typical for v in plain) * rest


def _length(lengths: tuple[int, ...], size: int) -> int:
    """What is typical of lengths like this one."""
    return next((most * 3 // 4 for most in lengths if size <= most), lengths[-1] * 3 // 4)


def general(sizes: SizeClass) -> SizeClass:
    """The class of all sizes: nothing divides anything, and no tile holds all of a variable. Of
    strides it says whether all tensors are contiguous.
    """
    plain = all(strides.is_contiguous for strides in sizes.strides.values())
    ranks = {name: len(strides.units) for name, strides in sizes.strides.items()}
    return SizeClass(
        {v: Extent(LENGTH if v in sizes.runs else WIDTH, open=True) for v in sizes.extents},
        (LENGTH,) * len(sizes.shape),
        dict.fromkeys(sizes.numel, LENGTH),
        {n: contiguous(rank) if plain else passed(rank) for n, rank in ranks.items()},
        sizes.wide,
        sizes.runs,
        general=True,
    )
