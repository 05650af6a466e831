"""Forward-mode derivatives: which tensors carry a tangent, and ops that look before autograd does.

An op has no rule of its own for them, and would drop tangents in silence; what is done instead is
done by the kernel that autograd calls first, for below it the transforms of torch.func have taken
the tangents off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def with_tangent(values: Iterable[object]) -> int:
    """The place of the first tensor with a tangent at the present level; -1 where there is none, or
    where this torch does not tell.
    """
    try:
        if forward_ad._current_level < 0 or not torch._C._is_fwd_grad_enabled():
            return -1
        return next((k for k, v in enumerate(values) if _has_tangent(v)), -1)
    except (AttributeError, NameError):
        return -1


def forward_levels() -> int:
    """How many transforms in forward mode there are around a call."""
    try:
        from torch._C._functorch import TransformType, get_interpreter_stack

        return sum(one.key() == TransformType.Jvp for one in get_interpreter_stack() or ())
    except (AttributeError, ImportError):
        return 0


def _has_tangent(value: object) -> bool:
    floating = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    return floating and forward_ad.unpack_dual(value).tangent is not None  # type: ignore[no-untyped-call]


def register_autograd(
    library: Any,
    op: Any,
    first: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup: Callable[..., None] | None = None,
) -> None:
    """Gradients of an op, as `torch.library.register_autograd`; ``first`` sees the arguments of
    each call, and may raise, or give the result where that is not None. Without ``backward`` the op
    has none, as if nothing were registered.
    """
    name = op._opname
    try:
        below = torch._C._after_autograd_keyset

        def without(keyset: Any, *arguments: Any) -> Any:
            return op.redispatch(keyset & below, *arguments)

        kernel = without
        if backward is not None:
            from torch._library.autograd import Info, make_autograd_impl

            kernel = make_autograd_impl(op, Info(backward, setup))
    except (AttributeError, ImportError, TypeError):  # this torch has other names for these
        if backward is not None:
            torch.library.register_autograd(
                f"{op._namespace}::{name}", backward, setup_context=setup, lib=library
            )
        return

    def looking(keyset: Any, *arguments: Any) -> Any:
        found = first(*arguments)
        return kernel(keyset, *arguments) if found is None else found

    library.impl(name, looking, "Autograd", with_keyset=True)
