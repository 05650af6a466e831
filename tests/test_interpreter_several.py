"""Left sides with several indices: their places together are rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import insum
from insum.runtime import inspection
from insum.testing import oracle
from insum.testing.as_on_a_gpu import pretended
from kernels import bound, error, plan_of

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("kernels_only")]

E, N, C, F = 50, 7, 3, 20
TENSORS: dict[str, Tensor] = {
    "d": torch.randint(0, N, (E,)),
    "c": torch.randint(0, C, (E,), dtype=torch.int32),
    "g": torch.randint(0, 5, (N,)),
    "b": torch.randint(0, 8, (F,)),
    "w": torch.randint(0, C, (E, 4)),
    "x": torch.randn(E, F),
    "v": torch.randn(E),
    "z": torch.randn(E, 4, F),
}
CASES = {
    "y[d[e],c[e],f] = v[e] * x[e,f]": (N, C, F),
    "y[g[d[e]],f] = v[e] * x[e,f]": (5, F),
    "y[d[e],f,c[e]] = x[e,f]": (N, F, C),
    "y[d[e],b[f]] = v[e] * x[e,f]": (N, 8),
    "y[d[e],f,w[e,q]] = z[e,q,f] * v[e]": (N, F, C),
    "y[2*d[e]+1,c[e]] = v[e]": (2 * N + 1, C),
    "y[d[e]+c[e],f] = x[e,f] * v[e]": (N + C, F),
    "y[d[e],d[e],f] = x[e,f]": (N, N, F),
    "y[d[e],c[e],f] max= x[e,f]": (N, C, F),
}


def given(text: str) -> dict[str, Any]:
    return {name: t for name, t in TENSORS.items() if f"{name}[" in text}


@pytest.mark.parametrize("seen", [False, True], ids=["new", "seen"])
@pytest.mark.parametrize("text", CASES)
def test_in_one_order(text: str, seen: bool) -> None:
    """In deterministic mode, of tensors that are known and of others, into new and given memory."""
    tensors, shape = given(text), CASES[text]
    want = torch.from_numpy(oracle(text, tensors, sizes={"y": shape}))
    there = torch.isfinite(want)  # of a maximum not all places are
    torch.use_deterministic_algorithms(True)
    try:
        if seen:
            results = [insum.insum(text, **tensors, out_shape=shape) for _ in range(3)]
        else:
            with pretended():
                results = [insum.insum(text, **tensors, out_shape=shape) for _ in range(2)]
                base = torch.zeros(shape)
                added = insum.insum(text.replace(" = ", " += "), **tensors, y=base)
                assert added is base
                results += [base] if "max=" not in text else []
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(error(y[there], want[there]) <= 1e-6 for y in results)
    assert all(torch.equal(y, results[0]) for y in results)


@pytest.mark.parametrize("text", ["y[d[e],c[e],f] = v[e] * x[e,f]", "y[g[d[e]],f] = x[e,f]"])
def test_wide_rows_that_come_back(text: str) -> None:
    plan = plan_of(text, {"y": CASES.get(text, (5, F))}, **given(text))
    assert plan.strategy == "segment" and "together were sorted once" in plan.why[0]


def test_narrow_rows_and_many_places_are_added_atomically() -> None:
    assert plan_of("y[d[e],c[e]] = v[e]", {"y": (N, C)}, **given("d[c[v[")).strategy == "atomic"
    sizes = {"y": (N, 100 * C, F)}
    plan = plan_of("y[d[e],c[e],f] = x[e,f]", sizes, **given("d[c[x["))
    assert plan.strategy == "atomic"


def test_narrow_rows_of_many_entries_are_summed_in_order() -> None:
    """As the gradient of a code book for each column of codes: atomics would meet in few places."""
    q, dy = torch.randint(0, 4, (200, 3)), torch.randn(200)
    text = "T[m,q[n,m]] += dy[n]"
    plan = plan_of(text.replace("+=", "="), {"T": (3, 4)}, q=q, dy=dy)
    assert plan.strategy == "segment"
    want = torch.from_numpy(oracle(text, {"q": q, "dy": dy}, sizes={"T": (3, 4)}))
    for _ in range(2):
        found = insum.insum(text.replace("+=", "="), q=q, dy=dy, out_shape=(3, 4))
        assert error(found, want) <= 1e-6


def test_absent_and_out_of_range() -> None:
    """An absent entry leads nowhere; what is out of range is reported, and no other place hit."""
    tensors = {**given("c[x["), "d": TENSORS["d"].clone()}
    tensors["d"][3:9] = -1
    text, shape = "y[d[e],c[e],f] = x[e,f]", (N, C, F)
    want = torch.from_numpy(oracle(text, tensors, sizes={"y": shape}, padded=("d",)))
    torch.use_deterministic_algorithms(True)
    try:
        y = insum.insum(text, **tensors, out_shape=shape, padded="d")
        assert error(y, want) <= 1e-6
        tensors["c"] = tensors["c"].clone()
        tensors["c"][20] = C  # in one number with d it would be another row
        with pretended():
            insum.insum(text, **tensors, out_shape=shape, padded="d")
            with pytest.raises(insum.IndexRangeError, match=r"c\[20\] is 3"):
                insum.synchronize()
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_is_made_is_kept_with_all_index_tensors() -> None:
    tensors, shape = given("d[c[x["), (N, C, F)
    text = "y[d[e],c[e],f] = x[e,f]"
    for name in ("d", "c"):
        before = insum.insum(text, **tensors, out_shape=shape)
        tensors[name] = tensors[name].clone()
        tensors[name][0] = (tensors[name][0] + 1) % C
        after = insum.insum(text, **tensors, out_shape=shape)
        assert not torch.equal(before, after)
        want = torch.from_numpy(oracle(text, tensors, sizes={"y": shape}))
        assert error(after, want) <= 1e-6


def test_gradients_gather() -> None:
    tensors = given("d[c[v[x[")
    leaves = [tensors[n].double().requires_grad_() for n in "vx"]

    def call(v: Tensor, x: Tensor) -> Tensor:
        rest = {"d": tensors["d"], "c": tensors["c"]}
        return insum.insum("y[d[e],c[e],f] = v[e] * x[e,f]", **rest, v=v, x=x, out_shape=(N, C, F))

    torch.use_deterministic_algorithms(True)
    try:
        torch.autograd.gradcheck(call, leaves, fast_mode=True)
    finally:
        torch.use_deterministic_algorithms(False)


def test_looked_at_without_running() -> None:
    """What is planned for a GPU of which nothing is here."""
    problem = bound("y[d[e],c[e],f] = x[e,f]", given("d[c[x["), {"y": (N, C, F)})
    look = inspection.elsewhere(problem, given("d[c[x["), architecture="sm_90")
    assert "row_0" in str(look.program())


def test_as_many_places_in_dimensions_of_other_sizes() -> None:
    """What is made of index tensors is kept for these sizes, not for how many places there are."""
    tensors = given("d[c[x[")
    tensors["d"] = tensors["d"] % 3
    text, found = "y[d[e],c[e],f] = x[e,f]", []
    torch.use_deterministic_algorithms(True)
    try:
        for shape in ((3, 8, F), (8, 3, F), (6, 4, F), (3, 8, F)):
            y = insum.insum(text, **tensors, out_shape=shape)
            want = torch.zeros(shape).index_put(
                (tensors["d"], tensors["c"].long()), tensors["x"], accumulate=True
            )
            found.append(error(y, want))
    finally:
        torch.use_deterministic_algorithms(False)
    assert max(found) <= 1e-6


@pytest.mark.parametrize(
    "text",
    [
        "y[d[e],c[e],f] = p[d[e],f] * q[c[e],f]",
        "y[d[e],c[e],f] = x[e,f] * r[d[e],c[e]]",
        "y[d[e],c[e],f] mean= x[e,f]",
    ],
)
def test_what_leads_there_is_read_as_well(text: str) -> None:
    """Each index tensor in the order of the rows: none is taken for the other."""
    more = {"p": torch.randn(N, F), "q": torch.randn(C, F), "r": torch.randn(N, C)}
    tensors = {n: t for n, t in {**TENSORS, **more}.items() if f"{n}[" in text}
    want = torch.from_numpy(oracle(text, tensors, sizes={"y": (N, C, F)}))
    torch.use_deterministic_algorithms(True)
    try:
        y = insum.insum(text, **tensors, out_shape=(N, C, F))
    finally:
        torch.use_deterministic_algorithms(False)
    assert error(y, want) <= 1e-6
