"""Checks of a format's arrays. Every message names the array, the position, the value and the
limit.

What shapes and dtypes tell is checked on the host. What the contents tell is computed on the device
as one small vector of verdicts, fetched once; only when something is wrong is the place looked up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from insum.accepted import LIMIT, TENSOR, VALUES, is_size, require, shown
from insum.errors import (
    DeviceError,
    DtypeError,
    FormatError,
    IndexRangeError,
    InsumError,
    UnsupportedError,
)
from insum.formats import entries as E
from insum.formats.layout import has_padding, implicit_axes

if TYPE_CHECKING:
    from insum.formats.base import SparseFormat

_INDEX_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Verdict:
    """A question answered on the device: where ``bad`` is true, ``explain`` finds the place and
    says it.
    """

    bad: Tensor
    explain: Callable[[], InsumError]


def check(x: SparseFormat) -> bool:
    """Raise where the arrays contradict each other; returns whether there may be padding.

    Contents are not looked at where there are none to see: on the meta device and while
    torch.compile traces.
    """
    check_arrays(x)
    if torch.compiler.is_compiling() or x.device.type == "meta":
        return has_padding(x.layout)
    verdicts = _verdicts(x)
    mask = x.mask()
    padded = torch.zeros((), dtype=torch.bool, device=x.device) if mask is None else ~mask.all()
    answers = torch.stack([padded, *(v.bad for v in verdicts)]).tolist()
    for verdict, bad in zip(verdicts, answers[1:]):
        if bad:
            raise verdict.explain()
    return bool(answers[0])


# --- shapes, dtypes, devices ---


def check_dense(x: object) -> None:
    if not isinstance(x, Tensor):
        raise FormatError(
            f"from_dense takes a tensor, not {type(x).__name__}",
            remedy="torch.as_tensor(x), from_scipy(x) or from_torch(x)",
        )
    if x.layout != torch.strided:
        raise FormatError(f"from_dense got a tensor of layout {x.layout}", remedy="from_torch(x)")
    check_shape(tuple(x.shape))


def check_shape(shape: object) -> None:
    if not isinstance(shape, tuple) or not all(
        isinstance(s, int) and not isinstance(s, bool) and s >= 0 for s in shape
    ):
        raise FormatError(f"shape is {shape!r}", expected="a tuple of integers, none below 0")
    if not shape:
        raise FormatError(
            "a sparse tensor has at least one dimension; this one has none",
            remedy="keep scalars dense",
        )


def check_kinds(x: SparseFormat) -> None:
    """Every array is a dense tensor, as far as can be told before their number is known."""
    for name in x._arrays:
        value = getattr(x, name)
        if name not in ("values", "table") and not isinstance(value, tuple):
            raise FormatError(f"{name} is {shown(value)}", expected="a tuple of index arrays")
        for held in _each(value):
            if isinstance(held, Tensor):
                require(f"an array of {name}", held, TENSOR, FormatError)


def check_values(x: SparseFormat, values: Tensor) -> None:
    want = (*x.positions, *(x.block_shape_or_none or ()))
    if tuple(values.shape) != want:
        raise FormatError(
            f"values has shape {tuple(values.shape)}",
            expected=f"{want}, one value for every position"
            f"{' and block element' if x.block_shape_or_none else ''}",
        )
    require("values", values, VALUES, FormatError)
    where = next((a.device for _, _, a in x.index_arrays()), values.device)
    if values.device != where:
        raise DeviceError(
            f"values are on {values.device} but the index arrays on {where}",
            expected="all arrays on one device",
            remedy=f"values.to({str(where)!r})",
        )


def check_arrays(x: SparseFormat) -> None:
    tensors = [t for name in x._arrays[1:] for t in _each(getattr(x, name))]
    if not all(isinstance(t, Tensor) for t in tensors) or not (
        x.values is None or isinstance(x.values, Tensor)
    ):
        bad = next(t for t in (*tensors, x.values) if not isinstance(t, Tensor))
        # torch.compile, about to give up on an operator between a tensor and a format
        if type(bad).__name__ == "Proxy":
            raise UnsupportedError(
                "torch.compile does not trace operators between tensors and other objects",
                remedy="A.matmul(B), or insum.einsum",
            )
        raise FormatError(
            f"an array of this {type(x).__name__} is a {type(bad).__name__}",
            expected="torch tensors",
            remedy="torch.as_tensor(array)",
        )
    _check_counts(x)
    for dim, coordinate, array in x.index_arrays():
        if array.dim() != len(coordinate.axes):
            raise FormatError(
                f"{_name(coordinate)} has {array.dim()} dimension(s)",
                expected=f"{len(coordinate.axes)}, as the index array of dimension {dim}",
            )
    for _, coordinate, array in x.index_arrays():
        name = _name(coordinate)
        if array.dtype not in _INDEX_DTYPES:
            raise DtypeError(
                f"{name} holds {_short(array.dtype)}",
                expected="int32 or int64",
                remedy=f"{name}.to(torch.int32)",
            )
        _check_one_shape(x, name, coordinate, array)
        if array.device != x.device:
            raise DeviceError(
                f"{name} is on {array.device}, other arrays on {x.device}",
                expected="all arrays on one device",
                remedy=f"{name}.to({str(x.device)!r})",
            )
    for dim, axis in implicit_axes(x.layout).items():
        if x.positions[axis] != x.shape[dim]:
            raise FormatError(
                f"the arrays have {x.positions[axis]} rows along axis {axis}, but dimension "
                f"{dim} has size {x.shape[dim]}",
                expected="one row for every coordinate of that dimension",
            )
    if x.values is not None:
        check_values(x, x.values)


def _check_counts(x: SparseFormat) -> None:
    for field in x._arrays[1:]:
        held = getattr(x, field)
        want = sum(c.field == field for c in x.layout.coordinates)
        if isinstance(held, tuple) and len(held) != want:
            raise FormatError(
                f"{field} has {len(held)} array(s), but shape {x.shape} needs {want}",
                expected="one index array for every dimension that it describes",
            )


def _check_one_shape(x: SparseFormat, name: str, coordinate: object, array: Tensor) -> None:
    axes = coordinate.axes  # type: ignore[attr-defined]
    want = tuple(x.positions[a] for a in axes)
    if tuple(array.shape) != want:
        raise FormatError(
            f"{name} has shape {tuple(array.shape)}, but the other arrays have {want}",
            expected="arrays of one shape",
        )


# --- contents ---


def _verdicts(x: SparseFormat) -> list[Verdict]:
    verdicts = [
        v
        for dim, c, array in x.index_arrays()
        for v in range_verdicts(_name(c), array, x.grid[dim], -1 if c.padded else 0, _unit(x, dim))
    ]
    verdicts += _agreement(x)
    verdicts += _order(x)
    verdicts += _uniqueness(x)
    return verdicts + _edges(x)


def range_verdicts(name: str, array: Tensor, size: int, low: int, what: str) -> list[Verdict]:
    """Whether all values lie in ``low .. size-1``: one pass, and a second to find the place only
    where they do not.

    Compared as int64: beside an int8 tensor torch takes the limit 200 for -56.
    """
    if not array.numel():
        return []

    def explain() -> InsumError:
        wide = array.long()
        place = ((wide < low) | (wide >= size)).nonzero()[0].tolist()
        value = int(array[tuple(place)])
        expected = f"values from {max(low, 0)} to {size - 1}" + (
            ", or -1 for padding" if low < 0 else ""
        )
        return IndexRangeError(
            f"{name}[{', '.join(map(str, place))}] is {value}, outside {what}", expected=expected
        )

    least, most = (bound.long() for bound in torch.aminmax(array))
    return [Verdict((least < low) | (most >= size), explain)]


def _unit(x: SparseFormat, dim: int) -> str:
    if x.block_shape_or_none:
        return (
            f"dimension {dim}, which has {x.grid[dim]} blocks of "
            f"{x.block_shape_or_none[dim]} (size {x.shape[dim]})"
        )
    return f"dimension {dim} of size {x.shape[dim]}"


def _agreement(x: SparseFormat) -> list[Verdict]:
    """Arrays of the same slots mark the same padding."""
    padded = [(_name(c), array) for _, c, array in x.index_arrays() if c.padded]
    verdicts = []
    for name, array in padded[1:]:
        bad = (array < 0) != (padded[0][1] < 0)

        def explain(bad: Tensor = bad, name: str = name) -> InsumError:
            place = ", ".join(map(str, bad.nonzero()[0].tolist()))
            return FormatError(
                f"{padded[0][0]} and {name} disagree about padding at [{place}]",
                expected="-1 in both or in neither",
            )

        verdicts.append(Verdict(bad.any(), explain))
    return verdicts


def _order(x: SparseFormat) -> list[Verdict]:
    """The sorted arrays are sorted: strictly for lists of entries, weakly for groups."""
    dims, strict = x.sorted_dims, len(x.layout.axes) == 1
    arrays = {dim: array for dim, _, array in x.index_arrays()}
    if not dims or x.positions[0] < 2:
        return []
    before, after = [arrays[d][:-1] for d in dims], [arrays[d][1:] for d in dims]
    fine = torch.full_like(before[0], not strict, dtype=torch.bool)
    for a, b in zip(reversed(before), reversed(after)):
        fine = (a < b) | (a == b) & fine

    def explain() -> InsumError:
        place = int((~fine).nonzero()[0])
        one, two = (tuple(int(a[place]) for a in side) for side in (before, after))
        what, remedy = (
            ("block" if x.block_shape_or_none else "entry") if strict else "group",
            f"{type(x).__name__}.from_entries(...) sorts and sums duplicates",
        )
        if one == two:
            return FormatError(
                f"{what} {place} and {what} {place + 1} are both at {one}",
                expected="every coordinate once",
                remedy=remedy,
            )
        return FormatError(
            f"{what} {place + 1} at {two} comes after {what} {place} at {one}",
            expected=f"sorted by dimension {', then '.join(map(str, dims))}",
            remedy=remedy,
        )

    return [Verdict((~fine).any(), explain)]


def _uniqueness(x: SparseFormat) -> list[Verdict]:
    """No coordinate twice, where order alone does not say so."""
    total = math.prod(x.grid)
    if (
        len(x.layout.axes) == 1
        or len(implicit_axes(x.layout)) == x.ndim - 1
        and x.layout.axes[-1] != "q"
        or total > 2**63 - 1
    ):
        return []
    mask, coords = x.mask(), [c.long().clamp(min=0) for c in x.coordinates()]
    assert mask is not None
    key = (
        torch.where(mask, E.linear(coords, x.grid, tuple(range(x.ndim))), -1)
        .reshape(-1)
        .sort()
        .values
    )
    twice = (key[1:] == key[:-1]) & (key[1:] >= 0)

    def explain() -> InsumError:
        place = E.unravel(key[1:][twice][:1], x.grid, tuple(range(x.ndim)))
        what = "block" if x.block_shape_or_none else "entry"
        return FormatError(
            f"there is more than one {what} at {tuple(int(c) for c in place)}",
            expected="every coordinate once",
            remedy=f"{type(x).__name__}.from_entries(...) sums duplicates",
        )

    return [Verdict(twice.any(), explain)]


def _edges(x: SparseFormat) -> list[Verdict]:
    """Blocks that reach over the edge hold zeros there."""
    block = x.block_shape_or_none
    if block is None or x.values is None or all(s % b == 0 for s, b in zip(x.shape, block)):
        return []
    bad = (x.values.detach() != 0) & ~E.inside(x.coordinates(), block, x.shape)
    lead = len(x.positions)

    def explain() -> InsumError:
        place = bad.nonzero()[0].tolist()
        where = ", ".join(map(str, place))
        value = x.values[tuple(place)].item() if x.values is not None else 0
        return FormatError(
            f"values[{where}] is {value}, outside shape {x.shape}: block position "
            f"{tuple(place[lead:])} lies beyond the edge",
            expected="zeros where a block reaches over the edge",
        )

    return [Verdict(bad.any(), explain)]


# --- options ---


def dimension(dim: object, rank: int, name: str = "dim") -> int:
    """A dimension counted from the front, negative ones from the back."""
    if isinstance(dim, bool) or not isinstance(dim, int) or not -rank <= dim < rank:
        raise FormatError(f"{name} is {dim!r}", expected=f"a dimension from {-rank} to {rank - 1}")
    return dim % rank


def group_dims(dims: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """The grouped dimensions; by default the first, and none for a vector. At least one dimension
    stays ungrouped.
    """
    if dims is None:
        return (0,) if rank > 1 else ()
    listed = dims if isinstance(dims, tuple | list) else (dims,)
    chosen = tuple(dimension(d, rank, "group_dims") for d in listed)
    if len(set(chosen)) < len(chosen):
        raise FormatError(
            f"group_dims {tuple(dims) if not isinstance(dims, int) else dims} names a "
            "dimension twice"
        )
    if len(chosen) >= rank:
        raise FormatError(
            f"group_dims {chosen} leaves none of {rank} dimension(s) ungrouped",
            expected="at least one dimension whose coordinate is stored per slot",
            remedy="COO, or fewer group_dims",
        )
    return chosen


def block_shape(shape: int | Sequence[int], rank: int) -> tuple[int, ...]:
    """One block size per dimension."""
    block = (
        (shape,) * rank
        if isinstance(shape, int) and not isinstance(shape, bool)
        else tuple(shape)
        if isinstance(shape, tuple | list | torch.Size)
        else ()
    )
    if len(block) != rank:
        raise FormatError(
            f"block_shape is {shape!r}, but the tensor has {rank} dimension(s)",
            expected="one block size per dimension, or one integer for all",
        )
    if not all(is_size(b, 1) for b in block) or math.prod(block) >= LIMIT:
        raise FormatError(f"block_shape is {shape!r}", expected="block sizes of at least 1")
    return block


def permutation(dims: Sequence[int], rank: int) -> tuple[int, ...]:
    order = tuple(dimension(d, rank) for d in dims)
    if sorted(order) != list(range(rank)):
        raise FormatError(
            f"permute got {tuple(dims)}", expected=f"every dimension of 0 to {rank - 1} once"
        )
    return order


def _each(value: object) -> Sequence[object]:
    return value if isinstance(value, tuple) else (value,)


def _name(coordinate: object) -> str:
    field, number = coordinate.field, coordinate.number  # type: ignore[attr-defined]
    return str(field) if field == "table" else f"{field}[{number}]"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
