"""DTensors: what they are made of, without the checks and the autograd that the public ways of
taking them apart and putting them together come with.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from insum.compat.calls import probed

P = ParamSpec("P")
R = TypeVar("R")
#: Where there are no DTensors until it is imported.
PLACED_HOME = "torch.distributed.tensor"


def is_placed(values: Iterable[object]) -> bool:
    """Whether one of the values is a DTensor. Where torch.distributed.tensor was never imported,
    none is.
    """
    home = sys.modules.get(PLACED_HOME)
    kind = getattr(home, "DTensor", None)
    if kind is None:
        return False
    for value in values:  # noqa: SIM110  # on the path of every call that is not plain
        if isinstance(value, kind):
            return True
    return False


def replicated(value: Tensor, mesh: Any) -> Tensor:
    """A tensor that every rank has, as a DTensor. Differentiable."""
    from torch.distributed.tensor import DTensor, Replicate

    placements = [Replicate()] * mesh.ndim
    if value.requires_grad or torch.compiler.is_compiling():
        return DTensor.from_local(value, mesh, placements, run_check=False)
    return Wrapper(mesh, placements, value.shape)(value)


def beside(values: dict[str, Any], own: Iterable[str]) -> dict[str, Any]:
    """Values among which those that are named are on every rank, as DTensors where others are."""
    if not is_placed(values.values()):
        return values
    mesh = next(value.device_mesh for value in values.values() if is_placed((value,)))
    found = dict(values)
    for name in own:
        if isinstance(found[name], Tensor) and not is_placed((found[name],)):
            found[name] = replicated(found[name], mesh)
    return found


def is_recordable() -> bool:
    """Whether autograd may be told of a call by a function of its own: no transform, no autocast,
    no tracer, nothing compiled. Modes that see single ops may be on.
    """
    if probed is None or torch.compiler.is_compiling():
        return False
    _, _, functorch, autocast, tracing = probed
    levels = forward_ad._current_level
    return functorch() is None and not autocast() and tracing() is None and levels < 0


def spec_of(value: Any) -> Any:
    """Mesh, placements, shape, strides and dtype of a DTensor, as something that can be compared
    quickly.
    """
    found = getattr(value, "_spec", None)
    if found is not None:
        return found
    return value.device_mesh, tuple(value.placements), value.shape, value.stride(), value.dtype


def local_of(value: Any) -> Tensor:
    """The part of a DTensor that lies here, finished, and with no part in autograd."""
    local: Any = getattr(value, "_local_tensor", None)
    if local is None:
        with torch.no_grad():
            local = value.to_local()
    wait: Callable[[], Tensor] | None = getattr(local, "wait", None)  # of a collective under way
    return local if wait is None else wait()


class Wrapper:
    """Makes DTensors of one mesh, placement, shape and dtype out of their local parts."""

    __slots__ = ("_mesh", "_placements", "_shape", "_specs", "_strides")

    def __init__(self, mesh: Any, placements: Sequence[Any], shape: Sequence[Any]) -> None:
        self._mesh, self._placements, self._shape = mesh, tuple(placements), torch.Size(shape)
        strides, step = [], 1
        for size in reversed(self._shape):
            strides.append(step)
            step = step * max(size, 1)
        self._strides = tuple(reversed(strides))
        self._specs: dict[torch.dtype, Any] = {}

    def __call__(self, local: Tensor) -> Tensor:
        """A DTensor without a history."""
        make, spec = _maker(), self._specs.get(local.dtype)
        if make is None:
            with torch.no_grad():
                return self._publicly(local)
        if spec is None:
            made = make[1](self._shape, self._strides, local.dtype)
            spec = self._specs[local.dtype] = make[2](
                self._mesh, self._placements, tensor_meta=made
            )
        # past __init__, which does nothing but keep Dynamo out
        wrapped: Tensor = make[0].__new__(make[0], local, spec, requires_grad=False)
        return wrapped

    def _publicly(self, local: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            local,
            self._mesh,
            self._placements,
            run_check=False,
            shape=self._shape,
            stride=self._strides,
        )


@functools.cache
def _maker() -> tuple[Any, Any, Any] | None:
    """The constructor of DTensors and of what it takes, where this torch has them as expected."""
    try:
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        return DTensor, TensorMeta, DTensorSpec
    except ImportError:
        return None


def replicates_plain_tensors() -> bool:
    """Whether `torch.distributed.tensor.experimental.implicit_replication` is on."""
    from torch.distributed.tensor import DTensor

    dispatcher = getattr(DTensor, "_op_dispatcher", None)
    return bool(getattr(dispatcher, "_allow_implicit_replication", False))


def for_each_rank(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``function`` as it is called on one rank; where ranks are simulated in one process, once for
    each of them.
    """
    simulator = sys.modules.get("torch.distributed._local_tensor")
    wrapped: Callable[[Any], Any] | None = getattr(simulator, "maybe_run_for_local_tensor", None)
    return function if wrapped is None else wrapped(function)


def while_tracing(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which Dynamo calls when it comes by, instead of tracing it. What
    `torch.compiler.assume_constant_result` does, without loading Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def has_placements() -> bool:
    """Whether there can be DTensors."""
    return PLACED_HOME in sys.modules
