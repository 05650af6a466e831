"""How torch calls ops: which modes are on, and what may be skipped where none is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

#: Types that add no behaviour of their own.
PLAIN = (Tensor, Parameter)


_Probes: TypeAlias = tuple[
    Callable[[], int], Callable[[], int], Callable[[], Any], Callable[[], bool], Callable[[], Any]
]


def _probe() -> _Probes | None:
    """Functions that tell which of torch's modes are on, or None where this torch has not got them
    all.
    """
    try:
        c: Any = torch._C
        found = (
            c._len_torch_dispatch_stack,
            c._len_torch_function_stack,
            c._functorch.peek_interpreter_stack,
            c._is_any_autocast_enabled,
            c._get_tracing_state,
        )
        usable = (
            found[0]() >= 0
            and found[1]() >= 0
            and found[2]() is None
            and found[3]() in (True, False)
            and found[4]() is None
        )
        usable = usable and isinstance(forward_ad._current_level, int)
    except Exception:
        return None
    return found if usable else None


#: What tells of the dispatcher's modes, those of functions, transforms, autocast and tracing; None
#: where this torch does not, so that every call goes through the registered op.
probed = _probe()


def is_undisturbed() -> bool:
    """Whether nobody traces, transforms, autocasts or intercepts: ops on plain tensors do what they
    say and nothing else. For callers who know that nothing is being compiled.
    """
    if probed is None:
        return False
    dispatch, function, functorch, autocast, tracing = probed
    return (
        not (dispatch() or function() or autocast())
        and functorch() is None
        and forward_ad._current_level < 0
        and tracing() is None
    )


#: Whether a profiler of torch's listens, NVTX ranges among them.
is_profiled: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: False)


def is_intercepted() -> bool:
    """Whether a mode of torch's sees every op, as that of fake tensors does."""
    return probed is None or torch.compiler.is_compiling() or probed[0]() > 0


def is_transformed() -> bool:
    """Whether a transform of torch.func is being applied in eager mode."""
    return probed is not None and not torch.compiler.is_compiling() and probed[2]() is not None


_deterministic: Callable[[], Any] = getattr(
    torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled
)
_precision: Callable[[], Any] = getattr(
    torch._C, "_get_float32_matmul_precision", torch.get_float32_matmul_precision
)


def modes_now(settings: Any) -> tuple[Any, ...]:
    """What decides a call besides its arguments, as it is now."""
    values = settings._block.get() or settings._process  # `settings.values` without the call
    return values, torch.get_default_dtype(), _deterministic(), _precision()


# --- calls on plain terms -------------------------------------------------------------------------


def is_plain_call(values: Iterable[object]) -> bool:
    """Whether a call may skip the dispatcher: nothing disturbs it, and no tensor is of a
    subclass.
    """
    if probed is None or torch.compiler.is_compiling():
        return False
    dispatch, function, functorch, autocast, tracing = probed  # as `is_undisturbed`
    quiet = not (dispatch() or function() or autocast()) and functorch() is None
    if not quiet or forward_ad._current_level >= 0 or tracing() is not None:
        return False
    for value in values:  # noqa: SIM110  # on the path of every call
        if type(value) not in PLAIN and isinstance(value, Tensor):
            return False
    return True


def is_eager_call(values: Iterable[object]) -> bool:
    """The same, autocast or not: it changes what ops over floating-point numbers do, and nothing
    else.
    """
    if probed is None or torch.compiler.is_compiling():
        return False
    dispatch, function, functorch, _, tracing = probed
    quiet = not (dispatch() or function()) and functorch() is None and tracing() is None
    if not quiet or forward_ad._current_level >= 0:
        return False
    for value in values:  # noqa: SIM110  # on the path of every call
        if type(value) not in PLAIN and isinstance(value, Tensor):
            return False
    return True


#: Whether autocast is on, for some device; False where this torch does not tell.
autocasts: Callable[[], bool] = (lambda: False) if probed is None else probed[3]


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether no tensor is of a subclass with behaviour of its own."""
    for tensor in tensors:  # noqa: SIM110  # on the path of every call
        if type(tensor) not in PLAIN:
            return False
    return True


_grad_enabled: Callable[[], bool] = torch.is_grad_enabled


class _Shortened:
    """What an op calls: first ``quick``, then the dispatcher as before. Equal hashes, because an op
    is found in tables by that of what it calls.
    """

    __slots__ = ("dispatch", "gives", "modes", "profiled", "quick")

    def __init__(
        self,
        dispatch: Any,
        quick: Callable[..., Any],
        profiled: Callable[[], bool],
        modes: _Probes,
        gives: bool,
    ) -> None:
        self.dispatch, self.quick, self.profiled = dispatch, quick, profiled
        self.modes, self.gives = modes, gives

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        dispatch, function, functorch, autocast, tracing = self.modes
        if (
            not (named or _grad_enabled() or self.profiled())
            and not (dispatch() or function() or autocast())  # as `is_undisturbed`
            and functorch() is None
            and forward_ad._current_level < 0
            and tracing() is None
        ):
            found = self.quick(*arguments)
            if found is not None:
                return found if self.gives else None
        return self.dispatch(*arguments, **named)

    def __hash__(self) -> int:
        return hash(self.dispatch)


def shorten(op: Any, quick: Callable[..., Any], *, gives: bool = True) -> bool:
    """Let ``quick`` be asked before the dispatcher when one of insum's own ops is called on plain
    terms: no gradients, modes, transforms or profilers.

    What it gives is the result, unless the op ``gives`` none; None leaves the call to the
    dispatcher. Says whether this torch lets an op be called so. An op with a Python kernel costs
    the dispatcher as much time as everything else about a launch.
    """
    try:
        usual = "return self._op(*args, **kwargs)" in inspect.getsource(type(op).__call__)
        profiled = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
        if not usual or probed is None or profiled() is not False or hash(op) != hash(op._op):
            return False
        op._op = _Shortened(op._op, quick, profiled, probed, gives)
    except (AttributeError, OSError, TypeError):
        return False
    return True
