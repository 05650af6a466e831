"""Index values against the dimensions they index, before anything runs.

First the range of each whole index tensor; only where that is too wide are the values looked at
that the statement refers to, so that an unreferenced value is no error. On the CPU at every call;
elsewhere once per tensor and version, so that a warm call does not wait for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NoReturn

import torch
from torch import Tensor

from insum import memory
from insum.errors import IndexRangeError
from insum.facts import facts_of, known
from insum.lang.bind import Problem, Value
from insum.lang.expr import Access, Affine, Var, accesses, variables
from insum.plan.uses import Use
from insum.runtime.points import evaluated, variable_grid
from insum.settings import settings

#: torch finds no least and greatest of these.
_UNORDERED = (torch.uint16, torch.uint32, torch.uint64)


#: The records of devices, of which the first number is not 0 where something was found, and what
#: raises it then; `runtime.record` puts them here.
found: list[tuple[memoryview, Callable[[], None]]] = []


def raise_found() -> None:
    """Raise what earlier calls were found to have done wrong. Does not wait."""
    for numbers, report in found:
        if numbers[0]:
            report()


def live_uses(problem: Problem, uses: tuple[Use, ...]) -> tuple[Use, ...]:
    """Those uses that have a point. An index tensor without elements has no values: whatever
    indexes it is found out of range, or absent.
    """
    if problem.device.type == "meta":
        return ()
    if 0 not in problem.extents.values() and all(0 not in k.shape for k in problem.kinds.values()):
        return uses
    live = [t for t in problem.terms if all(problem.extents[v] != 0 for v in t.variables)]
    if not live:
        return ()
    target = problem.statement.target
    read = {a for term in live for a in accesses(term.value)}
    read |= {a for i in target.indices for a in accesses(i)}
    return tuple(
        use
        for use in uses
        if (use.is_target or use.access in read)
        and not any(0 in problem.kinds[a.tensor].shape for a in accesses(use.index))
    )


def ranges_of(problem: Problem, uses: tuple[Use, ...]) -> tuple[tuple[str, int, int], ...]:
    """For each index tensor the range that every use of it allows; nothing where a use is more than
    one tensor.
    """
    if not all(use.tensor for use in uses):
        return ()
    found: dict[str, tuple[int, int]] = {}
    for use in uses:
        last = use.limit(problem) - 1
        low, high = found.get(use.tensor, (use.low(problem), last))
        found[use.tensor] = max(low, use.low(problem)), min(high, last)
    return tuple((name, *bounds) for name, bounds in found.items())


#: Up to so many values it is quicker to look at them one by one than to start a kernel.
_FEW = 64


def in_range(ranges: tuple[tuple[str, int, int], ...], values: Mapping[str, Value]) -> bool:
    """The quick test, made at every call: of values on the CPU, of facts elsewhere. False says only
    that `verify` must look closer.
    """
    if settings.values.check == "never":
        return True
    for name, low, high in ranges:
        tensor = values[name]
        if not isinstance(tensor, Tensor):
            return False
        if not tensor.is_cpu:
            facts = known(tensor)
            if (
                facts is None
                or facts.low < low
                or facts.high > high
                or settings.values.check == "always"
            ):
                return False
            continue
        entry = memory.known(tensor, declared=True)
        if entry is not None:
            bounds = entry.things.get("bounds")
            if bounds is None:
                bounds = entry.remembered("bounds", functools.partial(bounds_of, tensor))
            if bounds is None or bounds[0] < low or bounds[1] > high:
                return False
        elif tensor.numel() <= _FEW and tensor.dim() == 1:
            few = tensor.tolist()
            if min(few) < low or max(few) > high:
                return False
        elif not _is_within(tensor, low, high):
            return False
    return bool(ranges)


def _is_within(tensor: Tensor, low: int, high: int) -> bool:
    """Whether all values are, as NumPy finds in a fraction of the time that torch takes; it takes
    longer to find out whether values are those that were looked at before.
    """
    try:
        values = tensor.numpy()
    except (RuntimeError, TypeError):  # a tensor of another kind
        if tensor.dtype in _UNORDERED:
            return False
        least, greatest = torch.aminmax(tensor)
        return least.item() >= low and greatest.item() <= high
    if low == 0 and high >= 0:  # what is negative is large without its sign
        return bool(values.view(f"u{values.itemsize}").max() <= high)
    return bool(values.min() >= low and values.max() <= high)


def verify(problem: Problem, uses: tuple[Use, ...], values: Mapping[str, Value]) -> None:
    """Raise where an index value that the statement refers to lies outside its dimension."""
    if settings.check == "never":
        return
    bounds: dict[str, tuple[int, int] | None] = {}
    for use in uses:
        if not is_inside(problem, use, values, bounds, bounds_of):
            _verify_referenced(problem, use, values)


def verify_values(problem: Problem, uses: tuple[Use, ...], values: Mapping[str, Value]) -> None:
    """The same by looking at every value; waits for the device."""
    for use in uses:
        _verify_referenced(problem, use, values)


def is_inside(
    problem: Problem,
    use: Use,
    values: Mapping[str, Value],
    bounds: dict[str, tuple[int, int] | None],
    find: Callable[[Value], tuple[int, int] | None],
) -> bool:
    """Whether the bounds of index tensors, as far as they are known, show that a use stays in its
    dimension. False says only that they do not.
    """
    low = high = use.index.offset
    for by, atom in use.index.terms:
        if isinstance(atom, Var):
            ends: tuple[int, int] | None = (0, int(problem.extents[atom.name]) - 1)
        else:
            if atom.tensor not in bounds:
                bounds[atom.tensor] = find(values[atom.tensor])
            ends = bounds[atom.tensor]
        if ends is None:
            return False
        low, high = low + min(by * ends[0], by * ends[1]), high + max(by * ends[0], by * ends[1])
    return low >= use.low(problem) and high < use.limit(problem)


def bounds_of(value: Value) -> tuple[int, int] | None:
    """Least and greatest value, or None where they cannot be known now."""
    if not isinstance(value, Tensor):
        return int(value.real), int(value.real)
    if value.device.type == "cpu" or settings.check == "always":
        low, high = torch.aminmax(_sortable(value))
        return int(low), int(high)
    if (
        known(value) is None
        and value.device.type == "cuda"
        and torch.cuda.is_current_stream_capturing()
    ):
        return None
    facts = facts_of(value)
    return facts.low, facts.high


def _sortable(value: Tensor) -> Tensor:
    return value.detach().long() if value.dtype in _UNORDERED else value.detach()


# --- the values that are referred to ---


def _verify_referenced(problem: Problem, use: Use, values: Mapping[str, Value]) -> None:
    vars = variables(use.index)
    sizes = [int(problem.extents[v]) for v in vars]
    grid = variable_grid(vars, sizes, problem.device)
    index, present = evaluated(use.index, values, grid, problem.device, problem.padded)
    bad = (
        (((index < min(0, use.low(problem))) | (index >= use.limit(problem))) & present)
        .expand(sizes)
        .nonzero()
    )
    if len(bad):
        _complain(problem, use, values, dict(zip(vars, bad[0].tolist(), strict=True)))


def _complain(
    problem: Problem, use: Use, values: Mapping[str, Value], point: dict[str, int]
) -> NoReturn:
    atom = use.index.atom
    at = ", ".join(f"{v}={k}" for v, k in point.items())
    value = _at(use.index, values, point)
    if isinstance(atom, Access):
        raise complaint(problem, use, f"{_place(atom, values, point)} is {value}", value)
    where = f" (at {at})" if at else ""
    raise complaint(problem, use, f"index {use.index} is {value}{where}", value)


def complaint(problem: Problem, use: Use, what: str, value: int) -> IndexRangeError:
    """The error about one index value: where it stands and what it is, and what it indexes."""
    limit, atom = use.limit(problem), use.index.atom
    fact = (
        f"{what}, but it indexes dimension {use.dim} of {use.access.tensor}, which has size {limit}"
    )
    remedy = f"make {use.access.tensor} larger, or correct the index"
    if value < 0 and not use.wraps:
        remedy = "a negative index does not count from the end"
    expected = f"values from {-limit if use.wraps else 0} to {limit - 1}"
    expected = expected if limit else "no index at all"
    if use.padded:
        expected += ", or -1 for an absent entry"
    elif value == -1 and isinstance(atom, Access):
        remedy = f"where -1 marks an absent entry, pass padded=({atom.tensor!r},)"
    found = problem.complain(
        IndexRangeError, fact, span=use.index.span, expected=expected, remedy=remedy
    )
    assert isinstance(found, IndexRangeError)
    return found


def _place(access: Access, values: Mapping[str, Value], point: dict[str, int]) -> str:
    inner = ",".join(str(_at(i, values, point)) for i in access.indices)
    return f"{access.tensor}[{inner}]" if inner else access.tensor


def _at(index: Affine, values: Mapping[str, Value], point: dict[str, int]) -> int:
    """The value of an index expression at one point."""
    total = index.offset
    for by, atom in index.terms:
        if isinstance(atom, Var):
            total += by * point[atom.name]
        else:
            place = tuple(_at(i, values, point) for i in atom.indices)
            # `item`: `int` of a tensor refuses what int64 does not hold
            total += by * int(torch.as_tensor(values[atom.tensor])[place].item())
    return total
