"""What is known about an index tensor: range, order, uniqueness.

Formats know these by construction and `declare` them. For other tensors they are found out on the
tensor's device and remembered with it (`insum.memory`), so that a warm call asks nothing of the
device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from insum import memory
from insum.accepted import CONSTANTS, takes
from insum.compat.calls import PLAIN
from insum.compat.contexts import untracked
from insum.compat.placed import is_placed, local_of
from insum.compat.streams import is_recorded

#: torch finds no least and greatest of these, and does not sort them.
UNORDERED = (torch.uint16, torch.uint32, torch.uint64)


@dataclass(frozen=True, slots=True)
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
    #: The caller promises that the values are part of the program: they may become code.
    constant: bool = False


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
    """Remember facts that the caller knows to be true, as formats do for their arrays: the tensor
    stays as it is and will come back, so that it is worth waiting for the best schedule.
    """
    facts = IndexFacts(low, high, sorted, unique, padded, constant)
    entry = memory.entry_of(tensor, declared=True)
    entry.given = True
    return entry.keep("facts", facts)


def facts_of(tensor: Tensor) -> IndexFacts:
    """Facts about ``tensor``, computed on its device the first time it is seen in this version.

    >>> facts = facts_of(torch.tensor([0, 2, 2, 5]))
    >>> facts.low, facts.high, facts.sorted, facts.unique
    (0, 5, True, False)
    """
    return memory.entry_of(tensor).remembered("facts", lambda: compute(tensor))


#: Calls that meet a tensor before it is looked at: most tensors of which a program has new ones at
#: every step never come back so often.
SEEN_AGAIN = 4
#: Values that are looked at at once, and up to how many it is found out whether any comes twice,
#: where that takes a sort.
_AT_ONCE, _SORTED_UP_TO = 1 << 24, 1 << 26


def known_now(
    tensor: Tensor,
    entry: memory.Entry | None = None,
    look: Callable[[Tensor], Tensor] | None = None,
) -> IndexFacts | None:
    """The facts that a call can have without waiting for the device, which counts as having met
    the tensor once more.

    On the CPU, and of tensors that were declared to come back, they are found out at once. Others
    are looked at once they have come back a few times; the answer is there for a later call.
    ``look``: gives numbers that tell nothing of values that come twice, unless all are in order.
    Without it, and where none may come twice, a sort tells.
    """
    entry = memory.entry_of(tensor) if entry is None else entry
    facts: IndexFacts | None = entry.get("facts") if entry.things else None
    if facts is not None or memory.can_look(tensor) or entry.declared:
        return facts or entry.remembered("facts", lambda: compute(tensor))
    if entry.sights + 1 < SEEN_AGAIN:
        entry.sights += 1
        return None
    coming: Coming | None = entry.get("facts, coming")
    if coming is not None:
        return _arrived(tensor, entry, coming) if coming.is_there() else None
    entry.sights += 1
    if entry.sights >= SEEN_AGAIN and tensor.numel() and not is_recorded(tensor.device):
        with untracked():
            numbers = numbers_of(tensor) if look is None else look(tensor)
            entry.keep("facts, coming", Coming(numbers, sorts=look is None))
    return None


def _arrived(tensor: Tensor, entry: memory.Entry, coming: Coming) -> IndexFacts | None:
    """The facts, unless a sort has to tell whether a value comes twice."""
    facts = from_numbers(coming.numbers())
    enough = facts.high - facts.low + 1 >= tensor.numel()  # values, for all to be different
    if coming.sorts or facts.sorted or not enough or tensor.numel() > _SORTED_UP_TO:
        return entry.keep("facts", facts)
    if not is_recorded(tensor.device):
        with untracked():
            entry.keep("facts, coming", Coming(numbers_of(tensor)))
    return None


class Coming:
    """Numbers on their way from a device to the host. ``sorts``: a sort has told them."""

    __slots__ = ("_done", "_host", "sorts")

    def __init__(self, numbers: Tensor, sorts: bool = True) -> None:
        self.sorts = sorts
        self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.is_cuda)
        self._host.copy_(numbers, non_blocking=True)
        self._done: Any = None
        if numbers.is_cuda:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(torch.cuda.current_stream(numbers.device))

    def is_there(self) -> bool:
        return self._done is None or bool(self._done.query())

    def numbers(self) -> list[int]:
        """The numbers; waits where they are not there yet."""
        if self._done is not None:
            self._done.synchronize()
        found: list[int] = self._host.tolist()
        return found


def compute(tensor: Tensor) -> IndexFacts:
    """Look at the values; waits for the device."""
    if not tensor.numel():
        return IndexFacts(0, -1, True, True)
    with untracked():
        return from_numbers(numbers_of(tensor).tolist())


def numbers_of(tensor: Tensor) -> Tensor:
    """Low, high, whether it is sorted, and whether no value comes twice, as one small tensor."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() > _SORTED_UP_TO:
        return _without_sorting(flat)
    flat = flat.long() if flat.dtype in UNORDERED else flat
    ranked = flat.sort().values
    told = torch.stack([flat[1:] >= flat[:-1], ranked[1:] != ranked[:-1]]).all(1)
    return torch.cat([ranked[:1], ranked[-1:], told.to(ranked.dtype)]).long()


def _without_sorting(flat: Tensor) -> Tensor:
    """The same of so many that they are looked at in parts. Of such that are not in order it is
    not found out whether a value comes twice.
    """
    parts = [_part_of(flat, start) for start in range(0, flat.numel(), _AT_ONCE)]
    low, high, ordered, strictly = torch.stack(parts).unbind(1)
    return torch.stack([low.amin(), high.amax(), ordered.amin(), strictly.amin()])


def _part_of(flat: Tensor, start: int) -> Tensor:
    """The same of a part, and of the step to the next one."""
    part = flat[start : start + _AT_ONCE + 1]
    part = part.long() if part.dtype in UNORDERED else part
    low, high = torch.aminmax(part)
    before, after = part[:-1], part[1:]
    ordered, strictly = (after >= before).all(), (after > before).all()
    return torch.stack([low.long(), high.long(), ordered.long(), strictly.long()])


def from_numbers(numbers: list[int]) -> IndexFacts:
    """Of the numbers of a tensor, or of its parts behind each other.

    >>> from_numbers([0, 2, 1, 1, 3, 7, 1, 0])
    IndexFacts(low=0, high=7, sorted=True, unique=False, padded=False, constant=False)
    """
    lows, highs, in_order, different = (numbers[n::4] for n in range(4))
    low, high, ordered, unique = min(lows), max(highs), min(in_order), min(different)
    return IndexFacts(low, high, bool(ordered), bool(unique), padded=low < 0)


def segment_pointers(tensor: Tensor, rows: int) -> Tensor:
    """``ptr`` of length ``rows + 1``: entries ``ptr[r] .. ptr[r+1]`` of a sorted 1-D index tensor
    equal ``r``. Kept with the tensor.
    """

    def search() -> Tensor:
        kind = torch.promote_types(tensor.dtype, torch.int32)
        flat = tensor.detach().reshape(-1).to(kind).contiguous()
        bounds = torch.arange(rows + 1, device=tensor.device, dtype=kind)
        return torch.searchsorted(flat, bounds, out_int32=tensor.numel() < 2**31)

    return memory.entry_of(tensor).remembered(("pointers", rows), search)


def keep_pointers(tensor: Tensor, rows: int, pointers: Tensor) -> None:
    """Remember pointers that whoever made the tensor has, as conversion from CSR does."""
    kind = torch.int32 if tensor.numel() < 2**31 else torch.int64
    memory.entry_of(tensor).keep(("pointers", rows), pointers.to(kind))


#: Under which it is kept that the values of a floating-point tensor are part of the program.
CONSTANT = "constant"


@takes(tensor=CONSTANTS)
def constant(tensor: Tensor) -> Tensor:
    """Promise that a tensor's values are part of the program, as Clebsch-Gordan patterns and
    stencils are.

    Statements over small constant index tensors may become straight-line code with the values in
    it; of floating-point tensors, the coefficients that belong to such a pattern. A kernel is then
    compiled for each pattern, so promise it only for tensors that live as long as the model.
    Writing into the tensor ends the promise.

    Args:
        tensor: An index tensor, or coefficients at the places of one.

    Returns:
        The same tensor.

    Examples:
        >>> import insum, torch
        >>> pattern = insum.constant(torch.tensor([2, 0, 1]))
        >>> A = torch.tensor([10.0, 20.0, 30.0])
        >>> insum.insum("C[P[i]] = A[i]", out_shape=(3,), P=pattern, A=A)
        tensor([20., 30., 10.])
    """
    if type(tensor) not in PLAIN and is_placed((tensor,)):
        constant(local_of(tensor))
        return tensor
    entry = memory.entry_of(tensor, declared=True)
    if tensor.is_floating_point():
        entry.keep(CONSTANT, True)
        return tensor
    facts = facts_of(tensor)
    if not facts.constant:
        entry.renew()
        entry.keep("facts", replace(facts, constant=True))
    return tensor
