"""Products of gathered rows are taken before the gather, and after the scatter in the backward
pass, where there are fewer nodes than edges; and only where that is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import insum.fusion

from .programs import agrees, compiled

RowsProgram: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
N, E, C = 6, 30, 4
torch.manual_seed(0)
i, j = torch.randint(0, N, (2, E))
j[2] = -1
w, v, b = torch.randn(C, C).double(), torch.randn(2 * C + 2, C).double(), torch.randn(C).double()
ONCE = i % (N - 1)
FEW, TWICE = torch.arange(N - 2), torch.arange(2 * E) % E


def both(x: Tensor, e: Tensor) -> Tensor:
    return torch.cat([x[i], x[j], e], 1)


def scattered(m: Tensor) -> Tensor:
    return m.new_zeros(N, C).index_add(0, i, m)


#: Programs that multiply no gathered rows in the end; the weights have gradients, too.
COMMUTES: dict[str, RowsProgram] = {
    "a layer of gathered rows": lambda x, e, w: torch.relu(x[j] @ w[:C] + b),
    "with a bias": lambda x, e, w: scattered(torch.addmm(b, both(x, e), w).tanh()),
    "two layers": lambda x, e, w: scattered((both(x, e) @ w).sigmoid() * (both(x, e) @ (2 * w))),
    "a difference is a part": lambda x, e, w: torch.cat([x[i], x[j] - x[i], e], 1) @ w,
    "with a dimension of one": lambda x, e, w: (
        torch.cat([x.view(N, 1, C)[i], x.view(N, 1, C)[j]], -1).squeeze(1) @ w[: 2 * C]
    ),
}
COMMUTES |= {
    "one weight for both ends": lambda x, e, w: (x[i] @ w[:C]) * (x[j] @ w[:C]),
    "nodes of two kinds by one index": lambda x, e, w: (
        torch.cat([x[ONCE], x[: N - 1][ONCE]], 1) @ w[: 2 * C]
    ),
    "products of products": lambda x, e, w: (x[i] @ w[:C])[TWICE].tanh() @ w[:C],
}
#: Programs whose products stay as they are.
STAYS: dict[str, RowsProgram] = {
    "few edges": lambda x, e, w: x[FEW] @ w[:C],
    "rows are used elsewhere": lambda x, e, w: (m := both(x, e)) @ w + m.amax(1, keepdim=True),
    "a bias of every edge": lambda x, e, w: torch.addmm(e[:, :1], x[i], w[:C]),
    "cast when put together": lambda x, e, w: torch.cat([x.float()[i], x[j], e], 1) @ w,
    "with integers": lambda x, e, w: torch.cat([x[i], x[j], e.long()], 1) @ w,
    "wide products": lambda x, e, w: x[i, :1] @ w.reshape(1, -1),
}


def products_of_edges(graphs: list[GraphModule], edges: int = E) -> list[int]:
    """How many columns products have that are taken for each edge, but of edge values alone."""
    aten, found = torch.ops.aten, []
    for node in (node for module in graphs for node in module.graph.nodes):
        if node.target in (aten.mm.default, aten.addmm.default):
            sides: Any = node.args[-2:]
            found += [side.meta["val"].shape[1] for side in sides if len(side.meta["val"]) == edges]
    return found


def arguments() -> tuple[Tensor, Tensor, Tensor]:
    made = torch.randn(N, C).double(), torch.randn(E, 2).double(), v.clone()
    return made[0].requires_grad_(), made[1], made[2].requires_grad_()


@pytest.mark.parametrize("name", COMMUTES)
def test_products_of_nodes(name: str) -> None:
    run, graphs = compiled(COMMUTES[name])
    agrees(run, COMMUTES[name], arguments())
    widest = C if name == "a difference is a part" else 2
    assert all(columns <= widest for columns in products_of_edges(graphs))
    report = insum.fusion.report()
    assert not report.failed and "moved  " in str(report)
    assert all("multiplied before" in one.what and "py:" in one.where for one in report.moved)


@pytest.mark.parametrize("name", STAYS)
def test_products_that_stay(name: str) -> None:
    run, graphs = compiled(STAYS[name])
    agrees(run, STAYS[name], [t.detach() for t in arguments()])
    edges = len(FEW) if name == "few edges" else E
    assert not insum.fusion.report().failed
    # as it was, or as one statement with the gather in it
    assert products_of_edges(graphs, edges) or insum.fusion.report().fused


def test_halves_are_not_rounded_twice() -> None:
    program = lambda x, e, w: both(x, e) @ w
    given = [t.detach().bfloat16() for t in arguments()]
    run, graphs = compiled(program)
    torch.testing.assert_close(run(*given), program(*given))
    assert products_of_edges(graphs) == [2 * C + 2]


def test_gradients_of_edge_values() -> None:
    program = COMMUTES["with a bias"]
    x, e, weight = arguments()
    run, _ = compiled(program)
    agrees(run, program, (x, e.requires_grad_(), weight))
    assert not insum.fusion.report().failed


def test_one_weight_and_an_index_of_two_dimensions() -> None:
    program = lambda x, e, w: (x[i] @ (own := w[:C])) * (x[j[:, None]] @ own)[:, 0]
    run, _ = compiled(program)
    agrees(run, program, arguments())
    assert insum.fusion.report().moved and not insum.fusion.report().failed


def test_an_index_out_of_range_is_an_error() -> None:
    program = lambda x, at, w: x[at] @ w
    run, _ = compiled(program)
    x, weight = torch.randn(N, C), torch.randn(C, C)
    torch.testing.assert_close(run(x, i, weight), program(x, i, weight))
    with pytest.raises((IndexError, insum.InsumError)):
        run(x, i + N, weight)
