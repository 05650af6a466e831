"""How torch calls ops: which modes are on, what may be skipped, what a tensor is, where a call
comes from.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

T = TypeVar("T")

#: Types that add no behaviour of their own.
PLAIN = (Tensor, Parameter)


# --- which modes are on ---------------------------------------------------------------------------


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


_probed = _probe()


def is_quiet() -> bool:
    """Whether nobody traces, transforms, autocasts or intercepts: ops on plain tensors do what they
    say and nothing else.
    """
    return not torch.compiler.is_compiling() and is_undisturbed()


def is_undisturbed() -> bool:
    """The same, where it is known that nothing is being compiled."""
    if _probed is None:
        return False
    dispatch, function, functorch, autocast, tracing = _probed
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
    return _probed is None or torch.compiler.is_compiling() or _probed[0]() > 0


def is_transformed() -> bool:
    """Whether a transform of torch.func is being applied in eager mode."""
    return _probed is not None and not torch.compiler.is_compiling() and _probed[2]() is not None


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


_graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def in_backward() -> bool:
    """Whether autograd's engine calls; False where this torch does not tell."""
    return _graph_task() != -1


_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current_stream(device: torch.device) -> int:
    """The stream that work for a GPU is put on now, as a number; quicker than the object."""
    index = torch.cuda.current_device() if device.index is None else device.index
    if _raw_stream is None:
        return int(torch.cuda.current_stream(index).cuda_stream)
    return _raw_stream(index)


def stream_getter(device: torch.device) -> Callable[[], int]:
    """`current_stream` of a device as a function without arguments, and without a call of Python's
    where this torch has one; of a CPU always 0.
    """
    if device.type != "cuda":
        return int
    if _raw_stream is None or device.index is None:
        return functools.partial(current_stream, device)
    return functools.partial(_raw_stream, device.index)


def current_device() -> int:
    """The GPU that is current, -1 where there is none."""
    return torch.cuda.current_device() if torch.cuda.is_available() else -1


#: The GPU that is current, where there is one; without the calls of Python's in between.
device_now: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def stream_object(number: int, device: torch.device) -> Any:
    """The stream that `current_stream` gave as a number."""
    if not number:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(number, device)  # type: ignore[no-untyped-call]


#: Whether a CUDA graph is captured on the current stream; without the call of Python's in between.
is_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)


#: Loaded where a function may be recorded for ``mode="reduce-overhead"``.
CUDAGRAPH_TREES = "torch._inductor.cudagraph_trees"


def cudagraph_state(device: torch.device) -> str:
    """``warmup`` or ``recording`` while torch.compile(mode="reduce-overhead") runs a function so on
    this device; '' otherwise, or where torch does not tell.
    """
    trees = sys.modules.get(CUDAGRAPH_TREES)  # not loaded: nothing is recorded
    if trees is None:
        return ""
    try:
        # Functions are warmed up and recorded on a stream that is current at no other time, and
        # that is never the default one: which is told without looking for who records.
        if not current_stream(device):
            return ""
        index = torch.cuda.current_device() if device.index is None else device.index
        manager = _tree_manager(trees, index)
        if manager is None or torch.cuda.current_stream(device) != manager.stream:
            return ""
        return "recording" if torch.cuda.is_current_stream_capturing() else "warmup"
    except (AttributeError, TypeError, RuntimeError, AssertionError):
        return ""


def _tree_manager(trees: Any, index: int) -> Any:
    """What records graphs on a device, for this thread; None where nobody has."""
    containers = getattr(getattr(trees, "local", None), "tree_manager_containers", None)
    if containers is None:  # a thread of autograd's, or another version of torch
        return trees.get_manager(index, create_if_none_exists=False)
    found = containers.get(index)  # as torch's own does, without a lock and making nothing
    return None if found is None else found.tree_manager


def is_recorded(device: torch.device) -> bool:
    """Whether what is launched now becomes part of a CUDA graph, or lies in the memory of one."""
    if device.type != "cuda":
        return False
    if is_capturing():
        return True
    return CUDAGRAPH_TREES in sys.modules and bool(cudagraph_state(device))


def elsewhere(device: torch.device, function: Callable[[], T]) -> T:
    """Call a function in a thread and on a stream of its own, so that what it allocates does not
    lie in the memory of a CUDA graph that is being warmed up.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with torch.cuda.device(device), torch.cuda.stream(stream):
                results.append(function())
            stream.synchronize()
        except BaseException as error:
            errors.append(error)

    torch.cuda.current_stream(device).synchronize()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def renew_in_children(lock: Any) -> None:
    """Let a forked process begin with a lock that is free: a thread that held it is not there to
    let go of it.
    """
    if hasattr(os, "register_at_fork") and hasattr(lock, "_at_fork_reinit"):
        os.register_at_fork(after_in_child=lock._at_fork_reinit)


# --- calls on plain terms -------------------------------------------------------------------------


def is_plain_call(values: Iterable[object]) -> bool:
    """Whether a call may skip the dispatcher: all is quiet, and no tensor is of a subclass."""
    if _probed is None or torch.compiler.is_compiling():
        return False
    dispatch, function, functorch, autocast, tracing = _probed  # as `is_undisturbed`
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
    if _probed is None or torch.compiler.is_compiling():
        return False
    dispatch, function, functorch, _, tracing = _probed
    quiet = not (dispatch() or function()) and functorch() is None and tracing() is None
    if not quiet or forward_ad._current_level >= 0:
        return False
    for value in values:  # noqa: SIM110  # on the path of every call
        if type(value) not in PLAIN and isinstance(value, Tensor):
            return False
    return True


#: Whether autocast is on, for some device; False where this torch does not tell.
autocasts: Callable[[], bool] = (lambda: False) if _probed is None else _probed[3]


class without_autocast:  # a context, as torch.no_grad is
    """No autocast, for a while, nor gradients where ``grad`` says so. Quicker than
    `torch.autocast`, and leaves its cache alone.
    """

    __slots__ = ("grad", "on")

    def __init__(self, grad: bool = True) -> None:
        self.grad = grad or not torch.is_grad_enabled()  # whether they stay as they are

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
    seen = compiling or _probed is None or _probed[0]() > 0  # as `is_intercepted`
    if seen and type(source) in PLAIN and not torch.compiler.is_dynamo_compiling():
        return _unseen()
    if compiling:
        return _NOTHING
    transformed = _probed is not None and _probed[2]() is not None  # without a call
    if transformed or torch.is_inference_mode_enabled():
        stack = ExitStack()
        stack.enter_context(without_autocast())
        stack.enter_context(_untransformed())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        return stack
    if _probed is not None and _probed[3]():  # autocast
        return without_autocast(grad=False)
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


class _NoGrad:
    """`torch.no_grad`, entered where gradients are enabled, without what makes it a decorator."""

    __slots__ = ()

    def __enter__(self) -> None:
        set_grad(False)

    def __exit__(self, *error: object) -> None:
        set_grad(True)


_grad_enabled: Callable[[], bool] = torch.is_grad_enabled
#: Whether gradients are recorded from now on; without what makes torch's own a decorator.
set_grad: Callable[[bool], object] = getattr(torch._C, "_set_grad_enabled", torch.set_grad_enabled)
_NOTHING, _NO_GRAD = nullcontext(), _NoGrad()


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` where no transform of torch.func is active: the part of it that is
    compiled. torch's own checks for transforms take longer than recording the call.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[misc,no-any-return]


_will_run: Any = getattr(torch._C, "_will_engine_execute_node", None)


def wanted_gradients(ctx: Any) -> tuple[bool, ...]:
    """In the ``backward`` of a function of autograd, for all that it was applied to: whether the
    pass that runs is for its gradient. ``ctx.needs_input_grad`` tells what requires one at all, as
    weights do while the pass is one for positions alone.
    """
    required: tuple[bool, ...] = ctx.needs_input_grad
    if _will_run is None:
        return required
    nodes = [node for node, _ in getattr(ctx, "next_functions", ()) if node is not None]
    if len(nodes) != sum(required):
        return required
    found, rest = [], iter(nodes)
    for requires in required:
        if requires:
            try:
                requires = bool(_will_run(next(rest)))
            except (RuntimeError, TypeError):  # of what a pass ends at, or no pass that torch knows
                requires = True
        found.append(requires)
    return tuple(found)


def device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """The device of a tensor as the current one; nothing is entered where it is."""
    device = tensor.device
    here = device.type != "cuda" or device.index == device_now()
    return _NOTHING if here else torch.cuda.device(device)


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether no tensor is of a subclass with behaviour of its own."""
    for tensor in tensors:  # noqa: SIM110  # on the path of every call
        if type(tensor) not in PLAIN:
            return False
    return True


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
        if not usual or _probed is None or profiled() is not False or hash(op) != hash(op._op):
            return False
        op._op = _Shortened(op._op, quick, profiled, _probed, gives)
    except (AttributeError, OSError, TypeError):
        return False
    return True


# --- tensors --------------------------------------------------------------------------------------


def kinds_guard(values: Sequence[object], *, exact: bool) -> Callable[..., bool]:
    """Tells whether other values are like these: numbers of the same type, and tensors of the same
    type, dtype, device, rank, marks of views and need of a gradient; where ``exact``, of the same
    sizes and strides.
    """
    if all(isinstance(v, Tensor) for v in values):
        guard = _tensor_guard([v for v in values if isinstance(v, Tensor)], exact=exact)
        if guard is not None:
            return guard
    wanted = tuple(_kind(v, exact) for v in values)

    def alike(*others: object) -> bool:
        return wanted == tuple([_kind(v, exact) for v in others])

    return alike


def _kind(value: object, exact: bool) -> tuple[Any, ...]:
    if not isinstance(value, Tensor):
        fits = isinstance(value, int) and -(2**63) <= value < 2**63
        return type(value), fits
    if isinstance(
        value, UninitializedParameter | UninitializedBuffer
    ):  # which has nothing to be compared
        return type(value), False
    marks = value.requires_grad, value.is_inference(), value.is_neg(), value.is_conj()
    kind = type(value), value.dtype, value.device, value.layout, value.dim(), marks
    return (*kind, value.shape, value.stride()) if exact else kind


def _tensor_guard(tensors: Sequence[Tensor], *, exact: bool) -> Callable[..., bool] | None:
    """The same in one call of torch's; None where this torch has no such thing, or one that does
    not tell.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes: Any = [list(t.shape) if exact else [None] * t.dim() for t in tensors]
        strides: Any = [list(t.stride()) if exact else [None] * t.dim() for t in tensors]
        check: Callable[..., bool] = TensorGuards(
            *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
        ).check
        other = torch.empty(2, 3, 5, 7, 11, device="meta")
        usable = check(*tensors) is True and not any(
            check(*tensors[:k], other, *tensors[k + 1 :]) for k in range(len(tensors))
        )
    except Exception:
        return None
    return check if usable else None


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A contiguous tensor without values, made as `maker` makes them."""
    quick = strided_makers().get(device.type)
    if quick is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if len(shape) == 1:
        return quick(shape, (1,), dtype)
    if len(shape) == 2:
        return quick(shape, (shape[1], 1), dtype)
    if len(shape) == 3:
        return quick(shape, (shape[1] * shape[2], shape[2], 1), dtype)
    return quick(shape, tuple([math.prod(shape[d + 1 :]) for d in range(len(shape))]), dtype)


def empties(
    dtype: torch.dtype, device: torch.device, *shapes: tuple[int, ...]
) -> tuple[Tensor, ...]:
    """Several tensors without values, of one or two dimensions."""
    quick = strided_makers().get(device.type)
    if quick is None:
        return tuple([torch.empty(shape, dtype=dtype, device=device) for shape in shapes])
    found = []
    for shape in shapes:
        found.append(quick(shape, (1,) if len(shape) == 1 else (shape[1], 1), dtype))
    return tuple(found)


def maker(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """Makes contiguous tensors without values, on the current device where that is a GPU, in the
    quickest way that this torch has.
    """
    strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    quick = strided_makers().get(device.type)
    if quick is not None:
        return functools.partial(quick, shape, strides, dtype)
    return functools.partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)


@functools.cache
def strided_makers() -> dict[str, Callable[..., Tensor]]:
    """By device, what compiled code of TorchInductor makes its tensors with; nothing where this
    torch has no such thing.
    """
    try:
        from torch._C._dynamo import guards

        found = {kind: getattr(guards, f"_empty_strided_{kind}") for kind in ("cpu", "cuda")}
        made = found["cpu"]((2, 3), (3, 1), torch.float64)
        usable = (
            made.shape == (2, 3)
            and made.stride() == (3, 1)
            and made.dtype is torch.float64
            and made.is_cpu
        )
    except Exception:
        return {}
    return found if usable else {}


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor of which ``tensor`` is a view."""
    return tensor._base if tensor._is_view() else None
