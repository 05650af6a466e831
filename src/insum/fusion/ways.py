"""Short ways for a fused op that has been called before: compare, then launch.

A `Way` is for tensors of the same kinds. A `Path` is shorter still, for index tensors that are the
same objects as before, unchanged. Neither holds a tensor: programs live as long as the index
tensors that decided them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from insum import memory
from insum.compat.calls import PLAIN, kinds_guard
from insum.fusion.indices import Limits, seen_once, shares_memory
from insum.plan.facts import known
from insum.runtime import cache, fused
from insum.runtime.program import Program
from insum.runtime.refit import Refit, refit_of
from insum.settings import settings

#: Ways that one op of one graph may have at a time.
_MOST_WAYS = 4
_MOST_OPS = 4096
_ways: dict[object, list[Way]] = {}
_paths: dict[tuple[str, str], list[Path]] = {}
_stretches: dict[object, list[Stretch]] = {}


class Modes:
    """What decides programs besides tensors, as it was."""

    __slots__ = ("default", "deterministic", "epoch", "precision", "settings")

    def __init__(self) -> None:
        self.settings, self.epoch = settings.values, cache.epoch()
        self.default, self.precision = (
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
        )
        self.deterministic = torch.are_deterministic_algorithms_enabled()

    def still(self) -> bool:
        return (
            self.settings is settings.values
            and self.epoch == cache.epoch()
            and self.default is torch.get_default_dtype()
            and self.deterministic is torch.are_deterministic_algorithms_enabled()
            and self.precision == torch.get_float32_matmul_precision()
        )


class Way:
    """What one call looked like, and the program that it ran."""

    __slots__ = ("arguments", "limits", "modes", "program", "target")

    def __init__(
        self, program: Program, values: Mapping[str, Any], limits: Limits, target: Tensor | None
    ) -> None:
        self.program, self.modes = weakref.ref(program), Modes()
        self.target = None if target is None else (target.shape, target.stride(), target.dtype)
        self.limits = limits
        self.arguments = tuple(
            (n, v.shape, v.stride(), v.dtype, v.device, None if limits else _serial(v))
            for n, v in values.items()
        )

    def __call__(self, values: dict[str, Any], target: Tensor | None) -> Tensor | None:
        """The result, or None where this call is another."""
        program = self.program()
        if program is None or not self.modes.still():
            return None
        if target is not None and (target.shape, target.stride(), target.dtype) != self.target:
            return None
        for name, shape, stride, dtype, device, serial in self.arguments:
            tensor = values[name]
            if (
                tensor.shape != shape
                or tensor.dtype is not dtype
                or tensor.stride() != stride
                or tensor.device != device
                or tensor.is_neg()
            ):
                return None
            if serial is not None and ((facts := known(tensor)) is None or facts.serial != serial):
                return None
        for name, limit, wraps in self.limits:
            values[name] = seen_once(name, values[name], limit, wraps)
        if target is not None and shares_memory(target, values):
            return None
        return fused.execute(program, values, target)


class Path:
    """The same for a call whose index tensors were all looked at, and are now the same objects, or
    computed from the same objects.
    """

    __slots__ = (
        "alike",
        "bases",
        "kinds",
        "modes",
        "names",
        "parts",
        "places",
        "program",
        "sizes",
        "target",
    )

    def __init__(
        self,
        program: Program,
        plain: Plain,
        places: Places,
        tensors: Sequence[Tensor],
        sizes: tuple[int, ...],
        values: Mapping[str, Any],
    ) -> None:
        self.program, self.modes, self.sizes = weakref.ref(program), Modes(), list(sizes)
        self.bases = tuple((place, memory.entry_of(tensors[place]).serial) for place in places)
        self.names, self.places = (
            tuple(name for name, _ in plain),
            tuple(place for _, place in plain),
        )
        self.parts = tuple(
            (name, weakref.ref(value)) for name, value in values.items() if name not in self.names
        )
        self.alike: Callable[..., bool] | None = None
        self.kinds = tuple(
            (t.shape, t.stride(), t.dtype, t.device)
            for place in self.places
            for t in (tensors[place],)
        )
        self.target: tuple[Any, ...] | None = None

    def __call__(
        self, tensors: Sequence[Tensor], sizes: Sequence[int], target: Tensor | None
    ) -> Tensor | None:
        """The result, or None where this call is another. Long, as every warm call comes by."""
        program = self.program()
        if program is None or sizes != self.sizes:
            return None
        for place, serial in self.bases:
            entry = memory.known(tensors[place])
            if entry is None or entry.serial != serial:
                return None
        values: dict[str, Any] = {}
        for name, part in self.parts:
            values[name] = found = part()
            if found is None:
                return None
        read = [tensors[place] for place in self.places]
        if (
            not (self.alike is not None and self.alike(*read) or self.are_alike(read))
            or not self.modes.still()
        ):
            return None
        values.update(zip(self.names, read))
        if target is not None and (
            (target.shape, target.stride(), target.dtype) != self.target or _meets(target, read)
        ):
            return None
        return fused.execute(program, values, target)

    def are_alike(self, read: Sequence[Tensor]) -> bool:
        """The same as `alike` tells, which looks at the state of the dispatcher too."""
        for tensor, (shape, stride, dtype, device) in zip(read, self.kinds):
            if (
                type(tensor) not in PLAIN
                or tensor.is_neg()
                or tensor.dtype is not dtype
                or tensor.device != device
            ):
                return False
            if tensor.shape != shape or tensor.stride() != stride:
                return False
        return True

    def remember(self, tensors: Sequence[Tensor]) -> None:
        """From now on compare tensors in one call of torch's; where calls come from elsewhere, and
        that says no, they are compared as before.
        """
        self.alike = kinds_guard([tensors[place] for place in self.places]) or _never


class Stretch:
    """The same for calls that take their index tensors as they come, whatever sizes they have: the
    kernels stay, the numbers change.
    """

    __slots__ = ("arguments", "modes", "rank", "refit", "wraps")

    def __init__(
        self, refit: Refit, values: Mapping[str, Any], wraps: frozenset[str], rank: int
    ) -> None:
        self.refit, self.modes, self.wraps, self.rank = refit, Modes(), wraps, rank
        self.arguments = tuple((name, v.dtype, v.dim(), v.device) for name, v in values.items())

    def __call__(
        self, given: Mapping[str, Any], sizes: tuple[int, ...], target: Tensor | None
    ) -> Tensor | None:
        """The result, or None where this call is another."""
        if not self.modes.still() or any(
            given[name].dim() != rank for name, _, rank, _ in self.arguments
        ):
            return None
        if target is not None and (
            not target.is_contiguous()
            or target.dtype is not self.refit.program.problem.dtype
            or shares_memory(target, given)
        ):
            return None
        shape = self.refit.shape_of(given) if not self.rank else sizes[: self.rank]
        if target is not None and target.shape != shape:
            return None
        values = dict(given)
        for name, limit in self.refit.limits(values, shape).items():
            values[name] = seen_once(name, values[name], limit, name in self.wraps)
        for name, dtype, _, device in self.arguments:
            if values[name].dtype is not dtype or values[name].device != device:
                return None
        program = self.refit(values, shape, target)
        if program is None:
            return None
        return fused.execute(program, values, target)


#: Names of the tensors that a statement reads as they are, with their places; and the places of
#: what decides its index tensors.
Plain: TypeAlias = tuple[tuple[str, int], ...]
Places: TypeAlias = tuple[int, ...]
#: What an op was called with: tensors, sizes, and the tensor that is written to.
Call: TypeAlias = tuple[Sequence[Tensor], tuple[int, ...], Tensor | None]


def _never(*tensors: Tensor) -> bool:
    return False


def _meets(target: Tensor, read: Sequence[Tensor]) -> bool:
    """Whether something that is read lies in the memory that is written to; both lie in one piece,
    as `keep_path` sees to.
    """
    start = target.data_ptr()
    end = start + target.nbytes
    return any((at := one.data_ptr()) < end and start < at + one.nbytes for one in read)


def _serial(value: Tensor) -> int | None:
    """The number of the facts that were looked at, where there were any to look at."""
    facts = known(value)
    return None if facts is None else facts.serial


def run(key: object, values: dict[str, Any], target: Tensor | None) -> Tensor | None:
    """The result, where a call like this one was made before."""
    ways = _ways.get(key)
    if ways is None:
        return None
    for way in ways:
        result = way(values, target)
        if result is not None:
            return result
    return None


def keep(
    key: object,
    program: Program | str,
    values: Mapping[str, Any],
    limits: Limits,
    target: Tensor | None,
) -> None:
    """Remember a call that was just made the long way."""
    if (
        isinstance(program, str)
        or program.promote
        or any(v.is_neg() for v in values.values())
        or target is not None
        and shares_memory(target, values)
    ):
        return
    if len(_ways) >= _MOST_OPS:
        _ways.clear()
    ways = _ways.setdefault(key, [])
    ways.insert(0, Way(program, values, limits, target))
    del ways[_MOST_WAYS:]


def stretch(
    key: object, values: Mapping[str, Any], sizes: tuple[int, ...], target: Tensor | None
) -> Tensor | None:
    """The result, where a call like this one but for its sizes was made before."""
    for one in _stretches.get(key, ()):
        result = one(values, sizes, target)
        if result is not None:
            return result
    return None


def keep_stretch(
    key: object,
    program: Program | str,
    values: Mapping[str, Any],
    wraps: frozenset[str],
    rank: int,
    target: Tensor | None,
) -> None:
    """Remember a call that was just made the long way, with index tensors that are new at each
    call; ``rank``: of a scattered result.
    """
    if (
        isinstance(program, str)
        or any(v.is_neg() for v in values.values())
        or target is not None
        and not target.is_contiguous()
    ):
        return
    refit = refit_of(program, values, target)
    if refit is None:
        return
    if len(_stretches) >= _MOST_OPS:
        _stretches.clear()
    every = _stretches.setdefault(key, [])
    every.insert(0, Stretch(refit, values, wraps, rank))
    del every[_MOST_WAYS:]


def run_path(
    text: str,
    mode: str,
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
    target: Tensor | None,
    quick: bool = False,
) -> Tensor | None:
    """The result, where a call with the same index tensors was made before; ``quick``: asked before
    the dispatcher was.
    """
    for path in _paths.get((text, mode), ()):
        result = path(tensors, sizes, target)
        if result is not None:
            if quick and path.alike is None:
                path.remember(tensors)
            return result
    return None


def has_path(text: str, mode: str) -> bool:
    """Whether some call of this op was remembered."""
    return bool(_paths.get((text, mode)))


def keep_path(
    text: str,
    mode: str,
    program: Program | str,
    plain: Plain,
    places: Places,
    call: Call,
    values: Mapping[str, Any],
) -> None:
    """Remember a call that was just made the long way, all of whose index tensors were looked at;
    ``places`` are those of what decides them.
    """
    tensors, sizes, target = call
    written = [] if target is None else [target, *(tensors[place] for _, place in plain)]
    if (
        isinstance(program, str)
        or program.promote
        or any(tensors[place].is_neg() for _, place in plain)
    ):
        return
    if any(memory.known(tensors[place]) is None for place in places):
        return
    if not all(t.is_contiguous() for t in written):
        return
    path = Path(program, plain, places, tensors, sizes, values)
    path.target = None if target is None else (target.shape, target.stride(), target.dtype)
    if len(_paths) >= _MOST_OPS:
        _paths.clear()
    paths = _paths.setdefault((text, mode), [])
    paths.insert(0, path)
    del paths[_MOST_WAYS:]
