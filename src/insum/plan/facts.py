"""What is known about an index tensor: range, order, uniqueness, segment pointers.

Formats know these by construction and `declare` them. For other tensors they are computed once on
the tensor's device and remembered for that tensor object and its version counter, so that a warm
call asks nothing of the device.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


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


@dataclass(slots=True)
class _Entry:
    reference: weakref.ref[Tensor]
    version: int
    facts: IndexFacts


#: By identity of the tensor; a reader has to compare reference and version, as `known` does.
entries: dict[int, _Entry] = {}
_lock = threading.Lock()


def known(tensor: Tensor) -> IndexFacts | None:
    """The facts remembered for this tensor as it is now, or None. Never touches the device."""
    entry = entries.get(id(tensor))
    try:  # `version_of` without the call, for every warm call asks here
        return (
            entry.facts
            if entry is not None
            and entry.reference() is tensor
            and entry.version == tensor._version
            else None
        )
    except RuntimeError:
        return entry.facts if entry is not None and entry.version == -1 else None


def version_of(tensor: Tensor) -> int:
    """The counter that in-place writes advance; tensors made under inference mode keep none and
    count as never changed.
    """
    try:
        return tensor._version
    except RuntimeError:
        return -1


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
    return _remember(tensor, IndexFacts(low, high, sorted, unique, padded, constant, declared=True))


def _remember(tensor: Tensor, facts: IndexFacts) -> IndexFacts:
    key = id(tensor)

    # bound here: at exit the module's names are gone first
    def forget(_: object, key: int = key, known: dict[int, _Entry] = entries) -> None:
        known.pop(key, None)

    with _lock:
        entries[key] = _Entry(weakref.ref(tensor, forget), version_of(tensor), facts)
    return facts


def facts_of(tensor: Tensor) -> IndexFacts:
    """Facts about ``tensor``, computed on its device the first time it is seen in this version.

    >>> facts_of(torch.tensor([0, 2, 2, 5]))
    IndexFacts(low=0, high=5, sorted=True, unique=False, padded=False, constant=False,
    passing=False)
    """
    return known(tensor) or _remember(tensor, _compute(tensor))


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
    return _remember(tensor, facts)


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
