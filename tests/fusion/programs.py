"""How programs are compiled and compared in the tests of fusion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch.fx import GraphModule
from torch.testing import assert_close

from insum.fusion.sequence_op import members_of

OURS = tuple(
    getattr(torch.ops.insum, name)
    for name in ("fused", "fused_into", "fused_into_", "fused_series", "fused_extremum")
)

SEQUENCE = torch.ops.insum.fused_sequence.default
N, E, F = 10, 30, 8


class Somewhere:
    """Of a fake tensor on a GPU, what the decision asks for."""

    device = torch.device("cuda")


def graph_of(nodes: int = N, edges: int = E, seed: int = 0) -> Tensor:
    return torch.randint(0, nodes, (2, edges), generator=torch.Generator().manual_seed(seed))


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def compiled(
    function: Callable[..., Any], **options: Any
) -> tuple[Callable[..., Any], list[GraphModule]]:
    """The function compiled with fusion and nothing else, and the graphs that were compiled:
    forward, backward, forward of the next ...
    """
    graphs: list[GraphModule] = []

    def keep(module: GraphModule, inputs: Any) -> Any:
        graphs.append(module)
        return make_boxed_func(module)

    return torch.compile(
        function, backend="insum", options={"insum.fuse": "always", "insum.rest": keep}, **options
    ), graphs


def fused_ops(graph: GraphModule) -> int:
    """How many fused statements a graph has, in place or not, called as one or not."""
    calls = [n for n in graph.graph.nodes if n.op == "call_function"]
    alone = sum(_is_ours(n.target) or any(_is_ours(a) for a in n.args) for n in calls)
    return alone + sum(len(members_of(n.args[0])) for n in calls if n.target is SEQUENCE)


def _is_ours(target: Any) -> bool:
    return getattr(target, "overloadpacket", None) in OURS


def counts(graphs: Sequence[GraphModule]) -> list[int]:
    return [fused_ops(g) for g in graphs]


def agrees(
    function: Callable[..., Tensor],
    run: Callable[..., Tensor],
    arguments: Sequence[Any],
    parameters: Sequence[Tensor] = (),
    **tolerance: Any,
) -> None:
    """Values and gradients of a compiled program equal those of the eager one."""
    leaves = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad] + list(parameters)
    expected, result = function(*arguments), run(*arguments)
    assert_close(result, expected, **tolerance)
    if leaves:
        upstream = torch.linspace(-1, 1, expected.numel(), dtype=expected.dtype).reshape(
            expected.shape
        )
        wanted = torch.autograd.grad(expected, leaves, upstream, allow_unused=True)
        for a, b in zip(
            torch.autograd.grad(result, leaves, upstream, allow_unused=True), wanted, strict=True
        ):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert_close(a, b, **tolerance)
