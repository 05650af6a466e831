"""Classes of sizes and strides: what they promise of every call that is in them, that they are few,
and that measuring finds just what binding finds.
"""

from __future__ import annotations

import itertools
from collections import Counter
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import insum
from insum.call import prepared as calls
from insum.call.request import request_of
from insum.codegen.arguments import reciprocal_of
from insum.lang.measure import measure_of
from insum.plan.sizes import (
    FEW,
    MOST_MULTIPLE,
    NEW,
    OUT,
    Extent,
    class_of,
    contiguous,
    power_of_two,
    strides_of,
    typical,
    unit_of,
)
from insum.runtime.classify import classified, contiguous_strides, running
from insum.testing import Case, draw_cases, statements
from kernels import ONLY_FUSED, bound

QUICK = settings(max_examples=300, deadline=None, database=None, derandomize=True)
extents = st.integers(0, 100_000) | st.integers(0, 300) | st.integers(0, 2**40)


# --- extents --------------------------------------------------------------------------------------


@QUICK
@given(st.integers(1, 2**31 - 1) | st.integers(1, 300), st.integers(0, 2**31 - 1), st.integers())
@example(1, 2**31 - 1, 0)
@example(2**31 - 1, 2**31 - 1, 0)
def test_what_kernels_divide_with(size: int, number: int, near: int) -> None:
    """At any number, and where the quotient changes."""
    reciprocal = reciprocal_of(size)
    factor, shift = reciprocal % 2**32, reciprocal >> 32
    times = near % (2**31 // size + 1) * size
    for one in (number, times - 1, times, times + 1):
        if 0 <= one < 2**31:
            high = one * factor >> 32
            assert high + one < 2**32  # what the kernel adds in 32 bits
            assert (high + one) >> shift == one // size
    assert reciprocal < 2**63


@QUICK
@given(extents, st.booleans())
@example(0, False)
@example(1, True)
@example(FEW + 1, True)
@example(MOST_MULTIPLE * 3, False)
@example(2**31, False)
def test_what_a_class_says_of_its_extents(extent: int, runs: bool) -> None:
    found = class_of(extent, runs=runs)
    assert found.most / 2 < extent <= found.most or extent == found.most == 0
    assert extent % found.multiple == 0
    if found.typical in (found.multiple, 0):
        assert extent == found.typical, "such a class has one extent"
    if runs and extent > FEW:
        assert found.multiple == 1, "nothing but how large it is"


@QUICK
@given(extents, st.booleans())
def test_what_is_typical_is_in_its_class_and_not_better_than_the_rest(
    extent: int, runs: bool
) -> None:
    found = class_of(extent, runs=runs)
    assert class_of(found.typical, runs=runs) == found
    assert 4 * found.typical >= 3 * found.most, "in the upper half of its class"


@QUICK
@given(extents, st.sampled_from([16, 32, 64, 128, 256]))
def test_a_tile_that_divides_the_multiple_divides_every_extent(extent: int, tile: int) -> None:
    """And where it does not divide the multiple, there is an extent that it does not divide."""
    found = class_of(extent, runs=False)
    if found.multiple % tile == 0:
        assert extent % tile == 0
    elif found.typical:
        assert found.typical % tile


@pytest.mark.parametrize("runs", [False, True])
def test_classes_are_few(runs: bool) -> None:
    every = Counter(class_of(extent, runs=runs) for extent in range(100_001))
    by_size = Counter(found.most for found in every)
    # all powers of two that divide, and the power of two itself
    assert max(by_size.values()) <= MOST_MULTIPLE.bit_length() + 1
    if runs:
        assert all(by_size[most] == 1 for most in by_size if most > FEW)
    assert len(every) <= (50 if runs else 150), len(every)


def test_classes_print_themselves() -> None:
    shown = [str(class_of(n, runs=False)) for n in (0, 1, 2, 7, 200, 256)]
    assert shown == ["0", "1", "2", "<=8", "<=256 by 8", "256"]
    assert str(class_of(250_000, runs=True)) == "<=262144"


@QUICK
@given(st.integers(0, 2**40))
def test_powers_of_two(size: int) -> None:
    power = power_of_two(size)
    assert power >= size and power.bit_count() == 1 and (power < 2 * size or power == 1)
    assert power_of_two(power) == power and power_of_two(typical(size)) == power or size <= 1


# --- strides --------------------------------------------------------------------------------------


@QUICK
@given(st.integers(0, 10_000), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_units_divide_strides(stride: int, itemsize: int, vector: bool) -> None:
    unit = unit_of(stride, itemsize, vector=vector)
    if stride in (0, 1):
        assert unit == stride, "known without being passed"
        return
    assert unit < 0 and stride % -unit == 0
    width = -unit * itemsize
    assert unit == -1 or width in (4, 8, 16)
    if vector:
        assert unit == -1 or stride * itemsize % width == 0
        assert width == 16 or itemsize == 16 or stride * itemsize % 16 != 0, "as wide as can be"
    else:
        assert unit == -1


@QUICK
@given(st.lists(st.integers(0, 4), max_size=4), st.randoms(use_true_random=False))
def test_dimensions_that_join_can_be_walked_as_one(shape: list[int], random: Random) -> None:
    """Drawn as views of something larger, with dimensions exchanged, skipped and expanded."""
    base = torch.empty([random.choice((n, n, 2 * n, n + 3)) for n in shape])
    tensor = base
    for dim, size in enumerate(shape):
        step = 2 if base.shape[dim] == 2 * size and random.random() < 0.5 else 1
        tensor = tensor.narrow(dim, 0, min(tensor.shape[dim], size * step))
        tensor = tensor[tuple([slice(None)] * dim + [slice(None, None, step)])]
    if random.random() < 0.3:
        tensor = tensor.permute(random.sample(range(len(shape)), len(shape)))
    strides = strides_of(tensor.shape, tensor.stride(), 4, vector=True)
    assert len(strides.units) == tensor.dim() and len(strides.joins) == max(0, tensor.dim() - 1)
    if not tensor.numel():
        return  # nothing is walked
    if tensor.is_contiguous() and 1 not in tensor.shape:
        assert strides.is_contiguous
    if strides.is_contiguous:
        flat = [_offset(tensor, place) for place in _places(tensor)]
        assert flat == list(range(tensor.numel()))
    for at, count in itertools.product(range(tensor.dim()), range(2, tensor.dim() + 1)):
        if at + count > tensor.dim() or not strides.can_join(at, count):
            continue
        joined = strides.joined(at, count)
        assert joined.units == (*strides.units[:at], *strides.units[at + count - 1 :])
        sizes, last = tensor.shape[at : at + count], tensor.stride(at + count - 1)
        for number, place in enumerate(itertools.product(*map(range, sizes))):
            walked = zip(place, tensor.stride()[at : at + count], strict=True)
            assert sum(p * s for p, s in walked) == number * last


def _places(tensor: torch.Tensor) -> itertools.product[tuple[int, ...]]:
    return itertools.product(*map(range, tensor.shape))


def _offset(tensor: torch.Tensor, place: tuple[int, ...]) -> int:
    return sum(p * s for p, s in zip(place, tensor.stride(), strict=True))


@pytest.mark.parametrize("rank", range(4))
def test_arrays_of_our_own_are_contiguous(rank: int) -> None:
    found = contiguous(rank)
    assert found.is_contiguous and len(found.units) == rank
    assert found.units == (-1,) * (rank - 1) + (1,) * min(1, rank)


@QUICK
@given(st.lists(st.integers(1, 5), max_size=4))
def test_strides_of_a_new_output(shape: list[int]) -> None:
    assert contiguous_strides(shape) == torch.empty(shape).stride()


# --- classes of calls -----------------------------------------------------------------------------


def class_of_call(case: Case) -> Any:
    problem = bound(case.statement, case.values, case.sizes, case.padded)
    target = case.values.get(case.target)
    return problem, classified(
        problem,
        running(problem),
        {n: v for n, v in case.values.items() if n != case.target or problem.target_read},
        [int(n) for n in problem.extents.values()],
        tuple(int(n) for n in problem.shape),
        target if isinstance(target, torch.Tensor) else None,
    )


def test_what_is_true_of_the_class_of_a_call() -> None:
    for case in draw_cases(300, seed=3, max_extent=40, max_points=20_000, max_elements=5000):
        problem, found = class_of_call(case)
        assert list(found.extents) == list(problem.extents)
        for name, extent in problem.extents.items():
            assert found.extents[name] == class_of(int(extent), runs=name in running(problem))
        names = {OUT: case.tensors.get(case.target), **case.tensors}
        for name, tensor in names.items():
            if tensor is None or name not in found.strides:
                continue
            for unit, stride in zip(found.strides[name].units, tensor.stride(), strict=True):
                assert unit == stride if unit >= 0 else stride % -unit == 0
        new = contiguous_strides([int(n) for n in problem.shape])
        for unit, stride in zip(found.strides[NEW].units, new, strict=True):
            assert unit == stride if unit >= 0 else stride % -unit == 0
        assert found.typical().keys() == found.extents.keys()
        assert not found.wide
        _, again = class_of_call(case.clone())
        assert again.key == found.key and hash(again.key) == hash(found.key)


def test_variables_that_index_tensors_run_over() -> None:
    values = {
        "I": torch.zeros(5, dtype=torch.int64),
        "J": torch.zeros(5, 3, dtype=torch.int64),
        "V": torch.zeros(5, 3),
        "B": torch.zeros(9, 7),
    }
    problem = bound("C[I[p],n] += V[p,q] * B[J[p,q],n]", values, {0: 4})
    assert running(problem) == {"p", "q"}
    assert running(bound("C[i,j] = B[i,j]", {"B": values["B"]})) == frozenset()


def test_calls_of_many_sizes_are_of_few_classes() -> None:
    """A graph with other nodes and edges at every step, and features that stay."""
    keys = set()
    generator = Random(0)
    for _ in range(200):
        nodes, edges = generator.randint(5000, 60_000), generator.randint(40_000, 900_000)
        values = {
            "AM": torch.empty(edges, dtype=torch.int32, device="meta"),
            "AK": torch.empty(edges, dtype=torch.int32, device="meta"),
            "AV": torch.empty(edges, device="meta"),
            "B": torch.empty(nodes, 72, device="meta"),
        }
        case = Case("C[AM[p],n] += AV[p] * B[AK[p],n]", values, {0: nodes})
        keys.add(class_of_call(case)[1].key)
    assert len(keys) <= 40, len(keys)


def test_what_decides_a_plan_is_in_the_key() -> None:
    def key(rows: int = 5000, n: int = 72, stride: int = 72, **more: Any) -> Any:
        dense = torch.empty(rows, stride, device="meta")[:, :n]
        values = {"A": dense, "x": torch.empty(n, device="meta"), **more}
        return class_of_call(Case("y[i] = A[i,j] * x[j]", values))[1].key

    assert key() == key(rows=7000) == key(rows=5016)
    assert key() != key(rows=9000), "another power of two"
    assert key() != key(rows=5001), "a multiple of eight no more"
    assert key() != key(n=100, stride=100) and key() != key(n=64, stride=64)
    assert key() != key(stride=80), "rows that do not follow one another"
    assert key(stride=80) == key(stride=84) != key(stride=82), "16 bytes apart, or 8"
    assert key() != key(x=torch.empty(1, device="meta").expand(72))
    assert key() != key(rows=5000, stride=2**20), "offsets of 64 bits"


# --- measuring ------------------------------------------------------------------------------------


def check_measure(case: Case, random: Random) -> str:
    """Measured with other sizes, and bound with them: the same, or neither."""
    request = request_of(case.statement, None, dict(case.sizes) or None, case.padded)
    problem = request.bind(case.values)
    measure = measure_of(problem, request.size_keys)
    assert measure(case.values, request.size_values) == (
        tuple(problem.extents.values()),
        problem.shape,
    )
    change = {n: random.choice((n, n, n + 1, 2 * n, 0)) for n in range(200)}
    noise = random.choice((0.0, 0.0, 0.05))

    def changed(size: int) -> int:
        return random.randint(-1 if noise else 0, 6) if random.random() < noise else change[size]

    values: dict[str, Any] = {}
    for name, value in case.values.items():
        if isinstance(value, torch.Tensor):
            shape = [max(0, changed(n)) for n in value.shape]
            values[name] = torch.empty(shape, dtype=value.dtype, device="meta")
        else:
            values[name] = value
    sizes = {
        k: tuple(map(changed, s)) if isinstance(s, tuple) else changed(s)
        for k, s in case.sizes.items()
    }
    other = request_of(case.statement, None, sizes or None, case.padded)
    assert other.size_keys == request.size_keys
    found = measure(values, other.size_values)
    try:
        wanted = other.bind(values)
    except (insum.BindingError, insum.IndexRangeError):
        assert found is None, (case, sizes)
        return "refused"
    assert found == (tuple(wanted.extents.values()), wanted.shape), (case, sizes)
    return "fits"


@settings(max_examples=400, deadline=None, database=None, derandomize=True)
@given(statements(), st.randoms(use_true_random=False))
def test_measuring_finds_what_binding_finds(case: Case, random: Random) -> None:
    check_measure(case, random)


def test_measuring_refuses_what_binding_refuses() -> None:
    """Both happen often enough for the test to mean something."""
    random = Random(0)
    seen = Counter(check_measure(case, random) for case in draw_cases(1500, seed=9))
    assert min(seen["fits"], seen["refused"]) > 200, seen


MEASURED = [
    ("y[i] = A[i,j] * x[j]", {}, {"A": (2, 3), "x": (3,)}, {"A": (2, 3), "x": (4,)}, {}),
    ("y[i] = A[i + 1]", {"i": 3}, {"A": (4,)}, {"A": (4,)}, {"i": 4}),
    ("y[i] = A[3 - i]", {"i": 4}, {"A": (4,)}, {"A": (4,)}, {"i": 5}),
    ("y[i] = A[2]", {"i": 4}, {"A": (3,)}, {"A": (2,)}, {"i": 4}),
    ("y[i] += A[i]", {}, {"A": (3,), "y": (3,)}, {"A": (3,), "y": (4,)}, {}),
    ("y[2*i] = A[i]", {0: 5}, {"A": (3,)}, {"A": (4,)}, {0: 5}),
    ("y[i] = A[i]", {"i": 3}, {"A": (3,)}, {"A": (3,)}, {"i": -1}),
    ("y[i] = A[i]", {"y": (3,)}, {"A": (3,)}, {"A": (3,)}, {"y": (4,)}),
]


@pytest.mark.parametrize(("statement", "sizes", "shapes", "wrong", "wrong_sizes"), MEASURED)
def test_sizes_that_do_not_fit_together(
    statement: str, sizes: Any, shapes: Any, wrong: Any, wrong_sizes: Any
) -> None:
    made, others = (
        {name: torch.ones(shape) for name, shape in given.items()} for given in (shapes, wrong)
    )
    request = request_of(statement, None, sizes or None, ())
    other = request_of(statement, None, wrong_sizes or None, ())
    measure = measure_of(request.bind(made), request.size_keys)
    assert measure(made, request.size_values) is not None
    assert measure(others, other.size_values) is None
    insum.insum(statement, sizes=sizes or None, **made)
    with pytest.raises((insum.BindingError, insum.IndexRangeError)):
        insum.insum(statement, sizes=wrong_sizes or None, **others)


def test_sizes_that_are_no_integers_are_refused_whatever_was_called_before() -> None:
    for size in (2, 1):
        assert insum.insum("y[i] = s", sizes={"i": size}, s=torch.tensor(1.0)).shape == (size,)
        for wrong in (float(size), size == 1 or 2.0, str(size)):
            with pytest.raises(insum.BindingError, match="an integer"):
                insum.insum("y[i] = s", sizes={"i": wrong}, s=torch.tensor(1.0))
        assert insum.insum("y[i] = s", sizes={"i": size}, s=torch.tensor(1.0)).shape == (size,)


# --- one program for a class ----------------------------------------------------------------------


def of_class(wanted: Extent, *, runs: bool) -> list[int]:
    found = range(wanted.most // 2 + 1, wanted.most + 1)
    return [n for n in found if class_of(n, runs=runs) == wanted]


def index(random: Random, entries: int, rows: int, *, ordered: bool) -> torch.Tensor:
    drawn = [random.randrange(rows) for _ in range(entries)]
    return torch.tensor(sorted(drawn) if ordered else drawn)


#: Statements over these variables: p and q run over index tensors, r is the number of rows.
PROGRAMS = {
    "a product": ("C[i,j] = A[i,k] * B[k,j]", {"A": "ik", "B": "kj"}),
    "a product of three": ("C[i,j] = A[i,k] * B[k,j] * v[k]", {"A": "ik", "B": "kj", "v": "k"}),
    "a sum": ("C[i] = A[i,k]", {"A": "ik"}),
    "functions": ("C[i,j] = exp(A[i,k]) * B[k,j]", {"A": "ik", "B": "kj"}),
    "a maximum": ("C[j] max= B[k,j]", {"B": "kj"}),
    "rows": ("C[I[p],j] += V[p] * B[K[p],j]", {"V": "p", "B": "rj"}),
    "groups": ("C[I[p],j] += U[p,q] * B[K2[p,q],j]", {"U": "pq", "B": "rj"}),
    "greatest rows": ("C[I[p],j] max= V[p] * B[K[p],j]", {"V": "p", "B": "rj"}),
    "blocks": ("C[I[p],i,j] += D[p,i,k] * E[K[p],k,j]", {"D": "pik", "E": "rkj"}),
    "gathered": ("C[p,j] = A2[K[p],k] * B[k,j]", {"A2": "rk", "B": "kj"}),
}
BASES = [
    {"i": 36, "j": 44, "k": 36, "p": 37, "q": 3, "r": 11},
    {"i": 7, "j": 13, "k": 35, "p": 20, "q": 2, "r": 6},
    {"i": 48, "j": 100, "k": 36, "p": 20, "q": 5, "r": 30},
]


def values_of(name: str, extent: dict[str, int], ordered: bool, random: Random) -> Case:
    statement, shapes = PROGRAMS[name]
    torch.manual_seed(0)
    values: dict[str, Any] = {n: torch.randn([extent[v] for v in s]) for n, s in shapes.items()}
    p, q, r = extent["p"], extent["q"], extent["r"]
    indices = {
        "I": index(random, p, r, ordered=ordered),
        "K": index(random, p, r, ordered=False),
        "K2": index(random, p * q, r, ordered=False).reshape(p, q),
    }
    values |= {n: v for n, v in indices.items() if f"{n}[" in statement}
    return Case(statement, values, {0: r} if "I[" in statement else {})


def of_one_class(name: str, base: int, ordered: bool) -> list[Case]:
    """Calls of sizes that are all different, and of one class."""
    random = Random(base)
    sizes = {
        v: of_class(class_of(n, runs=v in "pq"), runs=v in "pq") for v, n in BASES[base].items()
    }
    found: dict[object, list[Case]] = {}
    for _ in range(60):
        extent = {v: random.choice(n) for v, n in sizes.items()}
        case = values_of(name, extent, ordered, random)
        found.setdefault(class_of_call(case)[1].key, []).append(case)
    most = max(found.values(), key=len)
    return sorted(most, key=lambda case: sum(v.numel() for v in case.tensors.values()))


@pytest.mark.interpreter
@pytest.mark.parametrize("base", range(len(BASES)))
@pytest.mark.parametrize(
    ("name", "ordered"),
    [
        (n, o)
        for n, (text, _) in PROGRAMS.items()
        for o in ((False, True) if "I[" in text else (False,))
    ],
)
def test_a_program_is_right_for_every_size_of_its_class(
    name: str, ordered: bool, base: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program of the smallest sizes runs all others."""
    monkeypatch.setattr(calls, "_forms", {})
    monkeypatch.setattr("insum.call.lookup._fronts", {})
    cases = of_one_class(name, base, ordered)
    assert len(cases) > 3
    for case in (cases[0], cases[-1], *cases[1:4]):
        sizes = dict(case.sizes)
        with insum.settings(**ONLY_FUSED):
            found = insum.insum(case.statement, sizes=sizes, **case.values)
        exact = {n: v.double() if v.is_floating_point() else v for n, v in case.tensors.items()}
        with insum.settings(backend="graph"):
            expected = insum.insum(case.statement, sizes=sizes, **exact)
        torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=2e-4)
    (prepared,) = (one for kinds in calls._forms.values() for one in kinds.calls if one.fusable)
    assert len(prepared.fused.programs.shelf.classes) == 1 and len(prepared.bound) > 1


@pytest.mark.interpreter
def test_a_dimension_of_one_place_joins_nothing_that_is_apart() -> None:
    """Walking the first dimension goes on where the second ends, but not where the third does."""
    rows = torch.tensor([0, 0, 1, 1, 1, 3])
    table = torch.randn(6, 1, 8)[:, :, :3]
    assert table.stride() == (8, 8, 1)
    with insum.settings(**ONLY_FUSED):
        found = insum.insum("C[I[p,q]] += V[p,q,r]", sizes={0: 4}, I=rows[:, None], V=table)
    expected = torch.zeros(4).index_add(0, rows, table.sum((1, 2)))
    torch.testing.assert_close(found, expected)
