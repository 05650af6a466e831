"""Exported programs that need no insum to run: statements are written out, and AOTInductor compiles
them into the package.

`torch.export` keeps a statement as one call of insum's op. While a program is functionalised on its
way to a compiler, the op can be replaced by what it does: its graph of torch operations, or, on
GPUs, launches of its generated kernels.

>>> import torch, insum
>>> class Square(torch.nn.Module):
...     def forward(self, x):
...         return insum.insum("y[i] = x[i] * x[i]", x=x)
>>> program = torch.export.export(Square(), (torch.arange(3.0),))
>>> insum.export.decompose(program).module()(torch.arange(3.0))
tensor([0., 1., 4.])
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from insum.call.prepared import is_fusable
from insum.call.request import Request
from insum.call.stages import stages_of
from insum.compat import compiler, cxx_runtime
from insum.errors import UnsupportedError
from insum.graph.lower import lower
from insum.graph.matmul import flattened
from insum.lang.bind import Problem, Value
from insum.ops.encoding import decode_exactly
from insum.settings import settings

__all__ = ["decompose", "package"]

#: TorchInductor's option for libraries that a package is linked with.
_LIBRARIES = "aot_inductor.custom_op_libs"

#: What an op becomes while programs are functionalised: itself (""), its "graph", or its "kernels"
#: where it has some.
_inlining: contextvars.ContextVar[str] = contextvars.ContextVar("insum_inlining", default="")


def decompose(program: ExportedProgram) -> ExportedProgram:
    """The program with every statement written out as torch operations. It can be saved, and loaded
    where there is no insum.

    Args:
        program: What `torch.export.export` gave.

    Returns:
        Another program, without insum's ops.

    Raises:
        UnsupportedError: This torch has no place for the rules that are needed.

    Examples:
        >>> import torch, insum, insum.export
        >>> class Product(torch.nn.Module):
        ...     def forward(self, idx, x):
        ...         return insum.insum("y[p] = x[idx[p]] * x[idx[p]]", idx=idx, x=x)
        >>> arguments = torch.tensor([2, 0]), torch.arange(3.0)
        >>> program = insum.export.decompose(torch.export.export(Product(), arguments))
        >>> program.module()(*arguments)
        tensor([4., 0.])
        >>> any("insum" in str(node.target) for node in program.graph.nodes)
        False
    """
    with _inlined("graph"):
        written: ExportedProgram = program.run_decompositions({})
    return written


def package(
    program: ExportedProgram,
    path: str | os.PathLike[str],
    *,
    kernels: bool = True,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Compile a program with AOTInductor into one ``.pt2`` file that holds the code of its
    statements, and return the file's path.

    On GPUs the file holds insum's generated kernels. They know nothing of index values, which come
    later: scatters use atomics. A statement for which there is no such kernel, every statement on
    the CPU, and all of them with ``kernels=False``, are compiled by TorchInductor.
    ``torch._inductor.aoti_load_package`` loads it, in Python or C++, where there is no insum too.
    ``options`` are TorchInductor's; unless they say otherwise, matrix products are part of the
    generated kernels where this PyTorch can do that. Code that TorchInductor makes checks index
    values; insum's kernels, in a package, treat what is out of range as absent, and say nothing.

    Args:
        program: What `torch.export.export` gave.
        path: Where to, a name that ends in ``.pt2``.
        kernels: Whether insum's generated kernels are inside, on GPUs.
        options: TorchInductor's.

    Returns:
        The path of the file.

    Raises:
        UnsupportedError: This torch has no packages, or the name ends otherwise.

    Examples:
        >>> import insum, torch
        >>> insum.export.package(program, "model.pt2")  # doctest: +SKIP
        'model.pt2'
    """
    packager = compiler.aot_packager()
    if packager is None:
        raise UnsupportedError(
            "this PyTorch has no AOTInductor packages",
            remedy="update torch, or save insum.export.decompose(program)",
        )
    if not str(path).endswith(".pt2"):
        raise UnsupportedError(
            f"a package cannot be written to {str(path)!r}",
            expected="a file name that ends in .pt2",
        )
    wanted = {
        name: value
        for name, value in compiler.inductor_options(True).items()
        if name != "assert_indirect_indexing"
    }
    given = dict(options or {})
    linked = [*(given.pop(_LIBRARIES, None) or ()), *cxx_runtime.libraries()]
    with _inlined("kernels" if kernels else "graph"):
        return str(
            packager(
                program,
                package_path=str(path),
                inductor_configs={**wanted, **given, **({_LIBRARIES: linked} if linked else {})},
            )
        )


@contextlib.contextmanager
def _inlined(how: str) -> Iterator[None]:
    _register()
    token = _inlining.set(how)
    try:
        yield
    finally:
        _inlining.reset(token)


@functools.cache
def _register() -> None:
    """Tell torch's functionalisation about the ops; outside of `_inlined` they go through as they
    are.
    """
    mode = compiler.functional_mode()
    if mode is None:
        raise UnsupportedError(
            "this PyTorch does not let an op say how it is functionalised", remedy="update torch"
        )
    for name, rule in (
        ("contract", _contract),
        ("accumulate", _accumulate),
        ("accumulate_", _accumulate_),
    ):
        torch.library.register_torch_dispatch(
            f"insum::{name}", mode, functools.partial(_rule, rule)
        )


def _rule(
    rule: Any,
    mode: Any,
    op: Any,
    types: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    if not _inlining.get():
        return mode.__torch_dispatch__(op, types, args, kwargs or {})
    with mode:
        return rule(*args, **(kwargs or {}))


def _contract(*arguments: Any) -> Tensor:
    return _written_out(*decode_exactly(arguments), "new", None)


def _accumulate(initial: Tensor, *arguments: Any) -> Tensor:
    return _written_out(*decode_exactly(arguments), "from", initial)


def _accumulate_(target: Tensor, *arguments: Any) -> None:
    _written_out(*decode_exactly(arguments), "into", target)


def _written_out(
    request: Request, values: Mapping[str, Value], mode: str, initial: Tensor | None
) -> Tensor:
    """A statement, in the order of contraction that suits the sizes it was traced with."""
    problem = request.bind(values, initial)
    if mode == "from" and initial is not None:
        initial = request.form.spread(initial, request.size_values)
    known = dict(values)
    for stage in stages_of(problem, request.form):
        given = {name: known[name] for name in stage.reads}
        part = stage.form.request(stage.size_values(problem))
        if not stage.fills:
            return _one(part.bind(given, initial), mode, initial, given)
        known[stage.fills] = _one(part.bind(given), "new", None, given)
    return _one(problem, mode, initial, values)


def _one(
    problem: Problem, mode: str, initial: Tensor | None, values: Mapping[str, Value]
) -> Tensor:
    kernels = None
    if mode == "new" and _inlining.get() == "kernels":
        kernels = _kernels(problem, values)
    return kernels() if kernels is not None else _run(problem, mode, initial, values)


def _kernels(problem: Problem, values: Mapping[str, Value]) -> Callable[[], Tensor] | None:
    """The statement as launches that a tracer sees, or None where there is no kernel for it."""
    wrap = compiler.wrap_triton()
    if problem.device.type != "cuda" or wrap is None or settings.backend in ("graph", "inductor"):
        return None
    if not is_fusable(problem, settings.values, False, accumulates=False):
        return None
    from insum.runtime import symbolic

    try:
        program = symbolic.program_of(problem, values)
    except symbolic.CannotFuse as reason:
        if "fallback" in settings.log:
            print(
                f"insum: {problem.statement.text!r} is packaged as a graph of torch "
                f"operations: {reason}",
                file=sys.stderr,
            )
        return None
    return functools.partial(symbolic.run, program, problem, values, wrap)


def _run(
    problem: Problem, mode: str, initial: Tensor | None, values: Mapping[str, Value]
) -> Tensor:
    lowered = lower(problem, mode)
    first = () if initial is None else (initial,)
    result: Tensor = flattened(lowered.module).forward(
        *first, *(values[name] for name in lowered.inputs), *lowered.size_arguments(problem)
    )
    return result
