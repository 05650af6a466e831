"""Statements at the edges: an output that is its own index, very many variables, names that are
parameters of ours, scalars under vmap.
"""

from __future__ import annotations

import keyword
import math

import pytest
import torch
from torch import Tensor, vmap

import insum
from insum.call.request import request_of
from insum.formats import COO
from insum.ops.encoding import decode, encode
from insum.testing import oracle

# --- an output that is its own index --------------------------------------------------------------

OWN_INDEX: list[tuple[str, list[int]]] = [
    ("C[C[i]] += one[i]", [2, 0, 1, 1]),
    ("C[C[i]] += one[i] + one[i] * one[i]", [2, 0, 1, 1]),
    ("C[C[C[i]]] += one[i]", [1, 2, 3, 0]),
    ("C[C[i]] += C[i]", [1, 2, 3, 1]),
    ("C[C[i]] += C[C[i]] * one[i]", [0, 2, 1, 1]),
    ("C[C[i]] max= 3 * one[i]", [2, 0, 1, 1]),
    ("C[C[i]] min= -1 * one[i]", [2, 2, 2, 1]),
    ("C[C[i]] = one[i]", [2, 0, 1, 1]),
]


def by_hand(statement: str, values: list[int]) -> list[int]:
    """Read before written: the oracle reads a copy under another name."""
    operator = next(o for o in (" += ", " max= ", " min= ", " = ") if o in statement)
    left, _, right = statement.removeprefix("C[").partition(operator)
    text = f"C[{left}{operator}{right}".replace("C[", "old[").replace("old[", "C[", 1)
    C = torch.tensor(values)
    used = {"C": C, "old": C.clone(), "one": torch.ones(4, dtype=torch.int64)}
    found: list[int] = oracle(text, {n: v for n, v in used.items() if f"{n}[" in text}).tolist()
    return found


@pytest.mark.parametrize(("statement", "values"), OWN_INDEX, ids=[s for s, _ in OWN_INDEX])
@pytest.mark.parametrize("layout", ["contiguous", "stepped"])
def test_an_output_that_is_its_own_index(statement: str, values: list[int], layout: str) -> None:
    want = by_hand(statement, values)
    C = torch.tensor(values)
    if layout == "stepped":
        C = torch.zeros(8, dtype=torch.int64)[::2].copy_(C)
    more = {"one": torch.ones(4, dtype=torch.int64)} if "one" in statement else {}
    result = insum.insum(statement, C=C, **more)
    assert result.tolist() == want and (" = " in statement or result is C)


@pytest.mark.parametrize(("statement", "values"), OWN_INDEX, ids=[s for s, _ in OWN_INDEX])
def test_its_own_index_in_traced_code(statement: str, values: list[int]) -> None:
    torch._dynamo.reset()
    more = {"one": torch.ones(4, dtype=torch.int64)} if "one" in statement else {}
    run = torch.compile(lambda C: insum.insum(statement, C=C, **more), backend="aot_eager")
    C = torch.tensor(values)
    assert run(C).tolist() == by_hand(statement, values)


@pytest.mark.interpreter
@pytest.mark.parametrize(("statement", "values"), OWN_INDEX, ids=[s for s, _ in OWN_INDEX])
def test_its_own_index_where_kernels_run(statement: str, values: list[int]) -> None:
    more = {"one": torch.ones(4, dtype=torch.int64)} if "one" in statement else {}
    with insum.settings(backend="fused"), pytest.warns(UserWarning, match="runs as a graph"):
        result = insum.insum(statement, C=torch.tensor(values), **more)
    assert result.tolist() == by_hand(statement, values)


def test_a_view_of_the_output_as_its_index() -> None:
    """Of another dtype, and of another part of the same memory."""
    memory = torch.tensor([1, 0, 3, 3])
    halves = memory.view(torch.int32)[::2]
    insum.insum("C[D[i]] += one[i]", C=memory, D=halves, one=torch.ones(4, dtype=torch.int64))
    assert memory.tolist() == [2, 1, 3, 5]
    memory = torch.tensor([0, 0, 1, 1, 1, 0])
    insum.insum("C[D[i]] += x[i]", C=memory[:4], D=memory[2:], x=memory[1:5])
    assert memory.tolist() == [1, 2, 1, 1, 1, 0]


# --- very many variables --------------------------------------------------------------------------


def ring(count: int, size: int = 2) -> tuple[str, dict[str, Tensor]]:
    """The trace of a product of so many matrices, each index in two of them."""
    factors = " * ".join(f"A{k}[v{k},v{(k + 1) % count}]" for k in range(count))
    torch.manual_seed(count)
    return f"y[] = {factors}", {
        f"A{k}": torch.randn(size, size, dtype=torch.float64) for k in range(count)
    }


@pytest.mark.parametrize("count", [51, 53, 80])
def test_more_variables_than_letters(count: int) -> None:
    statement, values = ring(count)
    want = torch.linalg.multi_dot(list(values.values())).trace()
    torch.testing.assert_close(insum.insum(statement, **values), want)
    assert str(insum.explain(statement, **values))


def test_more_variables_than_letters_with_gradients_and_indices() -> None:
    statement, values = ring(55)
    statement = statement.replace("y[]", "y[D[v7],v9]").replace("A3[v3,v4]", "A3[E[v3],v4]")
    more = {"D": torch.tensor([1, 0]), "E": torch.tensor([0, 0])}
    A = values["A9"].requires_grad_()
    y = insum.insum(statement, sizes={0: 3}, **values, **more)
    before = [values[f"A{k}"] for k in range(7)]
    before[3] = values["A3"][more["E"]]
    chain = torch.linalg.multi_dot([*[values[f"A{k}"] for k in range(9, 55)], *before])
    path = torch.einsum("ij,jk->ijk", values["A7"], values["A8"])
    want = torch.zeros(3, 2, dtype=torch.float64).index_add(
        0, more["D"], torch.einsum("ijk,ki->ik", path, chain)
    )
    torch.testing.assert_close(y, want)
    (got,) = torch.autograd.grad(y.sum(), A, retain_graph=True)
    torch.testing.assert_close(got, torch.autograd.grad(want.sum(), A)[0])


def test_factors_with_more_variables_than_letters_together() -> None:
    names = [f"v{k}" for k in range(60)]
    values = {"A": torch.ones([1] * 30), "B": torch.ones([1] * 30)}
    text = f"A[{','.join(names[:30])}] * B[{','.join(names[30:])}]"
    assert insum.insum(f"y[] = {text}", **values).item() == 1
    with pytest.raises(insum.UnsupportedError, match="have 60 index variables together"):
        insum.insum(f"y[{','.join(names)}] = {text}", **values)


def test_a_value_of_more_variables_than_dimensions() -> None:
    statement, values = ring(70)
    with pytest.raises(insum.UnsupportedError, match="depends on 65 index variables"):
        insum.insum(statement.replace("y[] =", "y[] max="), **values)


def test_integers_where_there_are_no_matrix_products() -> None:
    """Two factors at a time, on devices that have no einsum of integers."""
    from insum.call.request import Request
    from insum.graph.lower import lower

    values = {f"A{k}": torch.ones(4, 4, dtype=torch.int64, device="meta") for k in range(3)}
    problem = Request("y[a,d] = A0[a,b] * A1[b,c] * A2[c,d]").bind(values)
    text = lower(problem).text
    assert text.count("torch.mul") == 2 and text.count("torch.sum") == 2


# --- names ----------------------------------------------------------------------------------------

NAMES = [
    *("self", "statement", "operands", "named", "tensors", "values", "request", "cls", "key"),
    *("torch", "device", "inf", "nan", "NoneType", "operator", "forward", "effort", "timer"),
    *("out", "work", "pid", "tl", "triton", "t", "acc", "i_size", "y_shape"),
    *keyword.kwlist,
]


def check_name(name: str) -> None:
    x, index = torch.arange(3.0), torch.tensor([2, 0, 1])
    for statement, value, want in (
        (f"y[i] = {name}[i] * b[i]", x, [0, 1, 4]),
        (f"y[i] = b[i] * {name}", 2.0, [0, 2, 4]),
        (f"y[i] = b[{name}[i]]", index, [2, 0, 1]),
        (f"{name}[i] += b[i]", torch.ones(3), [1, 2, 3]),
        (f"y[i] = b[i] * b[{name}[]]", 2, [0, 2, 4]),
    ):
        again = value.clone() if isinstance(value, Tensor) else value
        assert insum.insum(statement, b=x, **{name: value}).tolist() == want
        assert insum.compile(statement)(b=x, **{name: again}).tolist() == want


@pytest.mark.parametrize("name", NAMES)
def test_any_name_that_is_not_reserved(name: str) -> None:
    check_name(name)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", NAMES)
def test_any_name_in_kernels(name: str) -> None:
    with insum.settings(backend="fused", require_fused=True):
        check_name(name)


def test_names_of_operands_that_are_parameters() -> None:
    A, x = COO.from_dense(torch.eye(3)), torch.arange(3.0)
    got = insum.einsum("y[i] = statement[i,j] * self[j]", statement=A, self=x)
    assert got.tolist() == [0, 1, 2]
    assert str(insum.explain("y[i] = statement[i,j] * self[j]", statement=A, self=x))
    tuned = insum.compile("y[i] = statement[i] * self[i]").tune(statement=x, self=x)
    assert tuned.trials == ()


def test_a_name_that_is_an_option_of_tuning() -> None:
    x = torch.ones(3)
    message = "the statement names a tensor 'effort', which is an option here"
    with pytest.raises(insum.BindingError, match=message):
        insum.tune("y[i] = effort[i]", effort=x)  # type: ignore[arg-type]
    with pytest.raises(insum.BindingError, match=message):
        insum.compile("y[i] = effort[i]").tune(effort=x)  # type: ignore[arg-type]
    A = insum.formats.GroupCOO.from_dense(torch.eye(3))
    with pytest.raises(insum.BindingError, match="'timer', which is an option here"):
        insum.formats.tune(A, "y[i] = A[i,j] * timer[j]", timer=x)  # type: ignore[arg-type]


# --- numbers and sizes that are too large ---------------------------------------------------------


def test_a_large_integer_after_a_small_one() -> None:
    """What was prepared for an integer does not serve one that is none for torch."""
    x, f = torch.arange(3), insum.compile("y[i] = a * x[i]")
    assert f(a=2, x=x).tolist() == [0, 2, 4]
    for a in (2**63, -(2**63) - 1, 2**70):
        with pytest.raises(insum.DtypeError, match="a is an integer that does not fit"):
            f(a=a, x=x)
        with pytest.raises(insum.DtypeError, match="a is an integer that does not fit"):
            vmap(lambda x, a=a: f(a=a, x=x))(x[None])
    assert f(a=-(2**63), x=torch.tensor([1])).item() == -(2**63)
    assert f(a=float(2**70), x=torch.ones(1)).item() == 2**70


@pytest.mark.parametrize("key", ["x#y", "k[i]#2", "#", "3#", "a;b", ";", "k#3;i"])
def test_marks_in_keys_of_sizes(key: str) -> None:
    x, k = torch.ones(3), torch.arange(3)
    f = lambda x, n=3: insum.insum("y[k[i]] = x[i]", x=x, k=k, sizes={key: n, 0: 3})
    wanted = "sizes has no use for"
    with pytest.raises(insum.BindingError, match=wanted):
        f(x)
    with torch.autocast("cpu"), pytest.raises(insum.BindingError, match=wanted):
        f(x)
    with pytest.raises(insum.BindingError, match=wanted):
        vmap(f)(x[None])
    torch._dynamo.reset()
    with pytest.raises(Exception, match=wanted):
        torch.compile(f, backend="eager")(x)


def test_keys_of_sizes_arrive_as_they_are() -> None:
    for sizes in ({"i": 3}, {0: 3}, {"y": (3,)}, {"k[i]": 3}, {"x#y": 3}, {"a#2": 3, "b": 4}):
        request = request_of("y[k[i]] = x[i]", None, sizes, ())
        assert decode(encode(request, {}))[0] == request


# --- scalars under vmap ---------------------------------------------------------------------------

DTYPES = [torch.float16, torch.float32, torch.float64, torch.int64, torch.complex64]


@pytest.mark.parametrize("scalar", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_dtype_of_a_batched_scalar(scalar: torch.dtype, dtype: torch.dtype) -> None:
    x, s = torch.ones(3).to(dtype), torch.tensor([2.0, 3.0]).to(scalar)
    f = lambda s: insum.insum("y[p] = s * x[p]", s=s, x=x)
    if torch.complex64 in (scalar, dtype) and torch.float16 in (scalar, dtype):
        return  # there is no complex number of half precision to promote to
    got, one = vmap(f)(s), f(s[0])
    assert got.dtype == one.dtype and got.shape == (2, 3)
    torch.testing.assert_close(got[0], one)
    both = vmap(lambda s, x: insum.insum("y[] = s * x", s=s, x=x))(s, torch.ones(2).to(dtype))
    assert both.dtype == insum.insum("y[] = s * x", s=s[0], x=x[0]).dtype


def test_the_dtype_of_a_batched_scalar_under_gradients() -> None:
    x = torch.ones(3)
    s = torch.tensor([2.0, 3.0], dtype=torch.float64)
    f = lambda s: insum.insum("y[] = s * s * x[p]", s=s, x=x)
    assert f(s[0]).dtype == torch.float32
    got = vmap(torch.func.grad(f))(s)
    assert got.dtype == torch.float64 and got.tolist() == [12, 18]
    assert vmap(f)(s).dtype == torch.float32


def test_points_of_rings_are_counted_right() -> None:
    statement, values = ring(53)
    ones = {name: torch.ones_like(value) for name, value in values.items()}
    assert math.log2(insum.insum(statement, **ones).item()) == 53


def test_second_derivatives_where_no_point_reaches_the_output() -> None:
    """The gradient that arrives there reaches nothing, and nothing depends on it."""
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(4, dtype=torch.float64, requires_grad=True)
    y = insum.insum("y[d[p]] max= x[p]", d=torch.tensor([0, 1, 1]), x=x, out_shape=(4,))
    (first,) = torch.autograd.grad(y, x, upstream, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), upstream)
    assert second.tolist() == [1, 1, 0, 0]
