"""The graph of a statement compiled by TorchInductor: C++ on CPUs, Triton on GPUs, there with
native matrix products where PyTorch has them.

Everything is asked for in the options of one `torch.compile` call; the user's configuration is
neither read nor changed. What cannot be compiled runs as the plain graph, and one warning says why.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from insum.bounded import is_first, keep
from insum.compat import compiler
from insum.errors import NotFusedError
from insum.graph.lower import Lowered
from insum.graph.matmul import flattened
from insum.lang.bind import Problem
from insum.settings import settings

#: Devices that TorchInductor has a code generator for.
DEVICES = ("cpu", "cuda", "xpu")
MOST_COMPILED = 256
_compiled: dict[tuple[GraphModule, bool], Inductor] = {}


class Inductor:
    """A compiled graph. Sizes are those of `torch.compile`: the first are compiled for exactly, one
    that changes becomes a variable.
    """

    def __init__(self, lowered: Lowered, native_matmul: bool) -> None:
        self.plain: Callable[..., Tensor] = lowered.module.forward
        self.failure = ""
        options = compiler.inductor_options(native_matmul)
        self.module = flattened(lowered.module)
        self.function: Callable[..., Tensor] = torch.compile(
            self.module.forward, fullgraph=True, options=options
        )

    def run(self, problem: Problem, first: bool, arguments: tuple[Any, ...]) -> Tensor:
        if self.failure:
            return self.fallback(problem, arguments, self.failure)
        given = [_bare(a) if isinstance(a, Tensor) else a for a in arguments]
        scope = compiler.free_sizes() if first else contextlib.nullcontext()
        try:
            with torch.no_grad(), scope:
                result = self.function(*given)
        except compiler.compile_errors() as error:
            # raised before anything has run, so that nothing has been written
            reason = (
                f"{type(error).__name__}: "
                f"{(str(error).strip() or 'no reason given').splitlines()[0]}"
            )
            # what has been compiled before can still be run
            if not compiler.is_recompile_limit(error):
                self.failure = reason
            return self.fallback(problem, arguments, reason)
        # Written in place, the result is the target itself, of which the compiled code saw another
        # name.
        return arguments[0] if given and result is given[0] else result

    def fallback(self, problem: Problem, arguments: tuple[Any, ...], reason: str) -> Tensor:
        if settings.require_fused:
            remedy = "set insum.settings.require_fused = False to run it as a graph"
            raise problem.complain(
                NotFusedError,
                f"TorchInductor did not compile this statement: {reason}",
                remedy=remedy,
            )
        if is_first(f"inductor: {reason}"):
            warnings.warn(
                f"insum: TorchInductor did not compile {problem.statement.text!r}, which runs "
                f"as a graph: {reason}",
                stacklevel=2,
            )
        return self.plain(*arguments)


def forward_of(lowered: Lowered, problem: Problem) -> Callable[..., Tensor]:
    """A function like ``lowered.module.forward`` that runs compiled code, for calls with this
    problem's sizes.
    """
    if problem.device.type not in DEVICES:
        return lowered.module.forward
    key = lowered.module, settings.native_matmul
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = keep(_compiled, key, Inductor(lowered, settings.native_matmul), MOST_COMPILED)
    seen: list[bool] = []

    @functools.wraps(compiled.plain)
    def forward(*arguments: Any) -> Tensor:
        first = not seen
        seen.append(True) if first else None
        return compiled.run(problem, first, arguments)

    return forward


def _bare(tensor: Tensor) -> Tensor:
    """Without gradient, so that code is not compiled anew for tensors that have one; and with its
    signs in memory.
    """
    tensor = tensor.detach()
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    return tensor.resolve_neg() if tensor.is_neg() else tensor
