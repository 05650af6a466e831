"""The short way for a fused op that has been called before with tensors of the same kinds: compare, then launch."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from insum.fusion.indices import Limits, seen_once, shares_memory
from insum.plan.facts import known
from insum.runtime import cache, fused
from insum.runtime.build import Program
from insum.settings import settings

#: Ways that one op of one graph may have at a time.
_MOST_WAYS = 4
_MOST_OPS = 4096
_ways: dict[object, list[Way]] = {}


class Way:
    """What one call looked like, and the program that it ran. Holds no tensor: programs live as long as the index tensors that decided them."""

    __slots__ = ("arguments", "default", "deterministic", "epoch", "limits", "precision", "program", "settings", "target")

    def __init__(self, program: Program, values: Mapping[str, Any], limits: Limits, target: Tensor | None) -> None:
        self.program, self.settings, self.epoch = weakref.ref(program), settings._values, cache.epoch()
        self.default, self.precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
        self.deterministic = torch.are_deterministic_algorithms_enabled()
        self.target = None if target is None else (target.shape, target.stride(), target.dtype)
        self.limits = limits
        self.arguments = tuple((n, v.shape, v.stride(), v.dtype, v.device, None if limits else _serial(v)) for n, v in values.items())

    def __call__(self, values: dict[str, Any], target: Tensor | None) -> Tensor | None:
        """The result, or None where this call is another."""
        program = self.program()
        if program is None or self.settings is not settings._values or self.epoch != cache.epoch() or not self.same_modes():
            return None
        if target is not None and (target.shape, target.stride(), target.dtype) != self.target:
            return None
        for name, shape, stride, dtype, device, serial in self.arguments:
            tensor = values[name]
            if tensor.shape != shape or tensor.dtype is not dtype or tensor.stride() != stride or tensor.device != device:
                return None
            if serial is not None and ((facts := known(tensor)) is None or facts.serial != serial):
                return None
        for name, limit, wraps in self.limits:
            values[name] = seen_once(name, values[name], limit, wraps)
        if target is not None and shares_memory(target, values):
            return None
        with fused.on_device(program.problem.device):
            return fused.execute(program, values, target)

    def same_modes(self) -> bool:
        return (
            self.default is torch.get_default_dtype()
            and self.deterministic is torch.are_deterministic_algorithms_enabled()
            and self.precision == torch.get_float32_matmul_precision()
        )


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


def keep(key: object, program: Program | str, values: Mapping[str, Any], limits: Limits, target: Tensor | None) -> None:
    """Remember a call that was just made the long way."""
    if isinstance(program, str) or program.promote or any(v.is_neg() for v in values.values()) or target is not None and shares_memory(target, values):
        return
    if len(_ways) >= _MOST_OPS:
        _ways.clear()
    ways = _ways.setdefault(key, [])
    ways.insert(0, Way(program, values, limits, target))
    del ways[_MOST_WAYS:]
