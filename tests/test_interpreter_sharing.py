"""Entries that gather the same matrix: experts, relations, adapters, offsets of a kernel; forward
and backward, in the interpreter, of index tensors that are known and of those that nobody has seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import insum
from as_on_a_gpu import no_reads
from insum.plan.strategies import sharing, sorting
from insum.runtime.handwritten.equal_tiles import in_tiles, most_tiles
from insum.testing.as_on_a_gpu import pretended
from kernels import ONLY_FUSED, watch_programs

pytestmark = pytest.mark.interpreter


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pays is decided as if everything were larger."""
    monkeypatch.setattr(sharing, "PAYS", 1)
    monkeypatch.setattr(sharing, "PAYS_UNSEEN", 1)
    monkeypatch.setattr(sharing, "ENOUGH_PROGRAMS", 4)
    monkeypatch.setattr(sorting, "HEAVY", 2**10)


@pytest.fixture(params=["known", "unseen"])
def seen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "unseen":
        with pretended():
            yield "unseen"
    else:
        with insum.settings(**ONLY_FUSED):
            yield "known"


def by_entry(X: Tensor, W: Tensor, e: Tensor) -> Tensor:
    """What is right: absent entries are zero."""
    present = (e >= 0)[..., None]
    return torch.where(present, torch.einsum("...k,...kn->...n", X, W[e.long().clamp(min=0)]), 0)


def drawn(entries: int, values: int, k: int, n: int, dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(entries + 31 * values + k)
    X = torch.randn(40, k, generator=generator).to(dtype)
    W = torch.randn(values, k, n, generator=generator).to(dtype)
    t = torch.randint(0, 40, (entries,), generator=generator)
    e = torch.randint(0, values, (entries,), generator=generator).int()
    return X, W, t, e


CASES = [
    ((200, 8, 32, 48), True),
    ((130, 3, 17, 33), False),
    ((64, 1, 16, 16), True),
    ((300, 40, 24, 20), False),
    ((5, 2, 64, 16), False),
]


@pytest.mark.parametrize(("sizes", "ordered"), CASES)
def test_each_entry_has_a_matrix(seen: str, sizes: tuple[int, ...], ordered: bool) -> None:
    X, W, t, e = drawn(*sizes)
    e = e.sort().values if ordered else e
    X.requires_grad_(), W.requires_grad_()
    got = insum.insum("Y[p,n] = X[t[p],k] * W[e[p],k,n]", X=X, W=W, t=t, e=e)
    want = by_entry(X[t], W, e)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    upstream = torch.randn_like(want)
    ours = torch.autograd.grad(got, (X, W), upstream)
    theirs = torch.autograd.grad(want, (X, W), upstream)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


def test_they_share_its_tiles(seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = watch_programs(monkeypatch)
    X, W, t, e = drawn(200, 4, 32, 48)
    insum.insum("Y[p,n] = X[t[p],k] * W[e[p],k,n]", X=X, W=W, t=t, e=e)
    (step,) = programs[-1].steps
    assert step.planned.plan.strategy == "store" and step.planned.plan.roles.dot
    assert "share the tiles of W" in step.planned.plan.why[-1]


def test_half_precision_is_summed_in_single(seen: str) -> None:
    X, W, t, e = drawn(100, 4, 64, 32, torch.float16)
    got = insum.insum("Y[p,n] = X[t[p],k] * W[e[p],k,n]", X=X, W=W, t=t, e=e)
    want = by_entry(X[t].float(), W.float(), e)
    torch.testing.assert_close(got.float(), want, rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize("unique", [True, False])
def test_results_are_scattered(seen: str, unique: bool) -> None:
    X, W, t, e = drawn(150, 5, 32, 24)
    d = torch.randperm(200)[:150] if unique else torch.randint(0, 30, (150,))
    rows = 200 if unique else 30
    got = insum.insum(
        "Y[d[p],n] = g[p] * X[t[p],k] * W[e[p],k,n]",
        X=X, W=W, t=t, e=e, d=d, g=torch.arange(150.0), out_shape=(rows, 24),
    )  # fmt: skip
    own = torch.arange(150.0)[:, None] * by_entry(X[t], W, e)
    torch.testing.assert_close(
        got, torch.zeros(rows, 24).index_add(0, d, own), rtol=1e-4, atol=1e-2
    )


def test_several_matrices_for_a_token(seen: str) -> None:
    """Experts, the best two of each token, weighted and added up."""
    X, W, _, _ = drawn(40, 6, 32, 48)
    e = torch.stack([torch.randperm(6)[:2] for _ in range(40)]).int()
    g = torch.rand(40, 2)
    got = insum.insum("Y[b,n] = g[b,q] * X[b,k] * W[e[b,q],k,n]", X=X, W=W, e=e, g=g)
    want = (g[:, :, None] * by_entry(X[:, None].expand(-1, 2, -1), W, e)).sum(1)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    flat = insum.insum("Z[b,q,n] = X[b,k] * W[e[b,q],k,n]", X=X, W=W, e=e)
    torch.testing.assert_close(flat, by_entry(X[:, None].expand(-1, 2, -1), W, e))


def test_what_is_summed_over_all_tiles(seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs then walk the tiles, of which some find nothing to do."""
    F, G, e = torch.randn(260, 32), torch.randn(40, 32, 9), torch.randint(0, 9, (260,))
    programs = watch_programs(monkeypatch)
    got = insum.insum("y[a] = F[p,k] * G[a,k,e[p]]", F=F, G=G, e=e)
    assert any("tile" in v for v in programs[-1].steps[0].planned.plan.roles.loops)
    want = torch.einsum("pk,akp->a", F, G[:, :, e])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


def test_absent_entries_are_zero(seen: str) -> None:
    X, W, t, e = drawn(120, 4, 32, 48)
    e[::7] = -1
    W[0] = torch.inf  # absent is not multiplied by zero
    got = insum.insum("Y[p,n] = X[t[p],k] * W[e[p],k,n]", X=X, W=W, t=t, e=e, padded=("e",))
    assert (got[::7] == 0).all()
    rest = (e > 0).nonzero().flatten()
    torch.testing.assert_close(got[rest], by_entry(X[t], W, e)[rest], rtol=1e-4, atol=1e-4)


def test_into_what_is_there(seen: str) -> None:
    X, W, t, e = drawn(90, 4, 32, 48)
    Y = torch.ones(90, 48)
    insum.insum("Y[p,n] += X[t[p],k] * W[e[p],k,n]", X=X, W=W, t=t, e=e, Y=Y)
    torch.testing.assert_close(Y, 1 + by_entry(X[t], W, e), rtol=1e-4, atol=1e-4)


def test_few_rows_get_sums_of_tiles(seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = watch_programs(monkeypatch)
    X, _, t, e = drawn(3000, 2, 32, 48)
    G = torch.randn(3000, 48)
    got = insum.insum("D[e[p],k,n] = X[t[p],k] * G[p,n]", X=X, t=t, G=G, e=e, out_shape=(2, 32, 48))
    want = torch.zeros(2, 32, 48).index_add(0, e, torch.einsum("pk,pn->pkn", X[t], G))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-2)
    assert "add their sums" in programs[-1].steps[0].planned.plan.why[-1]


@pytest.mark.parametrize("value", [4, 2**31, -1, -(2**40)])
def test_out_of_range_is_reported_and_shows(monkeypatch: pytest.MonkeyPatch, value: int) -> None:
    with pretended():
        X, W, t, e = drawn(60, 4, 32, 48)
        e = e.long()
        e[17] = value
        got = insum.insum("Y[p,n] = X[t[p],k] * W[e[p],k,n]", X=X, W=W, t=t, e=e)
        with pytest.raises(insum.IndexRangeError, match=rf"e\[17\] is {value}, but it indexes"):
            insum.synchronize()
        assert got[17].isnan().all()
        rest = torch.arange(60) != 17
        torch.testing.assert_close(got[rest], by_entry(X[t], W, e.clamp(0, 3))[rest])


def test_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended():
        for entries in (100, 111, 123):
            X, W, t, e = drawn(entries, 4, 32, 48)
            with no_reads():
                insum.insum("Y[p,n] = X[t[p],k] * W[e[p],k,n]", X=X, W=W, t=t, e=e)


def test_deterministic_mode(seen: str) -> None:
    """Stores are always the same; where contributions would meet in atomics, nothing is shared."""
    X, W, t, e = drawn(150, 5, 32, 24)
    d = torch.randint(0, 30, (150,))
    torch.use_deterministic_algorithms(True)
    try:
        got = insum.insum(
            "Y[d[p],n] = X[t[p],k] * W[e[p],k,n]", X=X, W=W, t=t, e=e, d=d, out_shape=(30, 24)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    want = torch.zeros(30, 24).index_add(0, d, by_entry(X[t], W, e))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("entries", [0, 7, 500])
@pytest.mark.parametrize("values", [1, 1500])
@pytest.mark.parametrize(("wraps", "pads"), [(False, False), (True, False), (False, True)])
def test_tiles_hold_every_entry_once(entries: int, values: int, wraps: bool, pads: bool) -> None:
    e = torch.randint(-2, values + 1, (entries,))
    place, value = in_tiles(e, values, 16, wraps=wraps, pads=pads)
    assert place.shape == (most_tiles(entries, values, 16), 16)
    held = place[place >= 0]
    assert torch.equal(held.sort().values, torch.arange(entries, dtype=torch.int32))
    own = torch.where((e == -1) if pads else torch.zeros_like(e).bool(), values + 1, e)
    own = torch.where((own < 0) & wraps, own + values, own)
    own = torch.where((own < 0) | (own > values + 1), values, own)
    own = torch.where((e == values), values, own)
    shown = torch.where(own == values + 1, -1, own).int()
    tiles = (place >= 0).nonzero()[:, 0]
    assert torch.equal(value[tiles], shown[held.long()])
    empty = (place[:, 0] < 0).nonzero().flatten()
    assert (place[empty] < 0).all(), "a tile is filled from its beginning"
