"""Arithmetic of sparse tensors, sums and slices: what a tensor does, where the result is as sparse
as its operands, or dense because one of them is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from insum.accepted import (
    COMPUTABLE,
    NARROW_FLOATS,
    TENSOR,
    is_dense,
    is_fake,
    is_number,
    require,
    shown,
)
from insum.errors import (
    BindingError,
    DeviceError,
    DtypeError,
    FormatError,
    IndexRangeError,
    UnsupportedError,
)
from insum.formats import entries as E
from insum.formats import validate as checks
from insum.lang.types import widened

if TYPE_CHECKING:
    from insum.formats.base import SparseFormat
    from insum.formats.run import FormatOrValue


def is_operand(x: object) -> bool:
    """Whether a sparse tensor can meet it in an operation, if it is none itself."""
    return isinstance(x, Tensor) or _is_scalar(x)


def _is_scalar(x: Any) -> bool:
    return is_number(x) or isinstance(x, complex) or is_dense(x) and x.dim() == 0


# --- one value for each entry ---


def mapped_values(x: SparseFormat, function: Callable[[Tensor], Tensor]) -> SparseFormat:
    """The same pattern with a function of the values, which leaves zero as it is."""
    values = x.ones() if x.values is None else x.values
    return x.with_values(_without_edges(x, function(values)))


def _without_edges(x: SparseFormat, values: Tensor) -> Tensor:
    """Zeros where blocks reach over the edge, also where 0 was divided by 0 there."""
    inside = _inside(x)
    return values if inside is None else torch.where(inside, values, 0)


def _inside(x: SparseFormat) -> Tensor | None:
    """Which elements of blocks lie inside the shape; None where all do."""
    block = x.block_shape_or_none
    if block is None or all(size % b == 0 for size, b in zip(x.shape, block)):
        return None
    return E.inside(x.coordinates(), block, x.shape)


def negated(x: SparseFormat) -> SparseFormat:
    _refuse_bool("is negated", x)
    refuse_narrow(x)
    return mapped_values(x, torch.neg)


def absolute(x: SparseFormat) -> SparseFormat:
    _refuse_bool("has no absolute values", x)
    refuse_narrow(x)
    return mapped_values(x, torch.abs)


def _refuse_bool(what: str, *operands: SparseFormat | Tensor) -> None:
    if any(one.dtype is torch.bool for one in operands):
        raise DtypeError(
            f"a tensor of truth values {what}", expected="numbers", remedy="A.to(torch.float32)"
        )


def refuse_narrow(*operands: Any) -> None:
    """Floats of 8 bits are read by products with others; torch computes nothing in them."""
    for one in operands:
        if getattr(one, "dtype", None) in NARROW_FLOATS:
            name = str(one.dtype).removeprefix("torch.")
            raise DtypeError(
                f"arithmetic of {name}, in which nothing is computed",
                expected="a product with wider numbers, as A @ x or insum.einsum",
                remedy="A.to(torch.bfloat16)",
            )


def scaled(x: SparseFormat, other: Any, function: Callable[[Any, Any], Any]) -> SparseFormat:
    """Times or divided by a number or a dense tensor that broadcasts, or times a format."""
    _check_other(x, other)
    if _is_scalar(other):
        return mapped_values(x, lambda values: function(values, other))
    if isinstance(other, Tensor):
        return _product(x, other) if function is operator.mul else _quotient(x, other)
    if function is operator.truediv:
        raise UnsupportedError(
            "a sparse tensor divided by a sparse one: outside of their entries that is 0 / 0",
            remedy="A.with_values(A.values / B.values), where both have one pattern",
        )
    if not same_pattern(x, other):
        return _where_both(x, other)
    if x.values is None or other.values is None:
        return x if other.values is None else x.with_values(other.values)
    return x.with_values(x.values * other.values)


def _where_both(x: SparseFormat, other: SparseFormat) -> SparseFormat:
    """The product over the entries that both have, in the format of the first."""
    options, a, b = x._same_options(), _elements(x), _elements(other)
    assert a.values is not None and b.values is not None
    coords = tuple(torch.cat([p.long(), q.long()]) for p, q in zip(a.coords, b.coords))
    sorting = E.argsort(coords, x.shape, tuple(range(x.ndim)))
    first, second = sorting[:-1], sorting[1:]
    met = torch.ones_like(first, dtype=torch.bool)
    for c in coords:  # each has an entry once: who meets is one of either
        met &= c[first] == c[second]
    mine = torch.minimum(first[met], second[met])
    theirs = torch.maximum(first[met], second[met]) - a.values.shape[0]
    values = a.values[mine] * b.values[theirs]
    shared = [c[mine] for c in coords]
    order = type(x)._order(x.ndim, **options)
    return type(x)._build(E.collect(shared, values, x.shape, order=order), **options)


def _elements(x: SparseFormat) -> E.Entries:
    """Every stored element with its value, 1 where there are none."""
    held = x.with_values(x.ones()) if x.values is None else x
    return E.to_elements(held.entries(), stored=True)


def _product(x: SparseFormat, other: Tensor) -> SparseFormat:
    """``S[a,b] = A[a,b] * B[a,b]``, the dense operand read where there are entries."""
    missing = x.ndim - other.dim()
    sizes = (*(1,) * missing, *other.shape)
    if missing < 0 or any(size not in (1, whole) for size, whole in zip(sizes, x.shape)):
        raise BindingError(
            f"a sparse tensor of shape {x.shape} meets a tensor of shape {tuple(other.shape)}",
            expected="a shape that broadcasts to that of the sparse tensor",
        )
    # also by a tensor of one element, which is a number below; what is none is refused there
    if x.values is not None and other.dtype in COMPUTABLE:
        x = x.with_values(x.values.to(torch.promote_types(x.values.dtype, other.dtype)))
    full = [d for d, size in enumerate(sizes) if size == x.shape[d] and d >= missing]
    letters = _letters(x)
    own, theirs = ",".join(letters), ",".join(letters[d] for d in full)
    flat = other.reshape([sizes[d] for d in full])
    factor = f"B[{theirs}]" if theirs else "B"
    result: SparseFormat = _einsum(f"S[{own}] = A[{own}] * {factor}", A=x, B=flat)
    return result


def _quotient(x: SparseFormat, other: Tensor) -> SparseFormat:
    """Divided by what the dense operand has where there are entries, and by 1 elsewhere."""
    divisor = _product(x.pattern(), other).values
    values, mask, inside = x.ones() if x.values is None else x.values, x.mask(), _inside(x)
    assert divisor is not None
    if mask is not None:
        inner = [1] * (divisor.dim() - mask.dim())
        divisor = torch.where(mask.reshape(*mask.shape, *inner), divisor, 1)
    divisor = divisor if inside is None else torch.where(inside, divisor, 1)
    return x.with_values(values / divisor)


def _letters(x: SparseFormat) -> list[str]:
    return [f"i{d}" for d in range(x.ndim)]


def _einsum(statement: str, **given: FormatOrValue) -> Any:
    from insum.formats.run import run_formats  # which knows the formats

    return run_formats(statement, given)


# --- sums of two ---


def added(x: SparseFormat, other: Any, sign: int = 1) -> SparseFormat | Tensor:
    """The sum with a format (over all entries of both), or with a dense tensor, which is dense."""
    _check_other(x, other)
    if isinstance(other, Tensor) and other.dim():
        if sign > 0:
            return x.to_dense() + other
        _refuse_bool("is subtracted", x, other)
        return x.to_dense() - other
    if _is_scalar(other):
        if not isinstance(other, Tensor) and other == 0:  # the start of Python's sum
            return x
        raise UnsupportedError(
            "a number is added to a sparse tensor: every element would be one of its entries",
            remedy="A.to_dense() + number, or A.with_values(A.values + number)",
        )
    mine, theirs = (one.ones() if one.values is None else one.values for one in (x, other))
    if sign < 0:
        _refuse_bool("is subtracted", mine, theirs)
    if same_pattern(x, other):
        return x.with_values(mine + theirs if sign > 0 else mine - theirs)
    a, b = _elements(x), _elements(other)
    assert a.values is not None and b.values is not None
    dtype = torch.promote_types(a.values.dtype, b.values.dtype)
    coords = [torch.cat([p.long(), q.long()]) for p, q in zip(a.coords, b.coords)]
    mine, theirs = a.values.to(dtype), b.values.to(dtype)  # before the sign: bytes have none
    values = torch.cat([mine, theirs if sign > 0 else -theirs])
    options = x._same_options()
    order = type(x)._order(x.ndim, **options)
    return type(x)._build(E.collect(coords, values, x.shape, order=order), **options)


def taken_from(x: SparseFormat, other: Any) -> SparseFormat | Tensor:
    """``other - x``."""
    if not isinstance(other, Tensor) or not other.dim():
        return added(negated(x), other)
    _check_other(x, other)
    _refuse_bool("is subtracted", x, other)
    return other - x.to_dense()


def _check_other(x: SparseFormat, other: Any) -> None:
    """What can be told before anything is computed: numbers that fit, one device, one shape."""
    refuse_narrow(x, other)
    if isinstance(other, int) and not -(2**63) <= other < 2**63:
        raise FormatError(f"{other} does not fit into 64 bits", remedy=f"float({other})")
    if isinstance(other, complex) and x.dtype is torch.float16:
        raise DtypeError(
            f"a sparse tensor of float16 meets the complex number {other}",
            expected="a real number",
            remedy="A.to(torch.complex64)",
        )
    is_sparse = not isinstance(other, Tensor) and not _is_scalar(other)
    if isinstance(other, Tensor):
        require("the other operand", other, TENSOR)
        _check_broadcast(x, other)
    elif is_sparse and x.shape != other.shape:
        raise BindingError(
            f"sparse tensors of shapes {x.shape} and {other.shape} meet", expected="one shape"
        )
    if is_sparse or isinstance(other, Tensor) and other.dim():
        if x.device != other.device or is_fake(next(x.tensors())) != _holds_fakes(other):
            raise DeviceError(
                f"a sparse tensor on {x.device} meets one on {other.device}", expected="one device"
            )


def _holds_fakes(other: SparseFormat | Tensor) -> bool:
    return is_fake(other if isinstance(other, Tensor) else next(other.tensors()))


def _check_broadcast(x: SparseFormat, other: Tensor) -> None:
    try:
        torch.broadcast_shapes(x.shape, other.shape)  # type: ignore[no-untyped-call]
    except RuntimeError as wrong:
        raise BindingError(
            f"a sparse tensor of shape {x.shape} meets a tensor of shape {tuple(other.shape)}",
            expected="a shape that broadcasts to that of the sparse tensor",
        ) from wrong


def same_pattern(x: SparseFormat, other: SparseFormat) -> bool:
    """Whether both have one format and the same index arrays: the same objects, or equal ones, for
    which the device is asked.
    """
    if type(x) is not type(other) or any(getattr(x, n) != getattr(other, n) for n in x._static):
        return False
    pairs = [(a, b) for (_, _, a), (_, _, b) in zip(x.index_arrays(), other.index_arrays())]
    if all(a is b for a, b in pairs):
        return True
    return x.positions == other.positions and all(bool((a == b).all()) for a, b in pairs)


# --- sums over dimensions ---


def summed(x: SparseFormat, dim: int | Sequence[int] | None, keepdim: bool) -> Tensor:
    """The sum over some dimensions, or all, as a dense tensor."""
    listed = range(x.ndim) if dim is None else dim if isinstance(dim, tuple | list) else (dim,)
    gone = [checks.dimension(d, x.ndim) for d in listed]
    if len({*gone}) < len(gone):
        raise FormatError(f"dim {dim} names a dimension twice")
    letters = _letters(x)
    kept = [letters[d] for d in range(x.ndim) if d not in gone]
    if len(kept) == x.ndim:
        return x.to_dense()
    if x.values is not None and not (x.values.is_floating_point() or x.values.is_complex()):
        x = x.with_values(x.values.long())  # as torch sums integers
    total: Tensor = _einsum(f"S[{','.join(kept)}] = A[{','.join(letters)}]", A=x)
    shape = [1 if d in gone else size for d, size in enumerate(x.shape)]
    return total.reshape(shape) if keepdim else total


# --- slices ---


def sliced(x: SparseFormat, key: Any) -> SparseFormat | Tensor:
    """What `torch.Tensor.__getitem__` gives for integers, slices and ``...``: the same format where
    all dimensions stay, else COO; a single element is a tensor.
    """
    keys = _keys(x, key)
    source = E.to_elements(x.entries(), stored=True)
    coords, keep = [c.long() for c in source.coords], None
    for dim, one in enumerate(keys):
        here = coords[dim]
        inside = (here >= one.start) & (here < one.stop)
        inside = inside & ((here - one.start) % one.step == 0) if one.step > 1 else inside
        keep = inside if keep is None else keep & inside
    assert keep is not None
    at = keep.nonzero().squeeze(1)
    left = [d for d in range(x.ndim) if not isinstance(_given(x, key)[d], int)]
    values = None if source.values is None else source.values.index_select(0, at)
    if not left:
        return (
            values.sum(dtype=widened(values.dtype)).to(values.dtype)
            if values is not None
            else torch.tensor(float(at.shape[0]), device=x.device)
        )
    shape = tuple(len(keys[d]) for d in left)
    new = tuple(
        coords[d].index_select(0, at).sub(keys[d].start).div(keys[d].step, rounding_mode="floor")
        for d in left
    )
    if len(left) == x.ndim:
        options = x._same_options()
        order = type(x)._order(x.ndim, **options)
        return type(x)._build(E.collect(new, values, shape, order=order), **options)
    from insum.formats.coo import COO

    return COO._build(E.collect(new, values, shape, order=tuple(range(len(left)))))


def _given(x: SparseFormat, key: Any) -> list[Any]:
    """One key for each dimension: ``...`` and what is not said are whole dimensions."""
    listed = list(key) if isinstance(key, tuple) else [key]
    dots = [k for k, one in enumerate(listed) if one is Ellipsis]
    count = len(listed) - len(dots)
    if len(dots) > 1 or count > x.ndim:
        raise FormatError(
            f"a sparse tensor of {x.ndim} dimension(s) is indexed with {len(listed)} keys",
            expected="one for each dimension, and ... once",
        )
    at = dots[0] if dots else len(listed)
    whole = [slice(None)] * (x.ndim - count)
    return [*listed[:at], *whole, *listed[at + len(dots) :]]


def _keys(x: SparseFormat, key: Any) -> list[range]:
    """The coordinates that stay, dimension by dimension."""
    return [_range(x, dim, one) for dim, one in enumerate(_given(x, key))]


def _range(x: SparseFormat, dim: int, key: Any) -> range:
    size = x.shape[dim]
    if isinstance(key, slice):
        try:
            found = range(*key.indices(size))
        except (TypeError, ValueError) as wrong:
            raise FormatError(f"a sparse tensor is sliced with {key}: {wrong}") from wrong
        if found.step < 1:
            raise FormatError(f"a sparse tensor is sliced with {key}", expected="a step above 0")
        return found
    if isinstance(key, int) and not isinstance(key, bool):
        if not -size <= key < size:
            raise IndexRangeError(
                f"index {key} is outside dimension {dim} of size {size}",
                expected=f"an index from {-size} to {size - 1}",
            )
        return range(key % size, key % size + 1)
    raise UnsupportedError(
        f"a sparse tensor is indexed with {shown(key)}",
        expected="integers, slices and ...",
        remedy='insum.einsum("B[i,k] = A[rows[i],k]", ...), or a dense tensor',
    )
