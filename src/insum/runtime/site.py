"""The shortest way to a kernel: what a fused call looked like, so that the next one like it only
compares and launches.

A site holds no tensor and no launch, only what to compare with and a weak reference: launches live
as long as the index tensors that decided them. Whatever differs, in tensors, settings, modes or
facts, sends the call down the long way, which checks everything anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from insum.compat.calls import PLAIN, is_undisturbed, kinds_guard
from insum.plan.facts import known
from insum.runtime import cache, fused
from insum.runtime.program import Program
from insum.settings import settings

state = cache.state


class Site:
    """One kind of call of one statement, in plain eager mode, whose result is a new tensor, or the
    ``target`` that is accumulated into.
    """

    __slots__ = (
        *("alike", "default", "deterministic", "epoch", "graded", "indices"),
        *("names", "precision", "program", "request", "settings", "sizes", "target"),
    )

    def __init__(
        self,
        request: object,
        program: Program,
        values: Mapping[str, Tensor],
        sources: Sequence[str],
        indices: Sequence[str],
        target: str = "",
    ) -> None:
        self.request, self.program = request, weakref.ref(program)
        self.settings, self.epoch = settings.values, cache.epoch()
        self.default, self.deterministic = (
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
        )
        # The matmul precision matters where float32 operands may meet in a matrix product.
        self.precision = (
            torch.get_float32_matmul_precision()
            if any(v.dtype is torch.float32 for v in values.values())
            else ""
        )
        self.names = tuple(values)
        self.alike = kinds_guard(list(values.values())) or Kinds(values.values())
        self.indices = tuple(
            (place, f.serial, f.constant)
            for place, (n, v) in enumerate(values.items())
            if n in indices and (f := known(v)) is not None
        )
        self.graded = any(v.requires_grad for n, v in values.items() if n in sources or n == target)
        self.target, self.sizes = (
            target,
            tuple((name, value.numel() * value.element_size()) for name, value in values.items()),
        )

    def __call__(self, tensors: Mapping[str, Any]) -> Tensor | None:
        """The result, or None where this call is another. Called where nothing is being compiled,
        and long, because every warm call comes by.
        """
        program = self.program()
        if (
            program is None
            or self.settings is not settings.values
            or len(tensors) != len(self.names)
            or self.epoch != state["epoch"]
        ):
            return None
        try:
            given = [tensors[name] for name in self.names]
        except KeyError:
            return None
        if not self.alike(*given) or self.graded and torch.is_grad_enabled():
            return None
        for place, serial, constant in self.indices:
            found = known(given[place])
            if found is None or found.serial != serial or found.constant is not constant:
                return None
        if (
            self.default is not torch.get_default_dtype()
            or self.deterministic is not torch.are_deterministic_algorithms_enabled()
        ):
            return None
        if (
            self.precision
            and self.precision != torch.get_float32_matmul_precision()
            or not is_undisturbed()
        ):
            return None
        if self.target:
            return self.into(program, tensors)
        return fused.execute(program, tensors, None)

    def into(self, program: Program, tensors: Mapping[str, Any]) -> Tensor | None:
        """Accumulate in place, where nothing that is read lies in the memory that is written."""
        target: Tensor = tensors[self.target]
        start = target.data_ptr()
        end = start + target.nbytes
        for name, size in self.sizes:
            if name != self.target and start < (at := tensors[name].data_ptr()) + size and at < end:
                return None
        return None if target.is_inference() else fused.into(program, tensors, target)


class Kinds:
    """What `calls.kinds_guard` does, where torch does not offer it."""

    __slots__ = ("wanted",)

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.wanted = tuple(map(_kind, tensors))

    def __call__(self, *tensors: Any) -> bool:
        return all(
            isinstance(tensor, Tensor) and _kind(tensor) == wanted
            for tensor, wanted in zip(tensors, self.wanted, strict=True)
        )


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    strided = tensor.layout is torch.strided
    marks = tensor.requires_grad, tensor.is_inference(), tensor.is_neg()
    return (
        type(tensor),
        tensor.shape,
        tensor.dtype,
        tensor.device,
        tensor.layout,
        tensor.stride() if strided else None,
        marks,
    )


def site_of(
    request: object,
    program: Program | str,
    values: Mapping[str, Any],
    sources: Sequence[str],
    indices: Sequence[str],
    target: str = "",
) -> Site | None:
    """A site for a call that was just made the long way, where there can be one: index values are
    not to be looked at again.
    """
    if (
        isinstance(program, str)
        or program.promote
        or program.problem.device.type == "cpu"
        or settings.check == "always"
    ):
        return None
    if any(type(v) not in PLAIN or v.is_neg() for v in values.values()) or any(
        known(values[name]) is None for name in indices
    ):
        return None
    if target and not all(v.is_contiguous() for v in values.values()):
        return None  # else where a tensor lies is more than its first address and its size
    return Site(request, program, values, sources, indices, target)
