"""Where a statement ends: largest values of sums, sums of equal values, numbers that are none,
results that are added twice, broadcast or 0-dimensional. Values and gradients are eager's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import insum.fusion

from .programs import E, F, N, agrees, compiled, counts, graph_of, leaf

SRC, DST = graph_of()
K = 4
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True)
def everything_in_one_graph() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


def wide() -> Tensor:
    return DST[:, None].expand(E, F)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*(shape or (N, F)))


# --- largest and smallest values of sums ----------------------------------------------------------

MESSAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a product of matrices": lambda x, w: x[SRC] @ w,
    "a sum": lambda x, w: (x[SRC, :, None] * w).sum(1),
    "a batch of products": lambda x, w: torch.bmm(x[SRC].view(E, 1, F), w.expand(E, F, F))[:, 0],
    "a product of a matrix and a vector": lambda x, w: (x[SRC] @ w[0])[:, None] * x[DST],
    "a sum beside a product": lambda x, w: (x[SRC] * x[DST]).sum(1, keepdim=True) * w[0],
    "a view of a sum": lambda x, w: -2.0 * (x[SRC] @ w).t().t(),
}


@pytest.mark.parametrize(("reduction", "include_self"), [("amax", True), ("amin", False)])
@pytest.mark.parametrize("name", MESSAGES)
def test_extrema_of_sums(name: str, reduction: str, include_self: bool) -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return zeros().scatter_reduce(
            0, wide(), MESSAGES[name](x, w), reduction, include_self=include_self
        )

    run, _ = compiled(program)
    agrees(program, run, (torch.randn(N, F), torch.randn(F, F)), **TOLERANCE)
    extremum = [f for f in insum.fusion.report().fused if " max= " in str(f) or " min= " in str(f)]
    assert len(extremum) == 1 and "k0" not in extremum[0].statement, str(insum.fusion.report())
    run, _ = compiled(program)
    agrees(program, run, (leaf(N, F), leaf(F, F)), **TOLERANCE)


def test_extrema_of_products_are_one_statement() -> None:
    program = lambda x, w: zeros().scatter_reduce(0, wide(), x[SRC] * w[:, None], "amax")
    run, graphs = compiled(program)
    agrees(program, run, (torch.randn(N, F), torch.randn(E)))
    (found,) = insum.fusion.report().fused
    assert counts(graphs) == [1] and len(found.nodes) > 1


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduction", ["amax", "amin", "mean", "prod"])
def test_other_reductions_of_sums(reduction: str, include_self: bool) -> None:
    more = {"include_self": include_self}
    columns = (DST[:, None] + torch.arange(F)) % N
    programs = [
        lambda x, w: torch.ones(N, F).index_reduce(0, DST, x[SRC] @ w, reduction, **more),
        lambda x, w: torch.ones(N, F).scatter_reduce(0, columns, x[SRC] @ w, reduction, **more),
    ]
    for program in programs:
        torch._dynamo.reset()
        run, _ = compiled(program)
        agrees(program, run, (torch.randn(N, F), torch.randn(F, F)), **TOLERANCE)


# --- what is one statement and what is not --------------------------------------------------------

#: name -> program of nodes, weights of edges and a matrix; how many statements are made of it
#: forward.
PROGRAMS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], int]] = {
    "equal values, summed": (
        lambda x, w, m: x[SRC].unsqueeze(1).expand(E, K, F).sum(1),
        0,
    ),
    "equal values, a product": (
        lambda x, w, m: x[SRC][:, :1].expand(E, K) @ torch.ones(1, 1).expand(K, F),
        0,
    ),
    "equal values, a product with a vector": (
        lambda x, w, m: x[SRC][:, :1].expand(E, K) @ m[0, :1].expand(K),
        0,
    ),
    "equal values, scattered": (
        lambda x, w, m: zeros(N, E).scatter_add(
            0, DST.view(1, E).expand(K, E), x[SRC, 0].view(1, E).expand(K, E)
        ),
        0,
    ),
    "equal values, put": (
        lambda x, w, m: zeros().index_put(
            (DST.view(1, E).expand(K, E),), x[SRC].expand(K, E, F), accumulate=True
        ),
        0,
    ),
    "some equal values of a split dimension": (
        lambda x, w, m: (
            x[SRC].unsqueeze(1).expand(E, K, F).reshape(E, K * F) @ torch.ones(K * F, 2)
        ),
        1,
    ),
    "a gather that is always the same": (
        lambda x, w, m: zeros().index_add(0, DST, x[:1].expand(N, F)[SRC] * w[:, None]),
        1,
    ),
    "a result twice": (
        lambda x, w, m: (t := zeros().index_add(0, DST, x[SRC])) + t,
        1,
    ),
    "a sum twice": (
        lambda x, w, m: (t := zeros().index_add(0, DST, x[SRC]) + x) + t,
        1,
    ),
    "a result twice in a longer sum": (
        lambda x, w, m: (t := zeros().index_add(0, DST, x[SRC])) + x @ m + t,
        1,
    ),
    "a result and its square": (
        lambda x, w, m: (t := zeros().index_add(0, DST, x[SRC])) + t * t,
        1,
    ),
    "a result times itself": (
        lambda x, w, m: (t := zeros().index_add(0, DST, x[SRC])) * t,
        1,
    ),
    "into its own messages": (
        lambda x, w, m: (t := x @ m).index_add(0, DST, t[SRC]),
        1,
    ),
    "an index in both roles": (
        lambda x, w, m: zeros().index_add(0, DST, x[DST] * w[:, None]),
        1,
    ),
    "one weight for two chains": (
        lambda x, w, m: (x[SRC] * x[DST]) @ m + (x[DST] * w[:, None]) @ m,
        2,
    ),
    "two sums in place": (
        lambda x, w, m: zeros().index_add(0, DST, x[SRC]) + zeros().index_add(0, SRC, x[DST]),
        2,
    ),
    "two results with something in them": (
        lambda x, w, m: x.index_add(0, DST, x[SRC]) + (2 * x).index_add(0, SRC, x[DST]),
        2,
    ),
    "one number": (lambda x, w, m: (x[SRC] * x[DST]).sum(), 1),
    "one number, summed again": (lambda x, w, m: (x[SRC] * 2).sum().sum(0), 1),
    "one number, summed again and kept": (
        lambda x, w, m: (x[SRC] * w[:, None]).sum().sum(0, keepdim=True).sum(),
        1,
    ),
    "no dimensions to sum": (lambda x, w, m: torch.sum(x[SRC] * w[:, None], dim=[]), 1),
    "selected from a number": (
        lambda x, w, m: x.sum().index_select(0, torch.tensor([0])) * x[SRC],
        0,
    ),
    "a broadcast sum": (
        lambda x, w, m: zeros().index_add(0, DST, x[SRC]) + torch.ones(3, 1, 1) * x,
        1,
    ),
    "a narrower result, added": (
        lambda x, w, m: zeros(1, F).index_add(0, 0 * DST, x[SRC]) + x,
        1,
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients(name: str) -> None:
    program, statements = PROGRAMS[name]
    run, graphs = compiled(program)
    arguments = leaf(N, F), leaf(E), leaf(F, F)
    agrees(program, run, arguments, **TOLERANCE)
    forward = [f for f in insum.fusion.report().fused if not f.backward]
    assert len(forward) == statements == counts(graphs)[0], str(insum.fusion.report())


# --- numbers --------------------------------------------------------------------------------------

NUMBERS = [float("inf"), -float("inf"), float("nan"), 1e30, 1e-30, 3e38, -0.0, 0, 7, -2, 1e-5]


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers(number: float) -> None:
    """Those that are not finite, or whose product is not, stay outside."""
    programs = [
        lambda x: zeros().index_add(0, DST, x[SRC] * number),
        lambda x: zeros().index_add(0, DST, number * (x[SRC] * number)),
        lambda x: zeros().scatter_reduce(0, wide(), x[SRC] * number, "amax"),
        lambda x: zeros().index_add(0, DST, x[SRC]) * number,
        lambda x: torch.full((N, F), float(number)).index_add(0, DST, x[SRC]),
        lambda x: torch.full((N, F), float(number)).scatter_reduce(
            0, wide(), x[SRC], "amin", include_self=False
        ),
    ]
    x = torch.randn(N, F)
    x[0] = 0.0
    for program in programs:
        torch._dynamo.reset()
        run, _ = compiled(program)
        torch.testing.assert_close(run(x), program(x), equal_nan=True)


def test_numbers_whose_product_is_too_large() -> None:
    """Each by itself is none: that nothing is lost depends on the order."""
    program = lambda x: zeros().index_add(0, DST, x[SRC] * 1e30 * 1e30)
    run, _ = compiled(program)
    x = torch.full((N, F), 1e-30)
    torch.testing.assert_close(run(x), program(x))


# --- layouts --------------------------------------------------------------------------------------

INTO: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "a sum": lambda x, b, m: b.scatter_add(0, wide(), x[SRC]),
    "a sum of products": lambda x, b, m: b.scatter_add(0, wide(), x[SRC] @ m[0]),
    "a series": lambda x, b, m: b.scatter_add(0, wide(), x[SRC] @ m[0]).scatter_add(
        0, SRC[:, None].expand(E, F), x[DST] @ m[1]
    ),
    "the largest": lambda x, b, m: b.scatter_reduce(0, wide(), x[SRC], "amax"),
    "the smallest of others": lambda x, b, m: b.scatter_reduce(
        0, wide(), x[SRC], "amin", include_self=False
    ),
}


@pytest.mark.parametrize("name", INTO)
def test_what_is_added_to_may_be_laid_out_in_any_way(name: str) -> None:
    """The result is not, and can be viewed as before."""
    program = lambda x, b, m: INTO[name](x, b, m).view(-1)
    run, graphs = compiled(program)
    base = torch.randn(F, N).t().requires_grad_()
    agrees(program, run, (leaf(N, F), base, leaf(2, F, F)), **TOLERANCE)
    assert counts(graphs)[0] == 1


# --- series and relations -------------------------------------------------------------------------


PAIRS = tuple(graph_of(seed=s) for s in (1, 2))


def of(x: Tensor, w: Tensor, r: int, base: Tensor | None = None) -> Tensor:
    """One offset of a convolution."""
    i, o = PAIRS[r]
    return (zeros() if base is None else base).index_add(0, o, x[i] @ w[r])


#: name -> program of nodes, weights and a tensor to add; whether it is a series.
OFFSETS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], bool]] = {
    "plus a batch": (lambda x, w, b: of(x, w, 0) + of(x, w, 1) + b.view(3, 1, F), True),
    "plus a batch in between": (lambda x, w, b: of(x, w, 0) + b.view(3, 1, F) + of(x, w, 1), False),
    "plus a row": (lambda x, w, b: of(x, w, 0) + b[0] + of(x, w, 1), True),
    "plus a number": (lambda x, w, b: of(x, w, 0) + b.sum() + of(x, w, 1), True),
    "plus float64": (lambda x, w, b: of(x, w, 0) + b.double()[0] + of(x, w, 1), False),
    "one of them twice": (lambda x, w, b: (t := of(x, w, 0)) + of(x, w, 1) + t, False),
    "all of them twice": (lambda x, w, b: (t := of(x, w, 0) + of(x, w, 1)) + t, True),
    "into tensors": (lambda x, w, b: of(x, w, 0, x) + of(x, w, 1, 2 * x), False),
    "one of them into a tensor": (lambda x, w, b: of(x, w, 0) + of(x, w, 1, x), False),
    "after each other": (lambda x, w, b: of(x, w, 1, of(x, w, 0, x)), True),
    "both with one weight": (lambda x, w, b: of(x, w[:1].expand(2, F, F), 0) + of(x, w, 0), False),
    "scaled": (lambda x, w, b: torch.add(of(x, w, 0), of(x, w, 1), alpha=2), False),
}


@pytest.mark.parametrize("name", OFFSETS)
def test_offsets(name: str) -> None:
    program, joined = OFFSETS[name]
    run, _ = compiled(program)
    agrees(program, run, (leaf(N, F), leaf(2, F, F), leaf(3, F)), **TOLERANCE)
    found = [f for f in insum.fusion.report().fused if not f.backward]
    assert any("in one statement" in n for f in found for n in f.notes) is joined, found


KINDS = torch.randint(0, 3, (E,), generator=torch.Generator().manual_seed(2))


def relations(step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def program(x: Tensor, w: Tensor, edges: Tensor, kinds: Tensor) -> Tensor:
        out = torch.zeros(N, F)
        for r in range(3):
            out = out + step(x, w, *edges[:, kinds == r], r)
        return out

    return program


def put(x: Tensor, src: Tensor, dst: Tensor, base: Tensor | None = None) -> Tensor:
    return (zeros() if base is None else base).index_add(0, dst, x[src])


RELATIONS = {
    "the same scale": relations(lambda x, w, i, o, r: put(x, i, o) * 2.0),
    "the same factor": relations(lambda x, w, i, o, r: put(x, i, o) * w[0, 0]),
    "the same dense product": relations(lambda x, w, i, o, r: put(x, i, o) + (x * x) @ w[r]),
    "an index in both roles": relations(lambda x, w, i, o, r: put(x, o, o) @ w[r]),
    "into a tensor": relations(lambda x, w, i, o, r: put(x, i, o, x) @ w[r]),
    "one number each": relations(lambda x, w, i, o, r: x[i].sum() * w[r, 0]),
    "some count from the end": relations(
        lambda x, w, i, o, r: (
            (put(x, i, o) if r else zeros().index_add(0, o, x.index_select(0, i))) @ w[r]
        )
    ),
    "twice": relations(lambda x, w, i, o, r: (z := put(x, i, o)) @ w[r] + z),
    "a row that is added to all": relations(
        lambda x, w, i, o, r: (
            put(x * w[r, 0], i, o) if r else zeros(1, F).index_add(0, 0 * o, (x * w[0, 0])[i])
        )
    ),
    "of a square matrix, expanded": relations(
        lambda x, w, i, o, r: x @ (zeros(F, F).index_add(0, o % F, x[i]) * w[r].sum(1).expand(F, F))
    ),
}


@pytest.mark.parametrize("name", RELATIONS)
def test_relations(name: str) -> None:
    program = RELATIONS[name]
    run, _ = compiled(program)
    agrees(program, run, (leaf(N, F), leaf(3, F, F), graph_of(), KINDS), rtol=1e-3, atol=1e-3)
