"""What is not one statement, or not provably so, is left alone with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import insum
import insum.fusion

from .programs import E, F, N, agrees, compiled, counts, graph_of, leaf

src, dst = (row.clone() for row in graph_of())

#: name -> program, arguments, words of the reason. No op in the forward graph.
LEFT: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]], str]] = {
    "the messages are used elsewhere": (
        lambda x, w: (
            m := x[src] * w[:, None],
            x.new_zeros(N, F).index_add(0, dst, m) + m.cumsum(0).sum(),
        )[1],
        lambda: (torch.randn(N, F), torch.randn(E)),
        "is needed by",
    ),
    "the messages are an output": (
        lambda x, w: (m := x[src] * w[:, None], x.new_zeros(N, F).index_add(0, dst, m), m)[1:],
        lambda: (torch.randn(N, F), torch.randn(E)),
        "mul is needed by",
    ),
    "a scatter alone": (
        lambda m: m.new_zeros(N, F).index_add(0, dst, m),
        lambda: (torch.randn(E, F),),
        "nothing is gathered into it",
    ),
    "products": (
        lambda x: x.new_zeros(N, F).scatter_reduce(0, dst[:, None].expand(E, F), x[src], "prod"),
        lambda: (torch.randn(N, F),),
        "it reduces by prod",
    ),
    "amax by columns": (
        lambda x: x.new_zeros(N, F).scatter_reduce(
            0, (dst[:, None] + torch.arange(F)) % N, x[src], "amax", include_self=False
        ),
        lambda: (torch.randn(N, F),),
        "it has an index for each column",
    ),
    "sum without what is there": (
        lambda x: x.scatter_reduce(0, dst[:, None].expand(E, F), x[src], "sum", include_self=False),
        lambda: (torch.randn(N, F),),
        "it leaves out what is there",
    ),
    "overwritten": (
        lambda x: x.new_zeros(N, F).index_put((dst,), x[src]),
        lambda: (torch.randn(N, F),),
        "it overwrites",
    ),
    "part of the columns": (
        lambda x: x.new_zeros(N, F).scatter_add(0, dst[:, None].expand(E, 4), x[src][:, :4]),
        lambda: (torch.randn(N, F),),
        "differ in shape",
    ),
    "part of the messages": (
        lambda x: x.new_zeros(N, F).scatter_add(0, dst[:20, None].expand(20, F), x[src]),
        lambda: (torch.randn(N, F),),
        "differ in shape",
    ),
    "part of the columns gathered": (
        lambda x: x.new_zeros(N, 4).index_add(0, dst, x.gather(0, src[:, None].expand(E, 4))),
        lambda: (torch.randn(N, F),),
        "a part of arg",
    ),
    "integers": (
        lambda x: x.new_zeros(N, F).index_add(0, dst, x[src]),
        lambda: (torch.randint(0, 9, (N, F)),),
        "holds int64",
    ),
    "narrowed": (
        lambda x, w: x.new_zeros(N, F, dtype=torch.float16).index_add(
            0, dst, (x[src] * w[:, None]).half()
        ),
        lambda: (torch.randn(N, F), torch.randn(E)),
        "it converts float32 to float16",
    ),
    "widened after the product": (
        lambda x: x.new_zeros(N, F, dtype=torch.float32).index_add(0, dst, x[src].float()),
        lambda: (torch.randn(N, F).half(),),
        "its result is float32, the product is float16",
    ),
    "complex": (
        lambda x: x.new_zeros(N, F).index_add(0, dst, x[src]),
        lambda: (torch.randn(N, F, dtype=torch.complex64),),
        "holds complex64",
    ),
    "a mask": (
        lambda x, m: x.new_zeros(N, F).index_add(0, dst, x.masked_fill(m[:, None], 0)[src].floor()),
        lambda: (torch.randn(N, F), torch.rand(N) > 0.5),
        "nothing is gathered into it",
    ),
    "a function that the language lacks": (
        lambda x, w: x.new_zeros(N, F).index_add(0, dst, (x[src] * w[:, None]).floor()),
        lambda: (torch.randn(N, F), torch.randn(E)),
        "nothing is gathered into it",
    ),
    "a bias": (
        lambda x, w, b: torch.addmm(b, x[src[:F]], w),
        lambda: (torch.randn(N, F), torch.randn(F, 5), torch.randn(5)),
        "it adds a bias",
    ),
    "a scaled scatter": (
        lambda x: torch.ops.aten.index_add(x.new_zeros(N, F), 0, dst, x[src].floor(), alpha=2),
        lambda: (torch.randn(N, F),),
        "nothing is gathered into it",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_with_a_reason(name: str) -> None:
    program, make, words = LEFT[name]
    run, graphs = compiled(program, fullgraph=True)
    arguments = make()
    expected, result = program(*arguments), run(*arguments)
    for a, b in zip(
        result if isinstance(result, tuple) else (result,),
        expected if isinstance(expected, tuple) else (expected,),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
    report = insum.fusion.report()
    assert counts(graphs) == [0] and not report.fused, str(report)
    assert any(words in left.why for left in report.left), str(report)


def test_a_product_before_the_gather_stays_dense() -> None:
    program = lambda x, w, a: x.new_zeros(N, 5).index_add(0, dst, (x @ w)[src] * a[:, None])
    run, graphs = compiled(program)
    agrees(program, run, (torch.randn(N, F), torch.randn(F, 5), torch.randn(E)))
    assert counts(graphs) == [1]
    assert any(n.target is torch.ops.aten.mm.default for n in graphs[0].graph.nodes)


def test_small_products_are_computed_once_and_read() -> None:
    """The normalisation of a graph convolution has one number per edge, the message many."""
    program = lambda x, d, w: x.new_zeros(N, F).index_add(
        0, dst, (d[src] * w * d[dst])[:, None] * x[src]
    )
    run, _ = compiled(program)
    agrees(program, run, (torch.randn(N, F), torch.rand(N), torch.rand(E)))
    (found,) = insum.fusion.report().fused
    assert found.statement.count("*") == 1 and any("small beside" in note for note in found.notes)


def test_on_the_cpu_nothing_is_fused_unless_asked_for() -> None:
    program = lambda x: x.new_zeros(N, F).index_add(0, dst, x[src])
    x = torch.randn(N, F)
    run = torch.compile(program, backend="insum", options={"insum.rest": "eager"})
    torch.testing.assert_close(run(x), program(x))
    (left,) = insum.fusion.report().left
    assert "on cpu a fused statement runs as the same torch operations" in left.why
    torch._dynamo.reset()
    with insum.settings(fuse="always"):
        torch.compile(program, backend="insum", options={"insum.rest": "eager"})(x)
    assert len(insum.fusion.report().fused) == 1


def test_never() -> None:
    program = lambda x: x.new_zeros(N, F).index_add(0, dst, x[src])
    torch.compile(program, backend="insum", options={"insum.rest": "eager", "insum.fuse": "never"})(
        leaf(N, F)
    )
    assert not insum.fusion.report().fused and {
        left.why for left in insum.fusion.report().left
    } == {"settings.fuse is 'never'"}


def test_edges_that_take_gradients_and_integers_side_by_side() -> None:
    def program(x: Tensor, t: Tensor) -> Tensor:
        counted = torch.zeros(3, dtype=torch.int64).index_add(0, t, torch.ones_like(t))
        return x.new_zeros(N, F).index_add(0, dst, x[src]) * counted.sum()

    run, graphs = compiled(program)
    agrees(program, run, (leaf(N, F), torch.randint(0, 3, (E,))))
    assert counts(graphs) == [1, 1]
