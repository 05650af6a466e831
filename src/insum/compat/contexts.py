"""Leaving torch's modes for a while: autograd, inference mode, transforms, autocast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from insum.compat import calls, streams
from insum.compat.calls import PLAIN, is_transformed

#: Whether gradients are recorded from now on; without what makes torch's own a decorator.
set_grad: Callable[[bool], object] = getattr(torch._C, "_set_grad_enabled", torch.set_grad_enabled)


class _NoGrad:
    """`torch.no_grad`, entered where gradients are enabled, without what makes it a decorator."""

    __slots__ = ()

    def __enter__(self) -> None:
        set_grad(False)

    def __exit__(self, *error: object) -> None:
        set_grad(True)


_NOTHING, _NO_GRAD = nullcontext(), _NoGrad()


class without_autocast:  # a context, as torch.no_grad is
    """No autocast, for a while, nor gradients where ``grad`` is set to False. Quicker than
    `torch.autocast`, and leaves its cache alone.
    """

    grad = True  # whether they stay as they are: no argument, which would be a call more

    def __enter__(self) -> None:
        on: list[str] = []
        for device in ("cuda", "cpu"):  # a loop: before Python 3.12 a comprehension is a call
            if torch.is_autocast_enabled(device):
                on.append(device)
                torch.set_autocast_enabled(device, False)
        self.on = on
        if not self.grad:
            set_grad(False)

    def __exit__(self, *_: object) -> None:
        for device in self.on:
            torch.set_autocast_enabled(device, True)
        if not self.grad:
            set_grad(True)


def untracked(
    source: Tensor | None = None, *, eager: bool = False
) -> AbstractContextManager[object]:
    """Neither autograd nor inference mode, a transform of torch.func or autocast, for what is kept:
    what is made under one of them could not be used outside of it. Nor a mode that sees every op,
    where it is made of a ``source`` that has values, as the constants of a program that is being
    exported have. Entering nothing is quicker, where nothing has to be changed. ``eager``: it is
    known that nothing is being compiled.
    """
    compiling = not eager and torch.compiler.is_compiling()
    seen = compiling or calls.probed is None or calls.probed[0]() > 0  # as `is_intercepted`
    if seen and type(source) in PLAIN and not torch.compiler.is_dynamo_compiling():
        return _unseen()
    if compiling:
        return _NOTHING
    transformed = calls.probed is not None and calls.probed[2]() is not None  # without a call
    if transformed or torch.is_inference_mode_enabled():
        stack = ExitStack()
        stack.enter_context(without_autocast())
        stack.enter_context(_untransformed())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        return stack
    if calls.probed is not None and calls.probed[3]():  # autocast
        plain = without_autocast()
        plain.grad = not torch.is_grad_enabled()
        return plain
    return _NO_GRAD if torch.is_grad_enabled() else _NOTHING


def _unseen() -> AbstractContextManager[object]:
    """No mode that sees every op, where this torch lets one leave them for a while; nor gradients,
    which one that sees every function would see otherwise.
    """
    try:
        from torch._C import DisableTorchFunction
        from torch.utils._python_dispatch import _disable_current_modes
    except ImportError:
        return _NOTHING
    stack = ExitStack()
    stack.enter_context(DisableTorchFunction())
    stack.enter_context(_disable_current_modes())
    stack.enter_context(torch.no_grad())
    return stack


def _untransformed() -> AbstractContextManager[object]:
    """No transform of torch.func, where this torch lets one leave them for a while."""
    if not is_transformed():
        return nullcontext()
    try:
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

        return temporarily_clear_interpreter_stack()
    except ImportError:
        return nullcontext()


def without_levels(values: Tensor) -> Tensor:
    """Integers as they are outside of the gradients of torch.func, which do not concern them;
    what vmap maps over stays what it is.
    """
    if torch.compiler.is_compiling() or not is_transformed():
        return values
    try:
        functions: Any = torch._C._functorch
        while functions.is_gradtrackingtensor(values):
            values = functions.get_unwrapped(values)
    except AttributeError:
        pass
    return values


def outlived(tensors: Sequence[Any]) -> Sequence[Any]:
    """Tensors that a transform of torch.func wrapped, as they are after its end: what was saved
    inside may be asked for later, as by the function that `torch.func.vjp` gives.
    """
    unwrap: Any = getattr(getattr(torch._C, "_functorch", None), "unwrap_if_dead", None)
    if unwrap is None or torch.compiler.is_compiling():
        return tensors
    return [unwrap(one) if isinstance(one, Tensor) else one for one in tensors]


def device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """The device of a tensor as the current one; nothing is entered where it is."""
    device = tensor.device
    here = device.type != "cuda" or device.index == streams.device_now()
    return _NOTHING if here else torch.cuda.device(device)
