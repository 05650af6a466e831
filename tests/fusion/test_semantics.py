"""What fusion must not change: index ranges, mutation, views, dtypes, shapes of any size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import insum.fusion
from insum.compat.compiler import compiled_graphs
from insum.errors import IndexRangeError
from insum.fusion.op import Spec, spec_of

from .programs import E, F, N, agrees, compiled, counts, graph_of, leaf


def aggregate(x: Tensor, w: Tensor, edges: Tensor) -> Tensor:
    return x.new_zeros(x.shape[0], x.shape[1]).index_add(0, edges[1], x[edges[0]] * w[:, None])


def test_negative_indices_count_from_the_end_where_they_did() -> None:
    edges = graph_of()
    edges[0, ::3] -= N

    def program(x: Tensor, w: Tensor, edges: Tensor) -> Tensor:
        return x.new_zeros(N, F).index_put((edges[0],), x[edges[0]] * w[:, None], accumulate=True)

    run, graphs = compiled(program, fullgraph=True)
    agrees(program, run, (leaf(N, F), leaf(E), edges))
    assert counts(graphs) == [1, 2]


def test_negative_indices_of_dimensions_of_different_size() -> None:
    """The same index tensor wraps around at two different sizes."""
    index = torch.tensor([0, -1, 2, -3, 1])
    program = lambda x, y: x.new_zeros(4, F).index_add(
        0, torch.tensor([0, 1, 2, 3, 0]), x[index] * y[index]
    )
    run, graphs = compiled(program, fullgraph=True)
    agrees(program, run, (leaf(5, F), leaf(3, F)))
    assert counts(graphs) == [1, 2]


@pytest.mark.parametrize("bad", [(0, N), (1, N), (0, -N - 1)])
def test_indices_out_of_range_are_still_an_error(bad: tuple[int, int]) -> None:
    edges = graph_of()
    edges[bad[0], 3] = bad[1]
    run, _ = compiled(aggregate)
    with pytest.raises((IndexRangeError, IndexError, RuntimeError), match=r"size|range|bounds"):
        run(torch.randn(N, F), torch.randn(E), edges)


def test_what_is_written_in_place_is_seen() -> None:
    edges = graph_of()

    def program(out: Tensor, view: Tensor, x: Tensor) -> Tensor:
        out.index_add_(0, edges[1], x[edges[0]])
        view.t().index_add_(1, edges[0], x[edges[1]].t())
        return out.sum() + view.sum()

    run, graphs = compiled(program, fullgraph=True)
    x = torch.randn(N, F)
    base, other = torch.randn(N, F), torch.randn(N + 2, F)
    base_, other_ = base.clone(), other.clone()
    assert_close(run(base, other[1:-1], x), program(base_, other_[1:-1], x))
    assert_close(base, base_)
    assert_close(other, other_)
    assert counts(graphs) == [1]
    assert [left.why for left in insum.fusion.report().left] == [
        "its result is laid out in an unusual way"
    ]


def test_the_tensor_that_is_read_is_written_too() -> None:
    edges = graph_of()

    def program(x: Tensor) -> Tensor:
        x.index_add_(0, edges[1], x[edges[0]])
        return x * 2

    run, _ = compiled(program, fullgraph=True)
    x = torch.randn(N, F)
    y = x.clone()
    assert_close(run(x), program(y))
    assert_close(x, y)


def test_operands_in_any_layout() -> None:
    edges = graph_of().t().contiguous().t()
    x = torch.randn(F, N).t().requires_grad_()
    w = torch.randn(2 * E)[::2].requires_grad_()
    run, graphs = compiled(aggregate)
    agrees(aggregate, run, (x, w, edges))
    assert counts(graphs) == [1, 2]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_small_integers_as_indices(dtype: torch.dtype) -> None:
    edges = graph_of().to(dtype)
    program = lambda x, w: x.new_zeros(N, F).index_add(
        0, edges[1].long(), x[edges[0].long()] * w[:, None]
    )
    run, graphs = compiled(program)
    agrees(program, run, (leaf(N, F), leaf(E)))
    assert counts(graphs) == [1, 2]


def test_no_edges_at_all() -> None:
    run, _ = compiled(aggregate)
    agrees(aggregate, run, (leaf(N, F), leaf(0), torch.zeros(2, 0, dtype=torch.int64)))


def test_mixed_precision() -> None:
    edges = graph_of()
    run, graphs = compiled(aggregate)
    agrees(
        lambda x, w, e: x.new_zeros(N, F).index_add(0, e[1], x[e[0]] * w[:, None]),
        run,
        (leaf(N, F, dtype=torch.float64), leaf(E, dtype=torch.float64), edges),
    )
    assert counts(graphs) == [1, 2]
    promoted = lambda x, w: torch.zeros(N, F).index_add(0, edges[1], x[edges[0]] * w[:, None])
    run, graphs = compiled(promoted)
    agrees(promoted, run, (torch.randn(N, F).half(), torch.randn(E)))  # half times float is float
    assert counts(graphs) == [1]


def test_no_compilation_for_another_number_of_edges_or_nodes() -> None:
    run, graphs = compiled(aggregate, dynamic=True, fullgraph=True)
    agrees(aggregate, run, (leaf(N, F), leaf(E), graph_of()))
    before = compiled_graphs()
    for nodes, edges in ((N, 45), (17, 90), (5, 7)):
        agrees(aggregate, run, (leaf(nodes, F), leaf(edges), graph_of(nodes, edges)))
    assert compiled_graphs() == before and counts(graphs) == [1, 2]


def test_shapes_that_depend_on_data() -> None:
    """Masked edges: their number is a symbol without a value."""

    def program(x: Tensor, edges: Tensor, keep: Tensor) -> Tensor:
        some = edges[:, keep]
        return x.new_zeros(N, F).index_add(0, some[1], x[some[0]])

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run, graphs = compiled(program, fullgraph=True)
        for seed in range(3):
            agrees(
                program,
                run,
                (
                    leaf(N, F),
                    graph_of(),
                    torch.rand(E, generator=torch.Generator().manual_seed(seed)) > 0.5,
                ),
            )
        assert counts(graphs) == [1, 1], str(insum.fusion.report())


def test_duplicates_add_up() -> None:
    edges = torch.zeros(2, E, dtype=torch.int64)
    run, _ = compiled(aggregate)
    agrees(aggregate, run, (leaf(N, F), leaf(E), edges))


def test_ops_fit_their_schema() -> None:
    edges, x, w = graph_of(), torch.randn(N, F), torch.randn(E)
    views = (("d", "e", ((0, 1),)), ("s", "e", ((0, 0),)))
    spec = Spec(
        "out[d[i],j] = x[s[i],j] * w[i]",
        ("x", "w", "e"),
        views,
        "out#2",
        frozenset("s"),
        frozenset(),
        (),
    )
    assert str(spec_of(str(spec))) == str(spec)
    arguments = (str(spec), [x, w, edges], [N, F])
    expected = aggregate(x, w, edges)
    assert_close(torch.ops.insum.fused(*arguments), expected)
    into = (arguments[0].replace("=", "+="), *arguments[1:])
    assert_close(torch.ops.insum.fused_into(x, *into), x + expected)
    target = x.clone()
    torch.ops.insum.fused_into_(target, *into)
    assert_close(target, x + expected)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.insum.fused.default, arguments, test_utils=checks)
    torch.library.opcheck(torch.ops.insum.fused_into.default, (x, *into), test_utils=checks)
    torch.library.opcheck(torch.ops.insum.fused_into_.default, (target, *into), test_utils=checks)


def test_views_are_the_same_tensor_in_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd saves a view as a new object; what is known of the view is known of that."""
    from insum import memory
    from insum.compat import autograd
    from insum.fusion import op

    seen: list[int] = []
    original = op.select

    def select(base: Tensor, selects: op.Selects) -> Tensor:
        if type(base) is Tensor:
            seen.append(memory.entry_of(base).serial)
        return original(base, selects)

    monkeypatch.setattr(op, "select", select)
    view = graph_of(N, 2 * E)[:, E:]
    run, _ = compiled(aggregate)
    agrees(aggregate, run, (leaf(N, F), leaf(E), view))
    assert len(seen) == 6 and len(set(seen)) == 1
    assert not autograd.in_backward()


def test_rows_after_an_exchange_of_data() -> None:
    run, _ = compiled(aggregate)
    edges = graph_of()
    arguments = torch.randn(N, F), torch.randn(E), edges
    torch.testing.assert_close(run(*arguments), aggregate(*arguments))
    edges.data = graph_of(seed=5)
    torch.testing.assert_close(run(*arguments), aggregate(*arguments))


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduction", ["amax", "amin"])
def test_largest_and_smallest_values(reduction: str, include_self: bool) -> None:
    """Rows that nothing is scattered to keep what is there; NaN is the largest of all, and the
    smallest; minus infinity is a value.
    """
    at = torch.tensor([0, 0, 2, 3, 3, 3])

    def program(base: Tensor, x: Tensor) -> Tensor:
        return base.scatter_reduce(
            0, at[:, None].expand(6, F), x, reduction, include_self=include_self
        )

    run, graphs = compiled(program, fullgraph=True)
    base, x = torch.randn(5, F), torch.randn(6, F)
    x[1, 2], x[2, 1], x[2, 3] = float("nan"), -float("inf"), float("inf")
    torch.testing.assert_close(run(base, x), program(base, x), equal_nan=True)
    assert counts(graphs) == [1]
    run, graphs = compiled(program, fullgraph=True)
    agrees(program, run, (leaf(5, F), leaf(6, F)))
    assert counts(graphs)[0] == 1


def test_largest_values_of_a_column() -> None:
    """Dimensions of size 1 come back."""
    at = torch.tensor([0, 0, 2, 3, 3, 3])

    def program(x: Tensor) -> Tensor:
        return x.new_zeros(5, 1).scatter_reduce(0, at[:, None], x, "amax", include_self=False)

    run, graphs = compiled(program, fullgraph=True)
    agrees(program, run, (leaf(6, 1),))
    assert counts(graphs)[0] == 2  # the largest, and how many there are of it


def test_an_index_that_one_operation_takes_strictly_is_strict_in_all() -> None:
    """``y[i]`` counts from the end, ``gather`` does not: eager fails, and so does what is fused."""

    def program(y: Tensor, i: Tensor) -> Tensor:
        z = y.gather(0, i[:, None].expand(-1, F))
        return torch.zeros_like(y).index_put_((i,), z, accumulate=True)

    run, _ = compiled(program)
    given = torch.randn(N, F), torch.randint(0, N, (E,))
    torch.testing.assert_close(run(*given), program(*given))
    given[1][3] = -1
    for one in (program, run):
        with pytest.raises((RuntimeError, insum.InsumError)):
            one(*given)


def test_the_largest_of_a_product_of_several_is_what_its_gradient_compares_with() -> None:
    src, dst = graph_of()

    def largest(x: Tensor) -> Tensor:
        z = x[src] * x[dst]
        at = dst[:, None].expand(E, F)
        return x.new_zeros(N, F).scatter_reduce(0, at, z * z, "amax", include_self=False)

    run, _ = compiled(largest)
    agrees(run, largest, (leaf(N, F),))


#: Of a tensor and two index tensors, what eager mode takes negative indices in, and what not.
NEGATIVE: dict[str, tuple[Callable[..., Tensor], str]] = {
    "index_add": (lambda x, s, d: x.new_zeros(N, F).index_add(0, d, x[s]), "s"),
    "index_select": (
        lambda x, s, d: x.new_zeros(N, F).index_put(
            (d,), x.index_select(0, s) * 2.0, accumulate=True
        ),
        "d",
    ),
    "index_reduce": (
        lambda x, s, d: x.new_zeros(N, F).index_reduce(0, d, x[s], "mean", include_self=False),
        "s",
    ),
    "scatter_add": (
        lambda x, s, d: x.new_zeros(N, F).scatter_add(0, d[:, None].expand(-1, F), x[s]),
        "s",
    ),
    "embedding": (
        lambda x, s, d: x.new_zeros(N, F).index_put(
            (d,), torch.nn.functional.embedding(s, x), accumulate=True
        ),
        "d",
    ),
    "both": (lambda x, s, d: x.new_zeros(N, F).index_add(0, d, x[s] * x[d]), "s"),
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("place", ["s", "d"])
@pytest.mark.parametrize("name", NEGATIVE)
def test_negative_indices_are_errors_where_eager_mode_allows_none(name: str, place: str) -> None:
    """Though torch traces such operations as others, which allow them."""
    call, allowed = NEGATIVE[name]

    def program(x: Tensor, ends: Tensor) -> Tensor:
        return call(x, ends[0], ends[1])

    run, graphs = compiled(program)
    ends = graph_of()
    ends["sd".index(place), 3] = -2
    if place == allowed:
        agrees(program, run, (leaf(N, F), ends))
        assert counts(graphs)[0] == 1
        return
    for one in (program, run):
        with pytest.raises((IndexError, RuntimeError)):
            one(leaf(N, F), ends)
