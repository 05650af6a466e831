"""The only private names of torch that insum uses, each behind a check. Without them every call goes through the registered op."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

#: Types that add no behaviour of their own.
PLAIN = (Tensor, Parameter)


def _probe() -> tuple[Callable[[], int], Callable[[], int], Callable[[], Any], Callable[[], bool], Callable[[], Any]] | None:
    """Functions that tell which of torch's modes are on, or None where this torch has not got them all."""
    try:
        c: Any = torch._C
        found = c._len_torch_dispatch_stack, c._len_torch_function_stack, c._functorch.peek_interpreter_stack, c._is_any_autocast_enabled, c._get_tracing_state
        usable = found[0]() >= 0 and found[1]() >= 0 and found[2]() is None and found[3]() in (True, False) and found[4]() is None
        usable = usable and isinstance(forward_ad._current_level, int)
    except Exception:
        return None
    return found if usable else None


_probed = _probe()


def is_quiet() -> bool:
    """Whether nobody traces, transforms, autocasts or intercepts: ops on plain tensors do what they say and nothing else."""
    return not torch.compiler.is_compiling() and is_undisturbed()


def is_undisturbed() -> bool:
    """The same, where it is known that nothing is being compiled."""
    if _probed is None:
        return False
    dispatch, function, functorch, autocast, tracing = _probed
    return not (dispatch() or function() or autocast()) and functorch() is None and forward_ad._current_level < 0 and tracing() is None


def is_plain_call(values: Iterable[object]) -> bool:
    """Whether a call may skip the dispatcher: all is quiet, and no tensor is of a subclass."""
    return is_quiet() and all(type(v) in PLAIN or not isinstance(v, Tensor) for v in values)


def is_transformed() -> bool:
    """Whether a transform of torch.func is being applied in eager mode."""
    return _probed is not None and not torch.compiler.is_compiling() and _probed[2]() is not None


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor of which ``tensor`` is a view."""
    return tensor._base if tensor._is_view() else None


def compiled_graphs() -> int:
    """How many graphs ``torch.compile`` has compiled in this process, recompilations included; 0 where this torch does not tell."""
    utils = sys.modules.get("torch._dynamo.utils")  # not loaded: nothing was compiled
    try:
        return int(utils.counters["stats"]["unique_graphs"]) if utils is not None else 0
    except (AttributeError, KeyError, TypeError, ValueError):
        return 0


def bsr_kernels() -> Any:
    """PyTorch's Triton kernels for BSR matrices, as a namespace of ``mm``, ``sampled`` and ``minimize`` (their tuner); a text says why they are not there."""
    from types import SimpleNamespace

    try:
        from torch.sparse import _triton_ops as ops
        from torch.sparse import _triton_ops_meta as meta

        return SimpleNamespace(mm=ops.bsr_dense_addmm, sampled=ops.sampled_addmm, minimize=meta.minimize)
    except (ImportError, AttributeError) as error:
        return f"this torch has no Triton kernels for BSR ({error})"
