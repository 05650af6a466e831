"""`insum`, `compile`, `explain`: what users call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from insum.errors import BindingError
from insum.lang.bind import Size, Value
from insum.ops import accumulate_, contract
from insum.request import Request, head


def insum(
    statement: str,
    *,
    out_shape: Sequence[Size] | None = None,
    sizes: Mapping[str | int, Size | Sequence[Size]] | None = None,
    padded: Sequence[str] = (),
    **tensors: Value,
) -> Tensor:
    """Run one statement."""
    request = _request(statement, out_shape, sizes, padded)
    left = head(statement)
    target = tensors.get(left.target)
    if left.operator == "=" or target is None:
        return contract(request, tensors)
    assert isinstance(target, Tensor), BindingError
    values = tensors if left.reads_target else {n: v for n, v in tensors.items() if n != left.target}
    return accumulate_(request, target, values)


def _request(statement: str, out_shape: Sequence[Size] | None, sizes: Mapping[str | int, Size | Sequence[Size]] | None, padded: Sequence[str]) -> Request:
    read = tuple((k, tuple(v) if isinstance(v, Sequence) else v) for k, v in (sizes or {}).items())
    if out_shape is not None:
        read = ((head(statement).target, tuple(out_shape)), *read)
    return Request(statement, read, tuple(padded))


Insum = insum
