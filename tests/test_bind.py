"""Statement + arguments -> Problem: extents, output shape and dtype, and which combinations are
refused. Texts of messages: test_messages.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from insum.errors import BindingError, DeviceError, DtypeError, IndexRangeError
from insum.lang.bind import Problem, bind, kind_of
from insum.lang.expr import Access, index_of
from insum.lang.parser import parse
from insum.lang.types import COMPUTABLE, Typed, accumulator, identity, of_number


def problem(statement: str, *, sizes: Any = None, padded: Any = (), **values: Any) -> Problem:
    return bind(parse(statement), values, sizes=sizes, padded=padded)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def index(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


# --- extents and shapes ---------------------------------------------------------------------------


def test_the_papers_statement() -> None:
    found = problem(
        "C[AM[p],n] += AV[p,q] * B[AK[p,q],n]",
        C=ones(7, 5),
        AM=index(3),
        AV=ones(3, 2),
        B=ones(9, 5),
        AK=index(3, 2),
    )
    assert dict(found.extents) == {"p": 3, "n": 5, "q": 2}
    assert found.shape == (7, 5) and found.dtype == torch.float32 and found.device.type == "cpu"
    assert [(str(a), d, str(i)) for a, d, i in found.index_uses()] == [
        ("C[AM[p],n]", 0, "AM[p]"),
        ("B[AK[p,q],n]", 0, "AK[p,q]"),
    ]
    assert [found.size_of(a, d) for a, d, _ in found.index_uses()] == [7, 9]


@pytest.mark.parametrize(
    ("statement", "values", "sizes", "shape"),
    [
        ("t[] = A[i,i]", {"A": ones(3, 3)}, None, ()),
        ("C[j,i] = A[i,j]", {"A": ones(2, 3)}, None, (3, 2)),
        ("C[i,i] = x[i]", {"x": ones(4)}, None, (4, 4)),
        ("C[i,k] = x[i]", {"x": ones(4)}, {"k": 6}, (4, 6)),
        ("C[i,k] = x[i]", {"x": ones(4)}, {1: 6}, (4, 6)),
        ("C[i,k] = x[i]", {"x": ones(4)}, {"1": 6}, (4, 6)),
        ("C[i,k] = x[i]", {"x": ones(4)}, {"C": (4, 6)}, (4, 6)),
        ("C[i,k] = x[i]", {"x": ones(4), "C": ones(4, 6)}, None, (4, 6)),
        ("C[D[p]] = x[p]", {"x": ones(4), "D": index(4)}, {"D": 9}, (9,)),
        ("C[D[p]] = x[p]", {"x": ones(4), "D": index(4)}, {"D[p]": 9}, (9,)),
        ("C[2*D[p] + 1] = x[p]", {"x": ones(4), "D": index(4)}, {"2*D[p]+1": 9}, (9,)),
        (
            "C[D[p],E[p]] = x[p]",
            {"x": ones(4), "D": index(4), "E": index(4)},
            {"E": 9, "D": 8},
            (8, 9),
        ),
        ("C[D[p],D[p]] = x[p]", {"x": ones(4), "D": index(4)}, {"D": 9}, (9, 9)),
        ("C[3] = x[i]", {"x": ones(4)}, {0: 5}, (5,)),
        ("C[i] = 1", {}, {"i": 3}, (3,)),
        ("y[x] = I[x + r] * W[r]", {"I": ones(10), "W": ones(3)}, {"x": 8}, (8,)),
        ("y[x] = I[2*x + r] * W[r]", {"I": ones(10), "W": ones(3), "y": ones(4)}, None, (4,)),
        ("y[i] = x[i]", {"x": ones(0)}, None, (0,)),
        ("C[i] = A[i,j]", {"A": ones(3, 0)}, None, (3,)),
        ("C[x] = I[x + r] * W[r]", {"I": ones(1), "W": ones(3)}, {"x": 0}, (0,)),
    ],
)
def test_output_shapes(
    statement: str, values: dict[str, Any], sizes: Any, shape: tuple[int, ...]
) -> None:
    assert problem(statement, sizes=sizes, **values).shape == shape


def test_python_numbers_and_scalar_tensors() -> None:
    found = problem("y[i] = a * b * x[i]", a=2.5, b=torch.tensor(3.0), x=ones(3))
    assert found.kinds["a"].device is None and [found.kinds[n].strength for n in "abx"] == [0, 1, 2]
    assert problem("y[i] = x[p[]]", x=ones(3), p=2, sizes={"i": 2}).shape == (2,)
    assert problem("t[] = a * 2", a=3).dtype == torch.int64


def test_a_size_may_be_said_twice_if_it_is_the_same() -> None:
    assert problem(
        "C[i,k] = x[i]", x=ones(4), C=ones(4, 6), sizes={"k": 6, "C": (4, 6), "i": 4, 0: 4}
    ).shape == (4, 6)


def test_access_equality_does_not_confuse_the_target_with_a_read() -> None:
    found = problem("C[D[i]] += C[i]", C=ones(3), D=index(3))
    assert [str(a) for a, _, _ in found.index_uses()] == ["C[D[i]]"]
    assert found.statement.value == Access("C", (index_of("i"),))


@pytest.mark.parametrize(
    ("statement", "values", "sizes"),
    [
        ("y[i] = A[i,j] * x[j]", {"A": ones(2, 3), "x": ones(4)}, None),
        ("y[i] = A[i,i]", {"A": ones(2, 3)}, None),
        ("y[i] = A[i]", {"A": ones(2), "y": ones(3)}, None),
        ("y[i] = A[i]", {"A": ones(2)}, {"i": 3}),
        ("y[i] = A[i]", {"A": ones(2)}, {0: 3}),
        ("y[i] = A[i]", {"A": ones(2)}, {"y": (3,)}),
        ("y[i] = A[i]", {"A": ones(2)}, {"y": (2, 1)}),
        ("y[i] = A[i]", {"A": ones(2)}, {"y": (-2,)}),
        ("y[i] = A[i]", {"A": ones(2)}, {"y": (2.0,)}),
        ("y[i] = A[i]", {"A": ones(2)}, {"y": 2}),
        ("y[i] = A[i]", {"A": ones(2)}, {"A": (2,)}),
        ("y[i] = A[i]", {"A": ones(2)}, {"z": 2}),
        ("y[i] = A[i]", {"A": ones(2)}, {1: 2}),
        ("y[i] = A[i]", {"A": ones(2)}, {-1: 2}),
        ("y[i] = A[i]", {"A": ones(2)}, {"i": -2}),
        ("y[i] = A[i]", {"A": ones(2)}, {"i": "2"}),
        ("y[i] = A[i]", {"A": ones(2)}, {"i": True}),
        ("y[i] = A[i]", {"A": ones(2)}, {None: 2}),
        ("y[i] = A[i]", {"A": ones(2)}, {"\u00b2": 2}),
        ("y[i] = A[i]", {"A": ones(2)}, [2]),
        ("y[i] = A[i]", {"A": ones(2), "B": ones(2)}, None),
        ("y[i] = A[i] * B[i]", {"A": ones(2)}, None),
        ("y[i] = A[i]", {"A": ones(2, 2)}, None),
        ("y[i] = A", {"A": ones(2)}, {"i": 2}),
        ("y[i] = A[i]", {"A": 2.0}, None),
        ("y[i,k] = A[i]", {"A": ones(2)}, None),
        ("y[D[i]] = A[i]", {"A": ones(2), "D": index(2)}, None),
        ("y[0] = A[i]", {"A": ones(2)}, None),
        ("y[i] = I[i + r] * A[i]", {"A": ones(2), "I": ones(9)}, None),
        ("y[D[i],D[i]] = A[i]", {"A": ones(2), "D": index(2)}, {"D": 3, 0: 4}),
    ],
)
def test_contradictions_are_refused(statement: str, values: dict[str, Any], sizes: Any) -> None:
    with pytest.raises(BindingError):
        problem(statement, sizes=sizes, **values)


@pytest.mark.parametrize(
    ("statement", "values", "sizes"),
    [
        ("y[i] = A[i + 1]", {"A": ones(3)}, {"i": 3}),
        ("y[i] = A[i - 1]", {"A": ones(3)}, {"i": 3}),
        ("y[i] = A[3] * x[i]", {"A": ones(3), "x": ones(2)}, None),
        ("y[i] = A[-1] * x[i]", {"A": ones(3), "x": ones(2)}, None),
        # wrong whatever the other sizes are
        ("y[i] = A[3] * x[i]", {"A": ones(3), "x": ones(0)}, None),
        # the empty range of j empties its own term alone
        ("y[i] = A[i + 1] + B[j]", {"A": ones(3), "B": ones(0)}, {"i": 3}),
        ("y[2*i] = x[i]", {"x": ones(3)}, {0: 4}),
        ("y[D[i]] = x[E[i + 1]]", {"x": ones(3), "D": index(3), "E": index(3)}, {0: 4}),
    ],
)
def test_affine_indices_are_checked_without_looking_at_data(
    statement: str, values: dict[str, Any], sizes: Any
) -> None:
    with pytest.raises(IndexRangeError):
        problem(statement, sizes=sizes, **values)


def test_an_index_over_nothing_is_in_range() -> None:
    assert problem("y[i] = A[i + 7] * x[i]", A=ones(3), x=ones(0)).shape == (0,)


# --- padding --------------------------------------------------------------------------------------


def test_padded_names_index_tensors() -> None:
    assert problem("y[i] = A[D[i]]", A=ones(3), D=index(2), padded=["D"]).padded == {"D"}
    assert problem("y[i] = A[DD[i]]", A=ones(3), DD=index(2), padded="DD").padded == {"DD"}
    for wrong in (["A"], ["E"], ["D", "y"]):
        with pytest.raises(BindingError, match="no index tensor"):
            problem("y[i] = A[D[i]]", A=ones(3), D=index(2), padded=wrong)


# --- dtypes ---------------------------------------------------------------------------------------

VALUES: list[Any] = [True, 3, 2.5, 1j]
VALUES += [torch.tensor(1, dtype=d) for d in sorted(COMPUTABLE, key=str)] + [
    torch.ones(2, dtype=d) for d in sorted(COMPUTABLE, key=str)
]


def test_promotion_is_torchs_own() -> None:
    for a, b in itertools.product(VALUES, VALUES):
        if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
            continue
        assert (kind_of(a).type | kind_of(b).type).dtype == torch.result_type(a, b), (a, b)


def test_promotion_does_not_depend_on_the_order() -> None:
    types = [kind_of(v).type for v in VALUES]
    for a, b in itertools.product(types, types):
        assert a | b == b | a


@pytest.mark.parametrize(
    ("statement", "values", "dtype"),
    [
        ("y[i] = A[i]", {"A": ones(2, dtype=torch.float16)}, torch.float16),
        (
            "y[i] = A[i] * B[i]",
            {"A": ones(2, dtype=torch.float16), "B": ones(2, dtype=torch.bfloat16)},
            torch.float32,
        ),
        ("y[i] = 2.5 * A[i]", {"A": ones(2, dtype=torch.bfloat16)}, torch.bfloat16),
        ("y[i] = 2.5 * A[i]", {"A": ones(2, dtype=torch.int32)}, torch.float32),
        ("y[i] = 2 * A[i]", {"A": ones(2, dtype=torch.int8)}, torch.int8),
        ("y[i] = 2 * A[i]", {"A": ones(2, dtype=torch.bool)}, torch.int64),
        ("y[i] = A[i] * A[i]", {"A": ones(2, dtype=torch.bool)}, torch.bool),
        ("y[i] = -A[i]", {"A": ones(2, dtype=torch.bool)}, torch.int64),
        *(
            (
                statement,
                {"A": ones(2, dtype=torch.bool), "B": ones(2, dtype=torch.int8)},
                torch.int8,
            )
            for statement in (
                "y[i] = -A[i] * B[i]",
                "y[i] -= A[i] * B[i]",
                "y[i] = B[i] - A[i] * B[i]",
            )
        ),
        (
            "y[i] = s * A[i]",
            {"A": ones(2), "s": torch.tensor(2.0, dtype=torch.float64)},
            torch.float32,
        ),
        ("y[i] = s * A[i]", {"A": ones(2), "s": 1j}, torch.complex64),
        (
            "y[i] = s * A[i]",
            {"A": ones(2), "s": torch.tensor(1j, dtype=torch.complex128)},
            torch.complex64,
        ),
        ("y[i] = exp(A[i])", {"A": ones(2, dtype=torch.int64)}, torch.float32),
        ("y[i] = relu(A[i])", {"A": ones(2, dtype=torch.int64)}, torch.int64),
        ("y[i] = abs(A[i])", {"A": ones(2, dtype=torch.complex128)}, torch.float64),
        ("y[i] = conj(A[i])", {"A": ones(2, dtype=torch.complex128)}, torch.complex128),
        ("y[i] = A[i]", {"A": ones(2), "y": ones(2, dtype=torch.float64)}, torch.float64),
        ("y[i] = A[i]", {"A": ones(2), "y": ones(2, dtype=torch.float16)}, torch.float16),
        ("y[i] += A[i]", {"A": ones(2, dtype=torch.int32), "y": ones(2)}, torch.float32),
        ("y[i] = A[D[i]]", {"A": ones(2), "D": torch.zeros(2, dtype=torch.uint64)}, torch.float32),
    ],
)
def test_result_dtypes(statement: str, values: dict[str, Any], dtype: torch.dtype) -> None:
    assert problem(statement, **values).dtype == dtype


def test_literals_follow_the_default_dtype() -> None:
    assert problem("y[i] = 2.5", sizes={"i": 2}).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert problem("y[i] = 2.5", sizes={"i": 2}).dtype == torch.float64
        assert problem("y[i] = 2.5 * A[i]", A=ones(2)).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("statement", "values"),
    [
        ("y[i] = A[D[i]]", {"A": ones(2), "D": ones(2)}),
        ("y[i] = A[D[i]]", {"A": ones(2), "D": ones(2).bool()}),
        ("y[i] = A[s[]] * x[i]", {"A": ones(2), "x": ones(2), "s": 1.0}),
        ("y[i] = A[i]", {"A": [1.0, 2.0]}),
        ("y[i] = A[i]", {"A": None}),
        ("y[i] = A[i]", {"A": torch.eye(2).to_sparse()}),
        ("y[i] = A[i]", {"A": ones(2, dtype=torch.uint16)}),
        ("y[i] = A[i]", {"A": ones(2).to(torch.float8_e4m3fnuz)}),
        ("y[i] += A[i]", {"A": ones(2), "y": ones(2).to(torch.float8_e4m3fn)}),
        ("y[i] = s * A[i]", {"A": ones(2, dtype=torch.float16), "s": 1j}),
        ("y[i] = A[i]", {"A": ones(2), "y": ones(2, dtype=torch.uint32)}),
        ("y[i] += A[i]", {"A": ones(2), "y": ones(2, dtype=torch.int64)}),
        ("y[i] = A[i]", {"A": ones(2, dtype=torch.complex64), "y": ones(2)}),
        ("y[i] += A[i]", {"A": ones(2, dtype=torch.int64), "y": ones(2, dtype=torch.bool)}),
        ("y[i] max= A[i]", {"A": ones(2, dtype=torch.complex64)}),
        ("y[i] = relu(A[i])", {"A": ones(2, dtype=torch.complex64)}),
        ("y[i] = exp(2 * sign(A[i]))", {"A": ones(2, dtype=torch.complex64)}),
    ],
)
def test_dtypes_that_are_refused(statement: str, values: dict[str, Any]) -> None:
    with pytest.raises(DtypeError):
        problem(statement, **values)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_there_is_no_complex_half() -> None:
    with pytest.raises(DtypeError, match="complex32"):
        problem("y[i] = A[i]", A=ones(2, dtype=torch.complex32))


def test_identities_and_accumulators() -> None:
    assert (
        identity("+=", torch.float16) == 0
        and identity("max=", torch.float32) == float("-inf")
        and identity("min=", torch.float32) == float("inf")
    )
    assert identity("max=", torch.int8) == -128 and identity("min=", torch.uint8) == 255
    assert identity("max=", torch.bool) is False and identity("min=", torch.bool) is True
    assert (
        accumulator(torch.bfloat16) == torch.float32
        and accumulator(torch.float64) == torch.float64
        and accumulator(torch.bool) == torch.int64
    )
    assert of_number(True) == Typed(torch.bool, 0) and of_number(1j).dtype == torch.complex64


# --- devices --------------------------------------------------------------------------------------


def test_devices_must_agree() -> None:
    with pytest.raises(DeviceError):
        problem("y[i] = A[i] * B[i]", A=ones(2), B=torch.ones(2, device="meta"))


def test_a_scalar_on_the_cpu_goes_with_any_device() -> None:
    assert (
        problem("y[i] = s * A[i]", A=torch.ones(2, device="meta"), s=torch.tensor(2.0)).device.type
        == "meta"
    )
    assert problem("t[] = s * s", s=torch.tensor(2.0)).device.type == "cpu"
