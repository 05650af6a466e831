"""The kit itself: the oracle by hand and against torch, drawn cases, comparison, counting."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import find, given, settings

import insum.testing
from insum.errors import BindingError, IndexRangeError, StatementError
from insum.lang.bind import bind
from insum.lang.parser import parse
from insum.testing import (
    Case,
    Options,
    assert_close,
    count_compiles,
    draw_cases,
    oracle,
    statements,
    tolerance,
)
from insum.testing.cases import COMPLEX, FLOATS, HALVES, INTEGERS

SOURCE = Path(__file__).parent.parent / "src"

A = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
x = torch.tensor([1.0, 10.0, 100.0])
square = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def ints(*values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


# --- the oracle, by hand --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "values", "options", "expected"),
    [
        ("y[i] = A[i,j] * x[j]", {"A": A, "x": x}, {}, [321, 654]),
        ("t[] = A[i,i]", {"A": square}, {}, 5),
        ("t[] = A[i,j]", {"A": A}, {}, 21),
        ("d[i] = A[i,i]", {"A": square}, {}, [1, 4]),
        ("D[i,i] = v[i]", {"v": x[:2]}, {}, [[1, 0], [0, 10]]),
        ("T[j,i] = A[i,j]", {"A": A}, {}, [[1, 4], [2, 5], [3, 6]]),
        ("y[i] = A[i,2]", {"A": A}, {}, [3, 6]),
        ("y[i] = x[i + 1] - w[i]", {"x": x, "w": x[:2]}, {}, [9, 90]),
        ("y[i] = x[2 - i]", {"x": x}, {"sizes": {"i": 3}}, [100, 10, 1]),
        ("y[i] = x[i + r] * w[r]", {"x": x, "w": x[:2]}, {"sizes": {"i": 2}}, [101, 1010]),
        ("y[p] = x[D[p]]", {"x": x, "D": ints(2, 0, 2, 1)}, {}, [100, 1, 100, 10]),
        ("y[p] = x[E[D[p]]]", {"x": x, "E": ints(1, 2, 0), "D": ints(0, 0, 2)}, {}, [10, 10, 1]),
        ("y[p] = A[D[p],D[p]+1]", {"A": A, "D": ints(1, 0)}, {}, [6, 2]),
        ("y[D[p]] = v[p]", {"v": x, "D": ints(1, 1, 3)}, {"sizes": {"y": (4,)}}, [0, 11, 0, 100]),
        ("y[D[p]] += v[p]", {"v": x, "D": ints(1, 1, 3), "y": torch.ones(4)}, {}, [1, 12, 1, 101]),
        ("y[D[p]] = v[p]", {"v": x, "D": ints(1, 1, 3), "y": torch.ones(4)}, {}, [0, 11, 0, 100]),
        (
            "y[D[p]] max= v[p]",
            {"v": x, "D": ints(1, 1, 3)},
            {"sizes": {"y": (4,)}},
            [-np.inf, 10, -np.inf, 100],
        ),
        (
            "y[D[p]] min= v[p]",
            {"v": x, "D": ints(1, 1, 2), "y": torch.full((3,), 5.0)},
            {},
            [5, 1, 5],
        ),
        ("y[i] = A[i,j] * x[j] + b[i]", {"A": A, "x": x, "b": ints(1, 2)}, {}, [322, 656]),
        ("y[i] = b[i] + 1", {"b": ints(1, 2)}, {}, [2, 3]),
        ("y[i] = x[j]", {"x": x}, {"sizes": {"i": 2}}, [111, 111]),
        ("y[i] = 3", {}, {"sizes": {"i": 2}}, [3, 3]),
        ("t[] = 3 + x[i]", {"x": x}, {}, 114),
        ("y[i] = relu(A[i,j] * v[j])", {"A": A, "v": torch.tensor([1.0, -1.0, 1.0])}, {}, [4, 10]),
        ("y[i] = x[i] * (x[i] - 1) * s", {"x": x, "s": 0.5}, {}, [0, 45, 4950]),
        ("y[p] = x[D[p]]", {"x": x, "D": ints(-1, 2, -1)}, {"padded": ["D"]}, [0, 100, 0]),
        ("y[p] = 7", {}, {"sizes": {"p": 0}}, []),
        ("y[i] = A[i,j]", {"A": torch.ones(2, 0)}, {}, [0, 0]),
        ("y[i] max= A[i,j]", {"A": torch.ones(2, 0)}, {}, [-np.inf, -np.inf]),
        ("y[i] = eq(x[i], 10)", {"x": x}, {}, [0, 1, 0]),
        ("y[i] = sign(x[i] - 10) + step(x[i] - 10)", {"x": x}, {}, [-1, 0, 2]),
        ("C[i] += C[j] * A[i,j]", {"C": torch.tensor([1.0, 2.0]), "A": square}, {}, [6, 13]),
    ],
)
def test_by_hand(
    statement: str, values: dict[str, Any], options: dict[str, Any], expected: Any
) -> None:
    found = oracle(statement, values, **options)
    np.testing.assert_array_equal(found, np.array(expected, dtype=found.dtype))


def test_absent_points_do_not_even_contribute_zero_times_infinity() -> None:
    bad = torch.tensor([float("inf"), 2.0])
    assert (
        oracle(
            "y[] = w[p] * v[D[p]]",
            {"w": torch.tensor([0.0, 3.0]), "v": bad, "D": ints(-1, 1)},
            padded=["D"],
        )
        == 6
    )
    found = oracle(
        "y[D[p]] max= v[p]", {"v": bad, "D": ints(-1, 0)}, sizes={"y": (2,)}, padded=["D"]
    )
    np.testing.assert_array_equal(found, [2, -np.inf])


def test_an_absent_inner_index_makes_the_point_absent() -> None:
    found = oracle("y[p] = x[2*E[D[p]]]", {"x": x, "E": ints(1, 0), "D": ints(-1, 0)}, padded=["D"])
    np.testing.assert_array_equal(found, [0, 100])


def test_booleans_are_or_and_and() -> None:
    a, b = torch.tensor([[True, False], [True, True]]), torch.tensor([True, True])
    found = oracle("y[i] = a[i,j] * b[j]", {"a": a, "b": b})
    assert found.dtype == np.bool_ and found.tolist() == [True, True]
    assert oracle("y[i] = a[i,j] * c[j]", {"a": a, "c": torch.tensor([False, True])}).tolist() == [
        False,
        True,
    ]
    assert (
        oracle("t[] min= a[i,j]", {"a": a}).item() is False
        and oracle("t[] max= a[i,j]", {"a": a}).item() is True
    )


def test_integers_are_exact_and_wrap_once() -> None:
    big = 2**62
    assert oracle("t[] = v[i]", {"v": ints(big, big, big, -big)}).item() == -(2**63)
    assert (
        oracle("t[] = v[i] * v[i]", {"v": ints(100, 100, dtype=torch.uint8)}).tolist()
        == 20000 % 256
    )
    assert oracle("t[] = v[i] - w[i]", {"v": ints(2**60 + 1), "w": ints(2**60)}).item() == 1
    assert oracle("t[] max= v[i]", {"v": torch.zeros(0, dtype=torch.int8)}).item() == -128


def test_complex_and_wide_results() -> None:
    z = torch.tensor([1 + 2j, 3 - 1j])
    found = oracle("t[] = conj(z[i]) * z[i]", {"z": z})
    assert found.dtype == np.complex128 and found == 15
    assert oracle("t[] = abs(z[i])", {"z": z[:1]}).item() == pytest.approx(5**0.5)
    assert (
        oracle("t[] = v[i]", {"v": torch.full((3,), 1 / 3, dtype=torch.bfloat16)}).dtype
        == np.float64
    )


def test_what_python_would_raise_for_is_infinite_or_nan() -> None:
    v = torch.tensor([0.0, -1.0])
    with np.errstate(all="raise"):
        assert oracle("y[i] = reciprocal(v[i])", {"v": v}).tolist() == [np.inf, -1]
        assert oracle("y[i] = log(v[i])", {"v": v})[0] == -np.inf and np.isnan(
            oracle("y[i] = sqrt(v[i])", {"v": v})[1]
        )
        assert oracle("t[] = exp(1000 * v[i])", {"v": -v}).item() == np.inf
    assert np.isnan(oracle("t[] max= v[i]", {"v": torch.tensor([1.0, np.nan, 2.0])}))


def test_arguments_are_left_alone() -> None:
    C, v = torch.ones(3), torch.ones(3)
    oracle("C[i] += v[i]", {"C": C, "v": v})
    assert torch.equal(C, torch.ones(3)) and torch.equal(v, torch.ones(3))


def test_the_oracle_refuses_what_the_library_refuses() -> None:
    with pytest.raises(StatementError):
        oracle("y[i] =", {})
    with pytest.raises(BindingError):
        oracle("y[i] = A[i]", {})
    for bad in (-1, 3):
        with pytest.raises(IndexRangeError, match="outside dimension 0 of size 3"):
            oracle("y[p] = x[D[p]]", {"x": x, "D": ints(0, bad)})


@pytest.mark.parametrize(
    ("equation", "statement", "shapes"),
    [
        ("ij,jk->ik", "C[i,k] = A[i,j] * B[j,k]", [(3, 4), (4, 2)]),
        ("bij,bjk->bik", "C[b,i,k] = A[b,i,j] * B[b,j,k]", [(2, 3, 4), (2, 4, 2)]),
        ("i,j->ij", "C[i,j] = A[i] * B[j]", [(3,), (2,)]),
        ("ii->i", "C[i] = A[i,i]", [(3, 3)]),
        ("iij->j", "C[j] = A[i,i,j]", [(3, 3, 2)]),
        ("ijk->", "C[] = A[i,j,k]", [(3, 2, 4)]),
        ("ij,kj,kl->il", "C[i,l] = A[i,j] * B[k,j] * D[k,l]", [(2, 3), (4, 3), (4, 2)]),
        (",i->i", "C[i] = A * B[i]", [(), (3,)]),
        ("abcde,c->ed", "C[e,d] = A[a,b,c,d,e] * B[c]", [(2, 2, 3, 2, 2), (3,)]),
        ("ij,ij->i", "C[i] = A[i,j] * B[i,j]", [(3, 0), (3, 0)]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.int64])
def test_against_einsum(
    equation: str, statement: str, shapes: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    tensors = [
        torch.randint(-5, 5, s).to(dtype) if dtype == torch.int64 else torch.randn(s, dtype=dtype)
        for s in shapes
    ]
    values = dict(zip(["A", "B", "D"], tensors, strict=False))
    assert_close(torch.einsum(equation, *tensors), oracle(statement, values))


def test_against_torchs_scatter() -> None:
    torch.manual_seed(0)
    C, v, D = (
        torch.randn(5, 3, dtype=torch.float64),
        torch.randn(9, 3, dtype=torch.float64),
        torch.randint(5, (9,)),
    )
    assert_close(C.index_add(0, D, v), oracle("C[D[p],n] += v[p,n]", {"C": C, "v": v, "D": D}))
    expected = C.scatter_reduce(0, D[:, None].expand_as(v), v, "amax")
    assert_close(expected, oracle("C[D[p],n] max= v[p,n]", {"C": C, "v": v, "D": D}))


# --- comparison -----------------------------------------------------------------------------------


def test_tolerances_grow_with_coarseness() -> None:
    order = [torch.int64, torch.float64, torch.float32, torch.float16, torch.bfloat16]
    assert [tolerance(d) for d in order] == sorted(tolerance(d) for d in order)
    assert tolerance(torch.bool) == (0, 0) and tolerance(torch.complex64) == tolerance(
        torch.float32
    )


@pytest.mark.parametrize(
    ("actual", "expected", "dtype"),
    [
        (torch.ones(2), np.ones(3), None),
        (torch.ones(2), np.ones((2, 1)), None),
        (torch.tensor([1.0, 1.001]), np.ones(2), None),
        (torch.tensor([1.0, 1.001]), np.ones(2), torch.float64),
        (torch.tensor([1, 2]), np.array([1, 3]), torch.bfloat16),
        (torch.tensor([1.0, float("nan")]), np.ones(2), torch.bfloat16),
        (torch.tensor([float("inf")]), np.array([1.0]), torch.bfloat16),
        (torch.tensor([True]), np.array([False]), None),
    ],
)
def test_differences_are_seen(
    actual: torch.Tensor, expected: Any, dtype: torch.dtype | None
) -> None:
    if dtype == torch.bfloat16 and actual.dtype == torch.int64:
        dtype = None
    with pytest.raises(AssertionError):
        assert_close(actual, expected, dtype)


def test_equal_things_are_close() -> None:
    assert_close(torch.tensor([1.0, 1.001]), np.ones(2), torch.float16)
    assert_close(torch.tensor([float("nan"), float("inf")]), np.array([np.nan, np.inf]))
    assert_close(torch.tensor([1e-6, 1000.0]), np.array([0.0, 1000.0]))
    assert_close(torch.tensor([1 + 2j]).conj(), np.array([1 - 2j]))
    assert_close(torch.zeros(0, 3), np.zeros((0, 3)))


# --- cases ----------------------------------------------------------------------------------------

FAMILIES: dict[str, dict[str, Any]] = {
    "any": {},
    "every dtype": {"dtypes": (*FLOATS, *HALVES, *COMPLEX, *INTEGERS, torch.bool)},
    "differentiable": {"dtypes": (torch.float64, torch.complex128), "differentiable": True},
    "products": {"product_only": True},
    "plain": {
        "indirect": False,
        "affine": False,
        "strided": False,
        "zero_extents": False,
        "padded": False,
        "scalars": False,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_cases_bind_and_have_a_meaning(family: str) -> None:
    options = Options(**FAMILIES[family])
    for case in draw_cases(150, seed=3, **FAMILIES[family]):
        problem = bind(
            parse(case.statement), case.values, sizes=dict(case.sizes), padded=case.padded
        )
        assert case.expected().shape == problem.shape
        assert problem.statement.operator in options.operators
        points = [np.prod([int(problem.extents[v]) for v in t.variables]) for t in problem.terms]
        assert max(points) <= options.max_points
        assert all(t.numel() <= 4 * options.max_elements for t in case.tensors.values())


def test_options_are_kept() -> None:
    seen = set().union(*(case.features for case in draw_cases(200, **FAMILIES["plain"])))
    assert not seen & {
        "indirect index",
        "affine index",
        "strided",
        "zero extent",
        "padding",
        "Python number",
    }
    for case in draw_cases(
        100,
        operators=("min=",),
        functions=("exp",),
        dtypes=(torch.float16,),
        mixed=False,
        max_rank=2,
    ):
        assert not case.features & {"=", "+=", "max=", "tanh()", "float32", "rank 3"}
    for case in draw_cases(100, product_only=True):
        assert not case.features & {"max=", "min=", "several terms"}


def test_every_feature_is_drawn() -> None:
    seen = set().union(*(case.features for case in draw_cases(400, **FAMILIES["every dtype"])))
    wanted = {f"rank {n}" for n in range(6)} | {"=", "+=", "max=", "min="}
    wanted |= {
        "repeated index",
        "shared index tensor",
        "nested indirection",
        "affine index",
        "negative coefficient",
        "literal index",
        "zero extent",
        "strided",
    }
    wanted |= {
        "expanded",
        "several terms",
        "several factors",
        "Python number",
        "padding",
        "scatter",
        "broadcast",
        "reduction",
        "target passed",
        "target read",
    }
    wanted |= {
        str(d).removeprefix("torch.")
        for d in (*FLOATS, *HALVES, *COMPLEX, *INTEGERS, torch.bool, torch.uint16, torch.uint64)
    }
    assert not wanted - seen


def test_the_same_seed_gives_the_same_cases() -> None:
    first, again, other = (list(map(repr, draw_cases(20, seed=s))) for s in (1, 1, 2))
    assert first == again != other
    assert list(map(repr, draw_cases(5, seed=1))) == first[:5]


def test_cases_do_not_depend_on_the_process() -> None:
    """A seed in a report means the same everywhere: nothing hangs on the hashes of strings."""
    command = (
        "from insum.testing import draw_cases; print(*map(repr, draw_cases(3, seed=7)), sep='\\n')"
    )
    found = subprocess.run(
        [sys.executable, "-c", command],
        env={"PYTHONPATH": str(SOURCE), "PYTHONHASHSEED": "5"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.splitlines() == list(map(repr, draw_cases(3, seed=7)))


def test_clone_and_to_keep_the_layout() -> None:
    for case in draw_cases(60, seed=4, **FAMILIES["every dtype"]):
        for copied in (case.clone(), case.to("cpu")):
            assert copied.statement == case.statement and repr(copied) == repr(case)
            for name, tensor in case.tensors.items():
                other = copied.tensors[name]
                assert laid_out(other) == laid_out(tensor)
                assert tensor.numel() == 0 or other.data_ptr() != tensor.data_ptr()
        moved = case.to("meta")
        assert all(
            t.device.type == "meta" and t.stride() == case.tensors[n].stride()
            for n, t in moved.tensors.items()
        )


def laid_out(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.dtype


def test_a_case_prints_as_the_call_that_runs_it() -> None:
    class Recorder:
        @staticmethod
        def insum(statement: str, *, sizes: Any = None, padded: Any = (), **values: Any) -> Case:
            return Case(statement, values, sizes or {}, padded)

    for case in draw_cases(60, seed=6, **FAMILIES["every dtype"]):
        again = eval(
            repr(case),
            {"insum": Recorder, "torch": torch, "nan": float("nan"), "inf": float("inf")},
        )
        assert (again.statement, again.sizes, again.padded) == (
            case.statement,
            case.sizes,
            case.padded,
        )
        assert all(
            t.stride() == again.tensors[n].stride() and t.dtype == again.tensors[n].dtype
            for n, t in case.tensors.items()
        )
        np.testing.assert_array_equal(again.expected(), case.expected())


def test_precision_is_the_coarsest_that_takes_part() -> None:
    half, single, double, whole = (
        torch.ones(2, dtype=d) for d in (torch.float16, torch.float32, torch.float64, torch.int64)
    )
    assert Case("y[i] = a[i] * b[i]", {"a": half, "b": double}).precision == torch.float16
    assert Case("y[i] = exp(a[i]) * b[i]", {"a": whole, "b": double}).precision == torch.float64
    assert Case("y[i] = exp(a[i]) * b[i]", {"a": single, "b": double}).precision == torch.float32
    assert Case("y[i] = exp(2) * b[i]", {"b": double}).precision == torch.float64
    assert Case("y[i] = exp(a[i])", {"a": whole}).precision == torch.float32
    assert Case("y[i] = 2.5 * a[i]", {"a": double}).precision == torch.float64
    assert Case("y[i] = 2 * a[i]", {"a": whole}).precision == torch.int64
    assert Case("y[i] += a[i]", {"a": double, "y": single}).precision == torch.float32
    assert Case("y[i] = a[D[i]]", {"a": double, "D": whole}).precision == torch.float64


def test_the_strategy_draws_and_shrinks() -> None:
    seen: list[str] = []

    @settings(max_examples=20, deadline=None, database=None, derandomize=True)
    @given(statements(product_only=True))
    def check(case: Case) -> None:
        seen.append(case.statement)
        assert case.expected() is not None

    check()
    assert len(seen) >= 20 and len(set(seen)) > 5
    small = find(
        statements(),
        lambda case: "scatter" in case.features,
        settings=settings(max_examples=300, database=None, derandomize=True, deadline=None),
    )
    assert len(small.statement) < 40, small.statement


def test_hypothesis_is_needed_for_strategies_alone() -> None:
    command = (
        "import sys; sys.modules['hypothesis'] = None; "
        "from insum.testing import draw_cases, oracle; list(draw_cases(2)); print('fine')"
    )
    found = subprocess.run(
        [sys.executable, "-c", command],
        env={"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "fine"


def test_public_names_have_docstrings_with_examples() -> None:
    functions = [
        n for n in insum.testing.__all__ if n not in ("Tolerance", "Compilations", "Options")
    ]
    assert [n for n in functions if ">>>" not in (getattr(insum.testing, n).__doc__ or "")] == []
    assert all(getattr(insum.testing, n).__doc__ for n in insum.testing.__all__)


# --- counting -------------------------------------------------------------------------------------


def test_compilations_are_counted() -> None:
    function = torch.compile(lambda t: t.sin() + 1, backend="eager", dynamic=False)
    with count_compiles() as outer:
        function(torch.ones(3))
        assert outer.graphs == 1
        with count_compiles() as inner:
            function(torch.ones(3))
            assert inner.graphs == 0
            function(torch.ones(4))
        assert inner.graphs == 1
    function(torch.ones(5))
    assert (outer.graphs, inner.graphs, outer.kernels) == (2, 1, 0)
    assert repr(outer) == "Compilations(graphs=2, kernels=0)"


def test_kernels_are_counted_where_the_launcher_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Launch:
        compile_count = 5

    monkeypatch.setitem(sys.modules, "insum.runtime.launch", Launch)
    with count_compiles() as count:
        Launch.compile_count += 2
    Launch.compile_count += 10
    assert count.kernels == 2


@pytest.mark.interpreter
def test_interpreted_kernels_are_counted() -> None:
    with insum.settings(backend="fused", require_fused=True):
        # of which the second is summed over j
        f = lambda x: insum.insum("y[i] = 77.25 * x[i] + x[i] * x[j]", x=x)
        with count_compiles() as first:
            f(torch.ones(3))
        with count_compiles() as second:
            f(torch.ones(3))
    assert (first.kernels, second.kernels) == (2, 0)


def test_compiled_kernels_are_counted_once_for_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind of call is one kernel for pointers of each alignment; other sizes compile nothing."""
    import triton

    from insum.runtime import binaries, inspection, launch

    monkeypatch.setattr(launch, "interpreting", lambda: False)
    monkeypatch.setattr(binaries, "recalled", lambda *kind: None)
    monkeypatch.setattr(binaries, "note", lambda *kind: None)
    monkeypatch.setattr(triton, "compile", lambda source, **options: source)
    monkeypatch.setattr(launch, "launcher_of", lambda compiled: lambda programs, arguments: None)
    monkeypatch.setattr(launch, "flaw_of", lambda compiled: 0)
    held = torch.zeros(200)
    problem = bind(parse("y[i] = 2.5 * x[i]"), {"x": held[:96]})
    program = inspection.plan_only(problem, {"x": held[:96]})

    def call(values: torch.Tensor) -> None:
        problem = bind(parse("y[i] = 2.5 * x[i]"), {"x": values})
        inspection.elsewhere(problem, {"x": values}).ready(program)({"x": values})

    with count_compiles() as count:
        call(held[:96])
        assert count.kernels == 1
        call(held[:96])
        call(held[:72])
        assert count.kernels == 1, "other sizes of the same kind"
        call(held[1:97])
        assert count.kernels == 2, "an address that is not aligned"
        launch.forget()
        assert count.kernels == 2, "what was compiled was compiled"
