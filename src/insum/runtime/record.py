"""Offences that kernels found: indices out of range, reported by a later call.

Each device has one record, in memory that the host reads without waiting. The first kernel to find
an index out of range writes down the number of its call, which index it was, where, and its value.
The host looks at the record when it makes the next call, when `insum.synchronize` is called and
where a backward pass begins and ends, and raises what it would have raised at once on the CPU.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from insum import memory
from insum.accepted import DEVICE, takes
from insum.codegen.arguments import CALL, CLAIM, FLAGS, RECORD
from insum.codegen.checking import SEAL
from insum.codegen.emit import FLAG_COUNT
from insum.compat.contexts import untracked
from insum.compat.locks import renew_in_children
from insum.compat.streams import cudagraph_state, elsewhere
from insum.errors import IndexRangeError, InsumError
from insum.lang.bind import Problem
from insum.lang.expr import Access, variables
from insum.lang.problem import resized
from insum.plan.uses import Use
from insum.runtime import check

#: What messages about earlier calls end with.
EARLIER = " (found on the device by an earlier call)"
#: Makes the error of a report: which offence, where, and a value.
Explain: TypeAlias = Callable[[int, int, int], InsumError]


@dataclass(frozen=True, slots=True)
class ReportableCall:
    """One call that may be reported: what it was, and its index tensors as they were."""

    example: Problem
    extents: Mapping[str, int]
    shape: tuple[int, ...]
    uses: tuple[Use, ...]
    #: Names, weak references to tensors, and to what is remembered of them: a view may be gone
    #: of which something still is.
    entries: Sequence[tuple[str, Any, Any]]
    numbers: Mapping[str, Any]
    shapes: Mapping[str, torch.Size]
    called: Mapping[str, tuple[str, str]]  # index tensors that users know under other names

    @property
    def problem(self) -> Problem:
        """The problem with the sizes of the call; its tensors may be gone."""
        return resized(self.example, self.extents, self.shape, self.shapes)

    def look_again(self) -> None:
        """The next call on these index tensors reports, too."""
        for _, _, remembered in self.entries:
            entry = remembered()
            if entry is not None:
                entry.looked.clear()

    def __call__(self, use: int, place: int, value: int) -> InsumError:
        used = self.uses[use]
        if used.tensor in self.called:
            name, what = self.called[used.tensor]
            return out_of_range(name.format(place), value, used.limit(self.problem), what)
        return _again(self) or _from_record(self, used, place, value)


class Record:
    """The record of one device."""

    def __init__(self, device: torch.device) -> None:
        pinned = device.type == "cuda"
        with untracked():  # it is written to later, whatever mode the first call was under
            self.flags = torch.zeros(FLAG_COUNT, dtype=torch.int32, device=device)
            self.claim = torch.zeros(1, dtype=torch.int32, device=device)
            self.host = torch.zeros(8, dtype=torch.int64, pin_memory=pinned)
        self.view = memoryview(self.host.numpy())  # type: ignore[arg-type]
        self.arguments = {FLAGS: self.flags, CLAIM: self.claim, RECORD: self.host}
        self.numbers = itertools.count(1)
        #: The last calls, by their flags: what makes the error of a report.
        self.calls: dict[int, Explain | tuple[Any, ...]] = {}

    def next(self, explain: Explain | tuple[Any, ...], values: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a checked call, with what its kernels need to report. ``explain`` may be
        the fields of a `ReportableCall`.
        """
        number = next(self.numbers) % (2**31 - 1) + 1
        self.calls[number % FLAG_COUNT] = explain
        return {**values, **self.arguments, CALL: number}

    def report(self) -> InsumError | None:
        """The error for what was found, if anything was; the record is then empty again."""
        number, use, place, value, seal = (int(n) for n in self.view[:5])
        if not number or number ^ use ^ place ^ value ^ SEAL != seal:
            return None
        found = self.calls.get(number % FLAG_COUNT)
        with untracked():
            for held in (self.host, self.claim, self.flags):
                held.zero_()
        if found is None:
            return IndexRangeError(
                f"an index is {value}, which is out of range{EARLIER[:-1]}, which is long ago)"
            )
        if not isinstance(found, tuple):
            return found(use, place, value)
        call = ReportableCall(*found)
        call.look_again()
        return call(use, place, value)

    def raise_found(self) -> None:
        error = self.report()
        if error is not None:
            raise error


def _again(made: ReportableCall) -> IndexRangeError | None:
    """What the CPU would have said, where the index tensors are still there and unchanged."""
    values = dict(made.numbers)
    for name, reference, remembered in made.entries:
        tensor = reference()
        entry = None if tensor is None else memory.known(tensor)
        if entry is None or entry is not remembered():
            return None
        values[name] = tensor
    try:
        check.verify_values(made.problem, made.uses, values)
    except IndexRangeError as error:
        return _earlier(error, error.fact)
    return None


def _earlier(error: IndexRangeError, fact: str) -> IndexRangeError:
    return IndexRangeError(
        f"{fact}{EARLIER}",
        expected=error.expected,
        remedy=error.remedy,
        statement=error.statement,
        span=error.span,
        passed=error.passed,
    )


def out_of_range(
    where: str, value: int, limit: int, what: str, when: str = EARLIER
) -> IndexRangeError:
    """The error about a number of a node, or the like, that does not exist."""
    return IndexRangeError(
        f"{where} is {value}, but there are {limit} {what}{when}",
        expected=f"values from 0 to {limit - 1}" if limit else "no edges at all",
    )


def _from_record(made: ReportableCall, use: Use, place: int, value: int) -> IndexRangeError:
    """What can be said of a tensor that is gone, or was written to since."""
    point: dict[str, int] = {}
    for var in reversed(variables(use.index)):
        place, point[var] = divmod(place, max(1, int(made.problem.extents[var])))
    atom = use.index.atom
    plain = isinstance(atom, Access) and all(i.var in point for i in atom.indices)
    if plain and isinstance(atom, Access):
        places = ",".join(str(point[str(i.var)]) for i in atom.indices)
        what = f"{atom.tensor}[{places}] is {value}"
    else:
        at = ", ".join(f"{v}={point[v]}" for v in variables(use.index))
        what = f"index {use.index} is {value} (at {at})"
    error = check.complaint(made.problem, use, what, value)
    return _earlier(error, error.fact)


_records: dict[torch.device, Record] = {}
_lock = threading.Lock()
renew_in_children(_lock)


def record_of(device: torch.device) -> Record:
    """The record of a device, made when a call first needs it."""
    found = _records.get(device)
    if found is None:
        with _lock:
            found = _records.get(device) or _records.setdefault(device, _made(device))
    return found


def _made(device: torch.device) -> Record:
    # not in the memory of a CUDA graph, which would take it back
    in_graph = device.type == "cuda" and cudagraph_state(device)
    record = elsewhere(device, lambda: Record(device)) if in_graph else Record(device)
    check.found.append((record.view, record.raise_found))
    return record


@takes(device=DEVICE.optional)
def synchronize(device: torch.device | str | int | None = None) -> None:
    """Wait for the device, and raise where a call so far was found to have an index out of range.

    On GPUs indices are checked by the kernels themselves, so that a call does not wait. An index
    out of range is treated as absent, and reported by the next call, or by this function.

    Args:
        device: which GPU to wait for; the current one where none is given.

    Raises:
        IndexRangeError: an index of an earlier call is out of range.

    Examples:
        >>> import insum
        >>> insum.synchronize()
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize(device)
    check.raise_found()
