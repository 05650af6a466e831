"""The graph: which torch ops a statement becomes, one graph for all shapes, and values at the
corners of the language.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import insum
from insum.graph.lower import lower
from insum.lang.bind import bind
from insum.lang.parser import parse

LONG = torch.int64


def graph(
    statement: str, mode: str = "new", *, sizes: Any = None, padded: Any = (), **values: Any
) -> str:
    return lower(bind(parse(statement), values, sizes=sizes, padded=padded), mode).text


def index(*values: Any, dtype: torch.dtype = LONG) -> Tensor:
    return torch.tensor(list(values), dtype=dtype)


# --- which ops ------------------------------------------------------------------------------------

A, B, x = torch.randn(4, 6), torch.randn(6, 5), torch.randn(6)
D = index(3, 0, 0, 2)
P = index([0, 1], [2, 3])
G = torch.randn(5, 70, 3)


@pytest.mark.parametrize(
    ("statement", "values", "sizes", "ops", "not_ops"),
    [
        (
            "y[i] = A[i,j] * x[j]",
            {"A": A, "x": x},
            None,
            ["einsum('ij,j->i', A, x)"],
            ["select", "zeros", "index_add"],
        ),
        ("y[j] = A[i,j]", {"A": A}, None, ["torch.sum(A, (0,)"], ["einsum"]),
        ("y[p,j] = A[D[p],j]", {"A": A, "D": D}, None, ["index_select(A, 0, D)"], ["[("]),
        ("y[i,p] = A[i,D[p]]", {"A": A, "D": D}, None, ["index_select(A, 1, D)"], ["[("]),
        ("y[p,q] = x[P[p,q]]", {"x": x, "P": P}, None, ["index_select", "unflatten"], ["[("]),
        ("y[i] = A[i,D[i]]", {"A": A, "D": D}, None, ["torch.gather(A, 1"], ["index_select"]),
        # along what lies side by side in both; else one number at a time
        ("y[i,k] = A[i,P[i,k]]", {"A": A[:2], "P": P}, None, ["torch.gather(A, 1"], ["[("]),
        ("y[k,i] = A[i,P[k,i]]", {"A": A[:2], "P": P}, None, ["torch.gather(A, 1"], ["[("]),
        ("y[k,i] = A[P[k,i],i]", {"A": A[:, :2], "P": P}, None, ["torch.gather(A, 0"], ["[("]),
        ("y[i,k] = A[P[i,k],i]", {"A": A[:, :2], "P": P}, None, ["[("], ["torch.gather"]),
        # differences
        ("y[i,j] = A[i,j] - x[j]", {"A": A, "x": x}, None, ["torch.sub(A, x)"], ["torch.mul"]),
        ("y[i,j] = -x[j] + A[i,j]", {"A": A, "x": x}, None, ["torch.sub(A, x)"], ["torch.mul"]),
        ("y[i,j] = -A[i,j] + x[j]", {"A": A, "x": x}, None, ["torch.mul"], ["permute"]),
        ("y[i] = exp(A[i,j] - x[j])", {"A": A, "x": x}, None, ["torch.sub(A, x)"], ["torch.mul"]),
        ("y[i] = A[i,j] - s", {"A": A, "s": 2.5}, None, ["sub"], []),
        ("y[j] = D[j] - E[j]", {"D": D, "E": D}, None, ["torch.mul"], ["torch.sub"]),
        # inside of a dimension, unless that is short
        ("y[i,c] = G[i,k,c] * H[k,c]", {"G": G, "H": G[0]}, None, ["torch.mul"], ["einsum"]),
        (
            "y[i,c] = G[i,k,c] * H[k,c]",
            {"G": G[..., :2], "H": G[0, :, :2]},
            None,
            ["einsum"],
            ["torch.mul"],
        ),
        ("y[i] = A[i,i]", {"A": A[:, :4]}, None, ["diagonal(A, 0, 0, 1)"], ["arange"]),
        ("y[i] = x[i+1]", {"x": x}, {"i": 5}, ["narrow(x, 0, 1, i_size)"], ["arange"]),
        ("y[i] = x[2*i]", {"x": x}, {"i": 3}, ["slice(0, mul, 2)"], ["arange"]),
        (
            "y[i] = x[i+k] * w[k]",
            {"x": x, "w": x[:2]},
            {"i": 5},
            ["unfold"],
            ["arange", "index_select"],
        ),
        ("y[i] = x[5-i]", {"x": x}, {"i": 6}, ["arange", "index_select"], []),
        ("y[j] = A[2,j]", {"A": A}, None, ["select(A, 0, 2)"], ["index_select"]),
        (
            "C[D[p],j] += A[p,j]",
            {"A": A, "D": D},
            {"C": (4, 6)},
            ["zeros", "index_add_(0, D, A)"],
            ["index_put"],
        ),
        (
            "C[j,D[p]] += A[p,j]",
            {"A": A, "D": D},
            {"C": (6, 4)},
            ["index_add_(1, D, permute)"],
            ["index_put"],
        ),
        (
            "C[D[p],E[p]] += v[p]",
            {"v": A[:, 0], "D": D, "E": D},
            {"C": (4, 4)},
            ["index_put_((D, E), v, accumulate = True)"],
            [],
        ),
        (
            "C[D[p],j] max= A[p,j]",
            {"A": A, "D": D},
            {"C": (4, 6)},
            ["scatter_reduce_", "'amax'"],
            ["index_add"],
        ),
        ("y[i] min= A[i,j]", {"A": A}, None, ["amin(A, (1,))"], ["scatter", "full"]),
        (
            "y[i] = x[i] * exp(A[i,j])",
            {"A": A[:, :5], "x": x[:4]},
            None,
            ["exp(A)", "einsum('i,ij->i', x, exp)"],
            [],
        ),
        ("y[i] = A[i,j] * s", {"A": A, "s": 2.5}, None, ["torch.mul(summed, s)"], []),
    ],
)
def test_ops(
    statement: str, values: dict[str, Any], sizes: Any, ops: list[str], not_ops: list[str]
) -> None:
    text = graph(statement, sizes=sizes, **values)
    assert [op for op in ops if op not in text] == [], text
    assert [op for op in not_ops if op in text] == [], text


def test_three_factors_form_no_outer_product_first() -> None:
    text = graph("y[i,l] = A[i,j] * C[k,l] * B[j,k]", A=A, B=B, C=torch.randn(5, 3))
    assert "einsum('kl,jk->lj', C, B)" in text
    assert "einsum('ij,lj->il', A, contracted)" in text


def test_output_needs_no_transposing() -> None:
    assert insum.insum("C[n,m] = A[m,k] * B[k,n]", A=A, B=B).is_contiguous()
    assert "einsum('kn,mk->nm'" in graph("C[n,m] = A[m,k] * B[k,n]", A=A, B=B)


def test_equal_accesses_are_read_once() -> None:
    assert graph("y[i] = x[D[i]] * x[D[i]] + x[D[i]]", x=x, D=D).count("index_select") == 1


def test_more_variables_than_letters() -> None:
    names = [f"i{k}" for k in range(60)]
    left, right = torch.randn((1,) * 29 + (2,)), torch.randn((2,) + (1,) * 30)
    statement = f"y[{names[0]},{names[59]}] = A[{','.join(names[:30])}] * B[{','.join(names[29:])}]"
    # what one factor alone has is summed first
    assert graph(statement, A=left, B=right).count("torch.sum") == 2
    torch.testing.assert_close(
        insum.insum(statement, A=left, B=right),
        torch.einsum("a,a->", left.flatten(), right.flatten()).reshape(1, 1),
    )


def test_names_of_nodes_say_what_they_hold() -> None:
    text = graph("y[i] = v[i,q] * x[P[i,q]]", x=x, P=P, v=torch.ones(2, 2), padded=("P",))
    assert "P_present" in text and "P_clamped" in text and "x_gathered" in text
    assert "None" not in text and "self" not in text


def test_tensor_names_that_python_reserves() -> None:
    values = {"lambda": x, "initial": x, "shape": x, "torch": x}
    torch.testing.assert_close(
        insum.insum("print[i] = lambda[i] * initial[i] * shape[i] * torch[i]", **values), x**4
    )


# --- one graph for every shape --------------------------------------------------------------------


def test_one_graph_serves_every_shape() -> None:
    statement = parse("C[P[p,q],n] += v[p,q] * B[D[q]+n,n]")

    def lowered(p: int, q: int, n: int) -> object:
        values = {
            "P": torch.zeros(p, q, dtype=LONG),
            "v": torch.ones(p, q),
            "D": torch.zeros(q, dtype=LONG),
            "B": torch.ones(n, n),
        }
        return lower(bind(statement, values, sizes={0: 3}))

    assert lowered(2, 3, 4) is lowered(5, 1, 2)


def test_kinds_have_graphs_of_their_own() -> None:
    statement = parse("y[i] = x[i]")
    assert lower(bind(statement, {"x": x})) is not lower(bind(statement, {"x": x.double()}))


def test_graph_module_runs_under_torch_compile() -> None:
    problem = bind(
        parse("C[D[p],n] = v[p] * B[E[p],n]"), {"v": A[:, 0], "D": D, "E": D, "B": B}, sizes={0: 4}
    )
    lowered = lower(problem)
    compiled = torch.compile(lowered.module, backend="aot_eager", fullgraph=True)
    arguments = [{"v": A[:, 0], "D": D, "E": D, "B": B}[n] for n in lowered.inputs]
    torch.testing.assert_close(
        compiled(*arguments, *lowered.size_arguments(problem)),
        lowered.module(*arguments, *lowered.size_arguments(problem)),
    )


# --- memory ---------------------------------------------------------------------------------------


def largest(statement: str, **values: Any) -> int:
    """The number of elements of the largest tensor that the graph makes."""
    sizes: list[int] = []

    class Watch(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            result = super().run_node(n)
            if isinstance(result, Tensor) and n.op != "placeholder":
                sizes.append(result.untyped_storage().nbytes() // result.element_size())
            return result

    problem = bind(parse(statement), values)
    lowered = lower(problem)
    Watch(lowered.module).run(
        *(values[n] for n in lowered.inputs), *lowered.size_arguments(problem)
    )
    return max(sizes)


def test_a_shared_variable_is_not_squared() -> None:
    n = 50
    assert largest("y[i] = A[i,D[i]]", A=torch.randn(n, 3), D=torch.zeros(n, dtype=LONG)) <= 3 * n


def test_windows_are_views() -> None:
    assert (
        largest("y[i] = x[i+k] * w[k]", x=torch.randn(100), w=torch.randn(20), y=torch.empty(81))
        <= 100
    )


def test_two_index_tensors_gather_only_what_they_meet() -> None:
    values = {"A": torch.randn(40, 40), "D": index(0, 1), "E": index(2, 3)}
    # views share A's memory; the gathered part has 4 elements
    assert largest("y[p,q] = A[D[p],E[q]]", **values) <= 1600


# --- values at the corners ------------------------------------------------------------------------


def test_results_are_new_tensors() -> None:
    for statement in ("y[i] = x[i]", "y[i] = conj(x[i])", "y[i] max= x[i]"):
        result = insum.insum(statement, x=x)
        assert result.data_ptr() != x.data_ptr() and torch.equal(result, x)
    result = insum.insum("y[i,j] = x[i]", x=x, sizes={"j": 3})
    assert result.is_contiguous() and torch.equal(result, x[:, None].expand(6, 3))


def test_conj_result_is_resolved() -> None:
    z = torch.randn(3, dtype=torch.complex64)
    result = insum.insum("y[i] = conj(z[i])", z=z)
    assert not result.is_conj() and torch.equal(result, z.conj())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_accumulates_in_float32(dtype: torch.dtype) -> None:
    ones = torch.ones(20_000, dtype=dtype)
    zeros = torch.zeros(20_000, dtype=LONG)
    for result in (
        insum.insum("t[] = a[i]", a=ones),
        insum.insum("t[D[i]] = a[i]", a=ones, D=zeros, out_shape=(1,))[0],
    ):
        assert result.dtype == dtype and result.item() == torch.tensor(20_000.0).to(dtype).item()
    target = torch.zeros(1, dtype=dtype)
    insum.insum("t[D[i]] += a[i]", t=target, a=ones, D=zeros)
    assert target.item() == torch.tensor(20_000.0).to(dtype).item()


def test_bool_is_or_of_ands() -> None:
    a, b = (
        torch.tensor([[True, False], [False, False]]),
        torch.tensor([[True, True], [False, True]]),
    )
    result = insum.insum("c[i,k] = a[i,j] * b[j,k]", a=a, b=b)
    assert result.dtype == torch.bool and torch.equal(result, (a.int() @ b.int()) > 0)
    target = torch.tensor([True, False, False])
    insum.insum("t[D[i]] += a[i]", t=target, a=torch.tensor([False, True]), D=index(0, 1))
    assert target.tolist() == [True, True, False]


def test_integers_stay_exact() -> None:
    big = torch.tensor([2**40, 3], dtype=LONG)
    assert insum.insum("t[] = a[i] * a[i]", a=big[1:]).item() == 9
    assert insum.insum("t[] = a[i]", a=big).item() == 2**40 + 3


@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.uint8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64],
)
def test_any_integer_dtype_indexes(dtype: torch.dtype) -> None:
    d = index(3, 0, 2, dtype=dtype)
    assert torch.equal(insum.insum("y[p] = x[D[p]]", x=x, D=d), x[d.long()])
    assert torch.equal(
        insum.insum("y[D[p]] = x[p]", x=x[:3], D=d, out_shape=(4,)),
        torch.zeros(4).index_add(0, d.long(), x[:3]),
    )
    assert torch.equal(insum.insum("y[p,q] = B[D[p],D[q]]", B=B, D=d), B[d.long()][:, d.long()])
    assert torch.equal(
        insum.insum("y[D[p]] max= x[p]", x=x[:3], D=d, y=torch.full((4,), -9.0))[d.long()], x[:3]
    )


def test_a_number_that_int64_does_not_hold_is_told() -> None:
    d = torch.zeros(4, 3, dtype=torch.uint64)
    d.numpy()[2, 1] = 2**63
    with pytest.raises(insum.IndexRangeError, match=r"D\[2,1\] is 9223372036854775808"):
        insum.insum("y[i,p] = A[i,D[i,p]]", A=A, D=d)


def test_wider_values_than_target() -> None:
    target = torch.zeros(2, dtype=torch.float32)
    wide = {
        "a": torch.tensor([1e200, 2.0], dtype=torch.float64),
        "b": torch.tensor([1e-200, 2.0], dtype=torch.float64),
    }
    insum.insum("t[i] += a[i] * b[i]", t=target, **wide)
    assert target.tolist() == [1.0, 4.0]


def test_padding_contributes_nothing() -> None:
    inf, nan = float("inf"), float("nan")
    p = index([0, -1], [-1, -1])
    v = torch.tensor([[2.0, inf], [nan, nan]])
    assert insum.insum(
        "y[i] = v[i,q] * x[P[i,q]]", v=v, x=torch.tensor([3.0]), P=p, padded="P"
    ).tolist() == [6.0, 0.0]
    # A factor that does not see the padded index is masked where that takes no more room than
    # another factor does.
    assert insum.insum(
        "y[i] = v[i,q] * x[P[i,q]] * s[i]",
        v=v,
        x=torch.tensor([3.0]),
        s=torch.tensor([1.0, inf]),
        P=p,
        padded="P",
    ).tolist() == [6.0, 0.0]
    assert insum.insum("y[P[i,q]] = v[i,q]", v=v, P=p, padded="P", out_shape=(2,)).tolist() == [
        2.0,
        0.0,
    ]
    assert insum.insum("y[P[i,q]] max= v[i,q]", v=v, P=p, padded="P", out_shape=(2,)).tolist() == [
        2.0,
        -inf,
    ]
    assert insum.insum(
        "y[i] min= v[i,q] * x[P[i,q]]", v=v, x=torch.tensor([3.0]), P=p, padded="P"
    ).tolist() == [6.0, inf]


def test_padding_alone_indexes_an_empty_tensor() -> None:
    p = index(-1, -1)
    assert insum.insum("y[i] = x[P[i]]", x=torch.empty(0), P=p, padded="P").tolist() == [0.0, 0.0]
    assert insum.insum(
        "y[P[i]] = v[i]", v=torch.ones(2), P=p, padded="P", out_shape=(0,)
    ).shape == (0,)


def test_empty_extents() -> None:
    assert insum.insum(
        "y[i] = A[i,j] * x[j] + b[i]", A=torch.ones(2, 0), x=torch.ones(0), b=torch.ones(2)
    ).tolist() == [1.0, 1.0]
    assert insum.insum("y[i] max= A[i,j]", A=torch.ones(2, 0)).tolist() == [-float("inf")] * 2
    assert (
        insum.insum("y[D[i]] = A[i]", A=torch.ones(0), D=index(), out_shape=(3,)).tolist()
        == [0.0] * 3
    )


def test_zero_dimensional_index() -> None:
    assert insum.insum("y[j] = A[D[],j]", A=A, D=torch.tensor(2)).equal(A[2])
    assert insum.insum(
        "y[D[]] = s", s=torch.tensor(4.0), D=torch.tensor(1), out_shape=(3,)
    ).tolist() == [0.0, 4.0, 0.0]
    assert insum.insum(
        "y[D[],E[]] max= s",
        s=torch.tensor(4.0),
        D=torch.tensor(1),
        E=torch.tensor(0),
        y=torch.zeros(2, 1),
    ).tolist() == [[0.0], [4.0]]


def test_numbers_alone() -> None:
    result = insum.insum("y[i] = 2 * s + exp(0)", s=1.5, sizes={"i": 2})
    assert result.tolist() == [4.0, 4.0] and result.dtype == torch.get_default_dtype()


def test_diagonal_and_affine_targets() -> None:
    assert insum.insum("C[i,i] = x[i]", x=x, out_shape=(6, 6)).equal(torch.diag(x))
    assert insum.insum("C[2*i+1] = x[i]", x=x[:2], out_shape=(5,)).equal(
        torch.tensor([0, x[0], 0, x[1], 0])
    )
    full = insum.insum("C[i+k] = x[i] * w[k]", x=x, w=x[:3], out_shape=(8,))
    torch.testing.assert_close(
        full,
        torch.nn.functional.conv1d(x.view(1, 1, -1), x[:3].flip(0).view(1, 1, -1), padding=2).view(
            -1
        ),
    )
    assert insum.insum("C[0,j] = x[j]", x=x, out_shape=(2, 6)).equal(
        torch.stack([x, torch.zeros(6)])
    )


def test_deterministic_mode() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        for statement in (
            "C[D[p],j] += A[p,j]",
            "C[D[p],E[j]] += A[p,j]",
            "C[D[p],j] max= A[p,j]",
            "C[D[p],E[j]] min= A[p,j]",
        ):
            values = {
                "A": A,
                "D": D,
                **({"E": index(0, 1, 2, 3, 4, 5)} if "E" in statement else {}),
            }
            first = insum.insum(statement, out_shape=(4, 6), **values)
            assert torch.equal(first, insum.insum(statement, out_shape=(4, 6), **values))
    finally:
        torch.use_deterministic_algorithms(False)


# --- one graph for all shapes that would get it ---------------------------------------------------


@pytest.mark.parametrize("first", ["short", "long"])
def test_what_sizes_decide_does_not_depend_on_who_came_first(first: str) -> None:
    """Short sums are multiplied and summed, long ones contracted, whatever was seen before."""
    from insum.graph import lower as module

    statement = "y[p,n] = v[p,q] * B[p,q,n]"
    sizes = {"short": 3, "long": 1000}
    module._graphs.clear()
    found = {}
    for name in (first, *sizes, *sizes):
        size = sizes[name]
        text = graph(statement, v=torch.ones(2, size), B=torch.ones(2, size, 4))
        assert found.setdefault(name, text) == text
    assert "einsum" not in found["short"] and "einsum" in found["long"]
    for size in (1, 2, 63, 64):
        assert graph(statement, v=torch.ones(5, size), B=torch.ones(5, size, 2)) == found["short"]
    assert graph(statement, v=torch.ones(2, 65), B=torch.ones(2, 65, 4)) == found["long"]
    assert sum(map(len, module._graphs.values())) == 2, "one for each decision, not for each size"


def test_half_precision_products_of_a_library_are_not_widened() -> None:
    """On a GPU; but what is no more than an argument is still copied."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        values = {n: torch.empty(5, 5, device="cuda", dtype=torch.float16) for n in "AB"}
    product = lower(bind(parse("C[i,j] = A[i,k] * B[k,j]"), values), "new").text
    assert "float32" not in product
    copied = lower(bind(parse("C[i,j] = A[i,j]"), {"A": values["A"]}), "new").text
    assert ".to(" in copied or "clone" in copied


def test_truth_values_are_compared_as_such() -> None:
    """Those of a gradient of a maximum: four bytes each were most of what it moved."""
    x = torch.randn(4, 3)
    statement = parse("y[D[p],n] = eq(eq(x[p,n], z[p,n]), eq(x[p,n], x[p,n]))")
    given = {"x": x, "z": x, "D": torch.tensor([0, 1, 1, 0])}
    text = lower(bind(statement, given, sizes={"y": (2, 3)})).text
    assert text.count("torch.float32") == 2, text  # the result, and what is added to it
