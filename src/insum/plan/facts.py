"""What is known about an index tensor: range, order, uniqueness, segment pointers.

Formats know these by construction and `declare` them. For other tensors they are computed once on
the tensor's device and remembered for that tensor object and its version counter, so that a warm
call asks nothing of the device.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from insum import memory


@dataclass(slots=True, eq=False)
class IndexFacts:
    """Facts about one integer tensor, read in row-major order.

    ``low`` and ``high`` bound the values that are not padding (``0`` and ``-1`` where there are
    none); ``sorted`` and ``unique`` speak of all values, padding included, so that they are usable
    only where ``padded`` is false.
    """

    low: int
    high: int
    sorted: bool
    unique: bool
    padded: bool = False
    # the caller promises that the values are part of the program: they may become code
    constant: bool = False
    # said by whoever made the tensor, as formats do, rather than found by looking
    declared: bool = field(default=False, repr=False)
    # the tensor is made anew at every call: nothing that takes long to find out will ever be used
    # again
    passing: bool = False
    pointers: dict[int, Tensor] = field(default_factory=dict, repr=False)
    # schedules, orders and launches that live as long as the tensor
    derived: dict[object, Any] = field(default_factory=dict, repr=False)
    # unlike id(), never used twice
    serial: int = field(default_factory=itertools.count().__next__, repr=False)


def known(tensor: Tensor) -> IndexFacts | None:
    """The facts remembered for this tensor as it is now, or None. Never touches the device."""
    entry = memory.known(tensor)
    return None if entry is None else entry.get("facts")


def declare(
    tensor: Tensor,
    *,
    low: int,
    high: int,
    sorted: bool,
    unique: bool,
    padded: bool = False,
    constant: bool = False,
) -> IndexFacts:
    """Remember facts that the caller knows to be true, as formats do for their arrays."""
    facts = IndexFacts(low, high, sorted, unique, padded, constant, declared=True)
    return memory.entry_of(tensor, declared=True).keep("facts", facts)


def facts_of(tensor: Tensor) -> IndexFacts:
    """Facts about ``tensor``, computed on its device the first time it is seen in this version.

    >>> facts = facts_of(torch.tensor([0, 2, 2, 5]))
    >>> facts.low, facts.high, facts.sorted, facts.unique
    (0, 5, True, False)
    """
    return memory.entry_of(tensor).remembered("facts", lambda: _compute(tensor))


def _compute(tensor: Tensor) -> IndexFacts:
    flat = tensor.detach().reshape(-1).to(torch.int64)
    if flat.numel() == 0:
        return IndexFacts(0, -1, True, True)
    low, high = torch.aminmax(flat)
    steps = flat.diff()
    ordered = (steps >= 0).all()
    padded = low < 0
    # One transfer for all the small answers; uniqueness of unsorted values costs a sort, paid only
    # when the rest has arrived.
    low_, high_, ordered_, padded_ = (
        int(x) for x in torch.stack([low, high, ordered.long(), padded.long()]).tolist()
    )
    unique = bool((steps > 0).all()) if ordered_ else bool((flat.sort().values.diff() > 0).all())
    return IndexFacts(low_, high_, bool(ordered_), unique, bool(padded_))


_passing: dict[tuple[torch.device, int], IndexFacts] = {}
_MOST_DERIVED = 512


def pass_by(tensor: Tensor, high: int) -> IndexFacts:
    """Take a tensor for one that is seen once, with values from 0 to ``high``: nothing is computed,
    and all such tensors share their facts.
    """
    key = tensor.device, high
    facts = _passing.get(key)
    if facts is None or len(facts.derived) >= _MOST_DERIVED:
        if len(_passing) >= _MOST_DERIVED:
            _passing.clear()
        facts = _passing[key] = IndexFacts(0, high, False, False, passing=True)
    return memory.entry_of(tensor).keep("facts", facts)


def segment_pointers(tensor: Tensor, rows: int) -> Tensor:
    """``ptr`` of length ``rows + 1``: entries ``ptr[r] .. ptr[r+1]`` of a sorted 1-D index tensor
    equal ``r``. Kept with the facts.
    """
    facts = facts_of(tensor)
    pointers = facts.pointers.get(rows)
    if pointers is None:
        bounds = torch.arange(rows + 1, device=tensor.device, dtype=tensor.dtype)
        pointers = torch.searchsorted(
            tensor.detach().reshape(-1).contiguous(), bounds, out_int32=tensor.numel() < 2**31
        )
        facts.pointers[rows] = pointers
    return pointers


def constant(tensor: Tensor) -> Tensor:
    """Promise that an index tensor's values are part of the program, as Clebsch-Gordan patterns and
    stencils are.

    Statements over small constant index tensors may become straight-line code with the values in
    it. A kernel is then compiled for each pattern, so promise it only for tensors that live as long
    as the model. Writing into the tensor ends the promise.

    >>> import insum, torch
    >>> pattern = insum.constant(torch.tensor([2, 0, 1]))
    >>> insum.insum("C[P[i]] = A[i]", out_shape=(3,), P=pattern, A=torch.tensor([10.0, 20.0, 30.0]))
    tensor([20., 30., 10.])
    """
    facts_of(tensor).constant = True
    return tensor
