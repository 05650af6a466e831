"""Dynamo, AOT autograd and TorchInductor: their options, passes and backends, and what they compile
exported programs with.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

# --- what torch.compile has done, and cannot do ---------------------------------------------------


def compiled_graphs() -> int:
    """How many graphs ``torch.compile`` has compiled in this process, recompilations included; 0
    where this torch does not tell.
    """
    utils = sys.modules.get("torch._dynamo.utils")  # not loaded: nothing was compiled
    try:
        return int(utils.counters["stats"]["unique_graphs"]) if utils is not None else 0
    except (AttributeError, KeyError, TypeError, ValueError):
        return 0


_LIMITS = ("FailOnRecompileLimitHit", "RecompileLimitExceeded")


def is_recompile_limit(error: Exception) -> bool:
    """Whether torch gave up because a function was compiled for too many kinds of arguments."""
    return type(error).__name__ in _LIMITS


@functools.cache
def compile_errors() -> tuple[type[Exception], ...]:
    """What `torch.compile` raises when it cannot compile; all of it is raised before compiled code
    runs.
    """
    try:
        from torch._dynamo import exc
    except ImportError:
        return (RuntimeError,)
    found = tuple(
        kind
        for name in ("TorchDynamoException", *_LIMITS)
        if isinstance(kind := getattr(exc, name, None), type) and issubclass(kind, Exception)
    )
    return found or (RuntimeError,)


# --- options --------------------------------------------------------------------------------------


@functools.cache
def _inductor_has() -> frozenset[str]:
    """The options that this TorchInductor knows."""
    try:
        import torch._inductor

        return frozenset(torch._inductor.list_options())
    except (ImportError, AttributeError):
        return frozenset()


def inductor_knows(option: str) -> bool:
    """Whether TorchInductor has an option of that name; where it tells no names, it may."""
    known = _inductor_has()
    return not known or option.replace("-", "_") in known


def inductor_options(native_matmul: bool) -> dict[str, Any]:
    """Options of `torch.compile` for the graph of one statement; what this torch does not know is
    left out.

    Index values have been checked already, so that gathers assert nothing. CUDA graphs of its own
    would overwrite earlier results.
    """
    wanted = {
        "triton.native_matmul": native_matmul,
        "assert_indirect_indexing": False,
        "triton.cudagraphs": False,
    }
    return {name: value for name, value in wanted.items() if name in _inductor_has()}


def mode_options(mode: str | None, dynamic: bool | None = None) -> dict[str, Any]:
    """What ``torch.compile(mode=...)`` means for Inductor's configuration."""
    if mode in (None, "default"):
        return {}
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode, dynamic))


def uses_cuda_graphs() -> bool:
    """Whether what Inductor compiles now will be replayed as a CUDA graph."""
    try:
        from torch._inductor import config

        return bool(config.triton.cudagraphs)
    except (ImportError, AttributeError):
        return False


def free_sizes() -> contextlib.AbstractContextManager[Any]:
    """While this lasts, sizes that happen to be equal are not taken to be the same size; does
    nothing where torch cannot be told so.
    """
    return _switched("torch.fx.experimental._config", "use_duck_shape", False)


def traced_gradients() -> contextlib.AbstractContextManager[Any]:
    """While this lasts, ``torch.compile`` traces ``torch.autograd.grad`` instead of breaking the
    graph; does nothing where torch cannot.
    """
    return _switched("torch._dynamo.config", "trace_autograd_ops", True)


@contextlib.contextmanager
def traced_sizes_of_data() -> Iterator[None]:
    """While this lasts, ``torch.compile`` traces masks and numbers that are read from tensors
    instead of breaking the graph; does nothing where torch cannot.
    """
    with (
        _switched("torch._dynamo.config", "capture_dynamic_output_shape_ops", True),
        _switched("torch._dynamo.config", "capture_scalar_outputs", True),
    ):
        yield


def _switched(module: str, name: str, value: bool) -> contextlib.AbstractContextManager[Any]:
    """A scope in which one of torch's switches has another value; one that changes nothing where
    there is no such switch.
    """
    with contextlib.suppress(ImportError, AttributeError):
        config = importlib.import_module(module)
        if isinstance(getattr(config, name), bool):
            scope: contextlib.AbstractContextManager[Any] = config.patch(**{name: value})
            return scope
    return contextlib.nullcontext()


# --- passes and backends --------------------------------------------------------------------------


def joint_pass(function: Callable[[Any], None], identity: object) -> Any:
    """A pass over Inductor's joint graphs that its caches can tell from others, or None where this
    torch has no place for one.
    """
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
            others = [
                getattr(one, "uuid", lambda: None)()
                for one in (before if isinstance(before, list | tuple) else (before,))
                if one is not None
            ]
            return (
                None
                if any(other is None for other in others)
                else (str(identity), *map(str, others))
            )

    return Pass()


def exchange_joint_pass(new: Any) -> Any:
    """Put a pass in the place that Inductor has for one; returns what was there."""
    from torch._inductor import config

    old = config.joint_custom_pre_pass
    config.joint_custom_pre_pass = new
    return old


def inductor(graph: Any, inputs: Any, patches: dict[str, Any]) -> Any:
    """A dynamo graph compiled by Inductor, with some of its configuration changed for this graph
    alone.
    """
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, inputs, config_patches=patches)


def aot(
    graph: Any, inputs: Any, compiler: Callable[[Any, Any], Any], on_joint: Callable[[Any], None]
) -> Any:
    """A dynamo graph through AOT autograd as Inductor does it, with its decompositions;
    ``compiler`` gets forward and backward graphs.
    """
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
        fw_compiler=compiler,
        bw_compiler=compiler,
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    return backend(graph, inputs)


def written_inputs(graph: Any) -> frozenset[Any]:
    """What is passed to a traced graph and written to at its end: in the graph, or by whoever calls
    it with what the graph returns.
    """
    nodes = list(graph.nodes)
    written = {
        one
        for node in nodes
        if (schema := _schema(node.target)) is not None
        for argument, declared in zip(node.args, schema.arguments)
        if declared.alias_info is not None and declared.alias_info.is_write
        for one in (argument if isinstance(argument, list | tuple) else (argument,))
    }
    outputs = nodes[-1].meta.get("desc") if nodes else None
    described = [
        one.mutated_input for one in (outputs or ()) if getattr(one, "mutated_input", None)
    ]
    return frozenset(
        node
        for node in nodes
        if node.op == "placeholder" and (node in written or node.meta.get("desc") in described)
    )


def is_view(target: Any) -> bool:
    """Whether a function gives its argument's memory, or parts of it, under another name."""
    schema = _schema(target)
    return target is operator.getitem or (
        schema is not None and any(one.alias_info is not None for one in schema.returns)
    )


def _schema(target: Any) -> Any:
    return target._schema if isinstance(target, torch._ops.OpOverload) else None


def boxed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a list of arguments, as AOT autograd calls them best."""
    from functorch.compile import make_boxed_func

    result: Callable[..., Any] = make_boxed_func(function)
    return result


def register_backend(name: str, function: Callable[..., Any]) -> None:
    """Name a backend of ``torch.compile``, unless that name is taken already."""
    from torch._dynamo import list_backends, register_backend

    if name not in list_backends(()):
        register_backend(function, name=name)


def functional_call() -> Any:
    """The operator that calls an op that writes in place on copies, which Inductor leaves out where
    it can; None where this torch has none.
    """
    try:
        import torch._higher_order_ops.auto_functionalize  # registers it

        return torch.ops.higher_order.auto_functionalized
    except (ImportError, AttributeError):
        return None


# --- exported programs ----------------------------------------------------------------------------


def aot_packager() -> Callable[..., Any] | None:
    """`torch._inductor.aoti_compile_and_package`, or None where this torch has not got it."""
    try:
        import torch._inductor
    except ImportError:
        return None
    return getattr(torch._inductor, "aoti_compile_and_package", None)


def cxx_compiler() -> str | None:
    """The C++ compiler that TorchInductor uses here; None where there is none, or where it cannot
    be asked.
    """
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        return str(get_cpp_compiler())
    except Exception:  # TorchInductor says in many ways that there is no compiler
        return None


def functional_mode() -> type | None:
    """The mode under which programs are functionalised, for which an op may register a rule; None
    where that is not to be had.
    """
    try:
        from torch._subclasses.functional_tensor import FunctionalTensorMode
    except ImportError:
        return None
    return FunctionalTensorMode if hasattr(torch.library, "register_torch_dispatch") else None


def wrap_triton() -> Callable[[Any], Any] | None:
    """What lets a tracer see a Triton kernel, so that TorchInductor compiles it into its own code;
    None where torch has not got it.
    """
    return getattr(torch.library, "wrap_triton", None)
