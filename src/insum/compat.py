"""The only private names of torch that insum uses, each behind a check. Without them every call goes through the registered op."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Sequence
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


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether no tensor is of a subclass with behaviour of its own."""
    return all([type(t) in PLAIN for t in tensors])  # noqa: C419  # a list is quicker, and this is asked in every call


class _Shortened:
    """What an op calls: first ``quick``, then the dispatcher as before. Equal hashes, because an op is found in tables by that of what it calls."""

    __slots__ = ("dispatch", "profiled", "quick")

    def __init__(self, dispatch: Any, quick: Callable[..., tuple[Any] | None], profiled: Callable[[], bool]) -> None:
        self.dispatch, self.quick, self.profiled = dispatch, quick, profiled

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if not named and not torch.is_grad_enabled() and not self.profiled() and is_undisturbed():
            found = self.quick(*arguments)
            if found is not None:
                return found[0]
        return self.dispatch(*arguments, **named)

    def __hash__(self) -> int:
        return hash(self.dispatch)


def shorten(op: Any, quick: Callable[..., tuple[Any] | None]) -> bool:
    """Let ``quick`` be asked before the dispatcher when one of insum's own ops is called on plain terms: no gradients, modes, transforms or profilers.

    What it gives, in a tuple, is the result; None leaves the call to the dispatcher. Says whether this torch lets an op be called so. An op with a
    Python kernel costs the dispatcher as much time as everything else about a launch.
    """
    try:
        usual = "return self._op(*args, **kwargs)" in inspect.getsource(type(op).__call__)
        profiled = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
        if not usual or _probed is None or profiled() is not False or hash(op) != hash(op._op):
            return False
        op._op = _Shortened(op._op, quick, profiled)
    except (AttributeError, OSError, TypeError):
        return False
    return True


def is_transformed() -> bool:
    """Whether a transform of torch.func is being applied in eager mode."""
    return _probed is not None and not torch.compiler.is_compiling() and _probed[2]() is not None


def kinds_guard(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """Tells, in one call, whether other tensors are like these in type, dtype, device, sizes, strides, views' marks and need of a gradient.

    None where this torch has no such thing, or one that does not tell.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes: Any = [list(t.shape) for t in tensors]
        strides: Any = [list(t.stride()) for t in tensors]
        check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        other = torch.empty(2, 3, 5, 7, 11, device="meta")
        usable = check(*tensors) is True and not any(check(*tensors[:k], other, *tensors[k + 1 :]) for k in range(len(tensors)))
    except Exception:
        return None
    return check if usable else None


def maker(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """Makes contiguous tensors without values, on the current device where that is a GPU, in the quickest way that this torch has."""
    strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    quick = _strided().get(device.type)
    if quick is not None:
        return functools.partial(quick, shape, strides, dtype)
    return functools.partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)


@functools.cache
def _strided() -> dict[str, Callable[..., Tensor]]:
    """By device, what compiled code of TorchInductor makes its tensors with; nothing where this torch has no such thing."""
    try:
        from torch._C._dynamo import guards

        found = {kind: getattr(guards, f"_empty_strided_{kind}") for kind in ("cpu", "cuda")}
        made = found["cpu"]((2, 3), (3, 1), torch.float64)
        usable = made.shape == (2, 3) and made.stride() == (3, 1) and made.dtype is torch.float64 and made.is_cpu
    except Exception:
        return {}
    return found if usable else {}


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


# --- TorchInductor -----------------------------------------------------------------------------------------------------------


@functools.cache
def _inductor_has() -> frozenset[str]:
    """The options that this TorchInductor knows."""
    try:
        import torch._inductor

        return frozenset(torch._inductor.list_options())
    except (ImportError, AttributeError):
        return frozenset()


def inductor_options(native_matmul: bool) -> dict[str, Any]:
    """Options of `torch.compile` for the graph of one statement; what this torch does not know is left out.

    Index values have been checked already, so that gathers assert nothing. CUDA graphs of its own would overwrite earlier results.
    """
    wanted = {"triton.native_matmul": native_matmul, "assert_indirect_indexing": False, "triton.cudagraphs": False}
    return {name: value for name, value in wanted.items() if name in _inductor_has()}


def has_native_matmul() -> bool:
    """Whether TorchInductor can write matrix products into the kernels that it generates."""
    return "triton.native_matmul" in _inductor_has()


def free_sizes() -> contextlib.AbstractContextManager[Any]:
    """While this lasts, sizes that happen to be equal are not taken to be the same size; does nothing where torch cannot be told so."""
    try:
        from torch.fx.experimental import _config

        return _changed(_config, "use_duck_shape", False)
    except (ImportError, AttributeError):
        pass
    return contextlib.nullcontext()


def _changed(config: Any, name: str, value: bool) -> contextlib.AbstractContextManager[Any]:
    """A scope in which one of torch's switches has another value. Raises AttributeError where there is no such switch."""
    if not isinstance(getattr(config, name), bool):
        raise AttributeError(name)
    scope: contextlib.AbstractContextManager[Any] = config.patch(**{name: value})
    return scope


_LIMITS = ("FailOnRecompileLimitHit", "RecompileLimitExceeded")


def is_recompile_limit(error: Exception) -> bool:
    """Whether torch gave up because a function has been compiled for too many kinds of arguments."""
    return type(error).__name__ in _LIMITS


@functools.cache
def compile_errors() -> tuple[type[Exception], ...]:
    """What `torch.compile` raises when it cannot compile; all of it is raised before compiled code runs."""
    try:
        from torch._dynamo import exc
    except ImportError:
        return (RuntimeError,)
    found = tuple(kind for name in ("TorchDynamoException", *_LIMITS) if isinstance(kind := getattr(exc, name, None), type) and issubclass(kind, Exception))
    return found or (RuntimeError,)


# --- the backward pass -----------------------------------------------------------------------------------------------------------

_graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def in_backward() -> bool:
    """Whether autograd's engine calls; False where this torch does not tell."""
    return _graph_task() != -1


# --- gradients inside compiled functions ---------------------------------------------------------------------------------------


def traced_gradients() -> contextlib.AbstractContextManager[Any]:
    """While this lasts, ``torch.compile`` traces ``torch.autograd.grad`` instead of breaking the graph; does nothing where torch cannot."""
    try:
        from torch._dynamo import config

        return _changed(config, "trace_autograd_ops", True)
    except (ImportError, AttributeError):
        pass
    return contextlib.nullcontext()


# --- exported programs -------------------------------------------------------------------------------------------------------


def aot_packager() -> Callable[..., Any] | None:
    """`torch._inductor.aoti_compile_and_package`, or None where this torch has not got it."""
    try:
        import torch._inductor
    except ImportError:
        return None
    return getattr(torch._inductor, "aoti_compile_and_package", None)


def cxx_compiler() -> str | None:
    """The C++ compiler that TorchInductor uses here; None where there is none, or where it cannot be asked."""
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        return str(get_cpp_compiler())
    except Exception:  # TorchInductor says in many ways that there is no compiler
        return None


def functional_mode() -> type | None:
    """The mode under which programs are functionalised, for which an op may register a rule; None where that is not to be had."""
    try:
        from torch._subclasses.functional_tensor import FunctionalTensorMode
    except ImportError:
        return None
    return FunctionalTensorMode if hasattr(torch.library, "register_torch_dispatch") else None


def size_hint(size: torch.SymInt) -> int:
    """The size that a symbol had when it was traced, or 0 where that is not known. Asking ties the symbol to nothing."""
    hint = getattr(getattr(size, "node", None), "hint", None)
    return hint if isinstance(hint, int) and hint > 0 else 0


def wrap_triton() -> Callable[[Any], Any] | None:
    """What lets a tracer see a Triton kernel, so that TorchInductor compiles it into its own code; None where torch has not got it."""
    return getattr(torch.library, "wrap_triton", None)


# --- CUDA graphs that torch.compile records ------------------------------------------------------------------------------------


def cudagraph_state(device: torch.device) -> str:
    """``warmup`` or ``recording`` while torch.compile(mode="reduce-overhead") runs a function so on this device; '' otherwise, or where torch does not tell."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")  # not loaded: nothing is recorded
    if trees is None:
        return ""
    try:
        manager = trees.get_manager(torch.cuda.current_device() if device.index is None else device.index, create_if_none_exists=False)
        # Functions are warmed up and recorded on a stream that is current at no other time.
        if manager is None or torch.cuda.current_stream(device) != manager.stream:
            return ""
        return "recording" if torch.cuda.is_current_stream_capturing() else "warmup"
    except (AttributeError, TypeError, RuntimeError, AssertionError):
        return ""


# --- rivals of benchmarks ----------------------------------------------------------------------------------------------------


def bsr_kernels() -> Any:
    """PyTorch's Triton kernels for BSR matrices, as a namespace of ``mm``, ``sampled`` and ``minimize`` (their tuner); a text says why they are not there."""
    from types import SimpleNamespace

    try:
        from torch.sparse import _triton_ops as ops
        from torch.sparse import _triton_ops_meta as meta

        return SimpleNamespace(mm=ops.bsr_dense_addmm, sampled=ops.sampled_addmm, minimize=meta.minimize)
    except (ImportError, AttributeError) as error:
        return f"this torch has no Triton kernels for BSR ({error})"


# --- the compiler --------------------------------------------------------------------------------------------------------------


def known_true(condition: Any) -> bool:
    """Whether a symbolic truth holds for all values of its symbols. Asks for no guard."""
    if isinstance(condition, bool):
        return condition
    try:
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return bool(statically_known_true(condition))
    except Exception:
        return False


def size_or(size: Any, otherwise: int = 4096) -> int:
    """The number that a symbolic size had when it was traced, or a guess where it comes from data."""
    if isinstance(size, int):
        return size
    try:
        hint = size.node.hint
        return int(hint) if hint is not None else otherwise
    except Exception:
        return otherwise


def is_hinted(size: Any) -> bool:
    """Whether a size was known when it was traced: it does not come from data."""
    return isinstance(size, int) or size_or(size, -1) != -1


def symbols_from_data(value: Any) -> frozenset[Any]:
    """The symbols in a size, or in the shape of a tensor, that stand for numbers that come from data."""
    try:
        from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

        return frozenset(free_unbacked_symbols(value))
    except Exception:
        return frozenset()


def assert_async(condition: Tensor, message: str) -> None:
    """Fail on the device, without waiting for it; where this torch cannot, wait."""
    check = getattr(torch, "_assert_async", None)
    if check is not None:
        check(condition, message)
    elif not bool(condition):
        raise IndexError(message)


def joint_pass(function: Callable[[Any], None], identity: object) -> Any:
    """A pass over Inductor's joint graphs that its caches can tell from others, or None where this torch has no place for one."""
    try:
        from torch._inductor import config
        from torch._inductor.custom_graph_pass import CustomGraphPass

        before = config.joint_custom_pre_pass
    except (ImportError, AttributeError):
        return None

    class Pass(CustomGraphPass):
        """``function``, after whatever pass is there already."""

        def __call__(self, graph: Any) -> None:
            for one in before if isinstance(before, list | tuple) else (before,):
                if one is not None:
                    one(graph)
            function(graph)

        def uuid(self) -> Any:
            others = [getattr(one, "uuid", lambda: None)() for one in (before if isinstance(before, list | tuple) else (before,)) if one is not None]
            return None if any(other is None for other in others) else (str(identity), *map(str, others))

    return Pass()


def inductor(graph: Any, inputs: Any, patches: dict[str, Any]) -> Any:
    """A dynamo graph compiled by Inductor, with some of its configuration changed for this graph alone."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, inputs, config_patches=patches)


def mode_options(mode: str | None, dynamic: bool | None = None) -> dict[str, Any]:
    """What ``torch.compile(mode=...)`` means for Inductor's configuration."""
    if mode in (None, "default"):
        return {}
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode, dynamic))


def aot(graph: Any, inputs: Any, compiler: Callable[[Any, Any], Any], on_joint: Callable[[Any], None]) -> Any:
    """A dynamo graph through AOT autograd as Inductor does it, with its decompositions; ``compiler`` gets forward and backward graphs."""
    from functorch.compile import min_cut_rematerialization_partition  # type: ignore[import-untyped]
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    def partition(joint: Any, arguments: Any, **options: Any) -> Any:
        on_joint(joint.graph)
        joint.recompile()
        return min_cut_rematerialization_partition(joint, arguments, **options)

    def inference(module: Any, arguments: Any) -> Any:
        on_joint(module.graph)
        module.recompile()
        return compiler(module, arguments)

    backend = aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, inference_compiler=inference, partition_fn=partition, decompositions=select_decomp_table()
    )
    return backend(graph, inputs)


def boxed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a list of arguments, as AOT autograd calls them best."""
    from functorch.compile import make_boxed_func

    result: Callable[..., Any] = make_boxed_func(function)
    return result


def exchange_joint_pass(new: Any) -> Any:
    """Put a pass in the place that Inductor has for one; returns what was there."""
    from torch._inductor import config

    old = config.joint_custom_pre_pass
    config.joint_custom_pre_pass = new
    return old


def register_backend(name: str, function: Callable[..., Any]) -> None:
    """Name a backend of ``torch.compile``, unless that name is taken already."""
    from torch._dynamo import list_backends, register_backend

    if name not in list_backends(()):
        register_backend(function, name=name)


def functional_call() -> Any:
    """The operator that calls an op that writes in place on copies, which Inductor leaves out where it can; None where this torch has none."""
    try:
        import torch._higher_order_ops.auto_functionalize  # registers it

        return torch.ops.higher_order.auto_functionalized
    except (ImportError, AttributeError):
        return None


def uses_cuda_graphs() -> bool:
    """Whether what Inductor compiles now will be replayed as a CUDA graph."""
    try:
        from torch._inductor import config

        return bool(config.triton.cudagraphs)
    except (ImportError, AttributeError):
        return False
