"""Exported programs that need no insum to run: statements are written out, and AOTInductor compiles them into the package.

`torch.export` keeps a statement as one call of insum's op. While a program is functionalised on its way to a compiler, the op can be replaced
by what it does: its graph of torch operations.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from insum import compat
from insum.errors import UnsupportedError
from insum.graph import lower
from insum.graph_flatten import flattened
from insum.lang.bind import Problem, Value
from insum.ops import decode_exactly

__all__ = ["decompose", "package"]

_inlining: contextvars.ContextVar[bool] = contextvars.ContextVar("insum_inlining", default=False)


def decompose(program: ExportedProgram) -> ExportedProgram:
    """The program with every statement written out as torch operations. It can be saved, and loaded where there is no insum.

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
    with _inlined():
        return program.run_decompositions({})


def package(program: ExportedProgram, path: str | os.PathLike[str], *, options: Mapping[str, Any] | None = None) -> str:
    """Compile a program with AOTInductor into one ``.pt2`` file that holds the code of its statements, and return the file's path.

    ``torch._inductor.aoti_load_package`` loads it, in Python or C++, where there is no insum too. ``options`` are TorchInductor's; unless
    they say otherwise, matrix products are part of the generated kernels where this PyTorch can do that. Index values that are out of
    range are found by the compiled code.
    """
    compiler = compat.aot_packager()
    if compiler is None:
        raise UnsupportedError("this PyTorch has no AOTInductor packages", remedy="update torch, or save insum.export.decompose(program)")
    if not str(path).endswith(".pt2"):
        raise UnsupportedError(f"a package cannot be written to {str(path)!r}", expected="a file name that ends in .pt2")
    wanted = {name: value for name, value in compat.inductor_options(True).items() if name != "assert_indirect_indexing"}
    with _inlined():
        return str(compiler(program, package_path=str(path), inductor_configs={**wanted, **(options or {})}))


@contextlib.contextmanager
def _inlined() -> Iterator[None]:
    _register()
    token = _inlining.set(True)
    try:
        yield
    finally:
        _inlining.reset(token)


@functools.cache
def _register() -> None:
    """Tell torch's functionalisation about the ops; outside of `_inlined` they go through as they are."""
    mode = compat.functional_mode()
    if mode is None:
        raise UnsupportedError("this PyTorch does not let an op say how it is functionalised", remedy="update torch")
    for name, rule in (("contract", _contract), ("accumulate", _accumulate), ("accumulate_", _accumulate_)):
        torch.library.register_torch_dispatch(f"insum::{name}", mode, functools.partial(_rule, rule))


def _rule(rule: Any, mode: Any, op: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Any:
    if not _inlining.get():
        return mode.__torch_dispatch__(op, types, args, kwargs or {})
    with mode:
        return rule(*args, **(kwargs or {}))


def _contract(*arguments: Any) -> Tensor:
    request, values = decode_exactly(arguments)
    return _run(request.bind(values), "new", None, values)


def _accumulate(initial: Tensor, *arguments: Any) -> Tensor:
    request, values = decode_exactly(arguments)
    return _run(request.bind(values, initial), "from", initial, values)


def _accumulate_(target: Tensor, *arguments: Any) -> None:
    request, values = decode_exactly(arguments)
    _run(request.bind(values, target), "into", target, values)


def _run(problem: Problem, mode: str, initial: Tensor | None, values: Mapping[str, Value]) -> Tensor:
    lowered = lower(problem, mode)
    first = () if initial is None else (initial,)
    result: Tensor = flattened(lowered.module).forward(*first, *(values[name] for name in lowered.inputs), *lowered.size_arguments(problem))
    return result
