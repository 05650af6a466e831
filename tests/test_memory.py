"""What is remembered about tensors: found again, void after every write one can see, bounded.

``off_cpu`` runs a test as on a device whose values cannot be looked at: versions and storages are
then all there is to go by.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import insum
import insum.nn
from insum import memory
from insum.compat import raw_bytes
from insum.fingerprints import fingerprint
from insum.settings import settings


@pytest.fixture(params=["cpu", "off_cpu"])
def anywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "off_cpu":
        monkeypatch.setattr(memory, "can_look", lambda tensor: False)
    memory.forget()
    return str(request.param)


@pytest.fixture
def off_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "can_look", lambda tensor: False)
    memory.forget()


def kept(tensor: Tensor, thing: Tensor) -> Tensor:
    return memory.remembered(tensor, "thing", lambda: thing)


def total(tensor: Tensor) -> int:
    return memory.remembered(tensor, "sum", lambda: int(tensor.sum()))


WRITES: dict[str, Callable[[Tensor], object]] = {
    "add_": lambda x: x.add_(1),
    "item": lambda x: x.__setitem__(0, 7),
    "copy_": lambda x: x.copy_(torch.arange(6) + 3),
    "a view": lambda x: x[1:].mul_(2).add_(1),
    "a detached one": lambda x: x.detach().add_(1),
    "data =": lambda x: setattr(x, "data", torch.arange(6) + 5),
    "data = slice": lambda x: setattr(x, "data", x.data[2:]),
    "data = other strides": lambda x: setattr(x, "data", torch.arange(12)[::2]),
    "set_": lambda x: x.set_(torch.arange(6) + 9),
    "resize_": lambda x: x.resize_(3),
    "no_grad": lambda x: torch.no_grad()(lambda: x.add_(2))(),
    "inference_mode": lambda x: torch.inference_mode()(lambda: x.add_(2))(),
}


@pytest.mark.parametrize("write", list(WRITES))
def test_a_write_makes_it_void(anywhere: str, write: str) -> None:
    x = torch.arange(6)
    assert total(x) == 15
    assert memory.remembered(x, "sum", lambda: -1) == 15
    WRITES[write](x)
    assert total(x) == int(x.sum())


@pytest.mark.parametrize("write", ["add_", "copy_", "item"])
def test_tensors_of_inference_mode(anywhere: str, write: str) -> None:
    """They have no version counter."""
    with torch.inference_mode():
        x = torch.arange(6)
        assert total(x) == 15
        WRITES[write](x)
        assert total(x) == int(x.sum())


@pytest.mark.parametrize("how", ["by a copy", "by a fingerprint", "without a comparison"])
def test_on_the_cpu_no_write_goes_unseen(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "by a fingerprint":
        monkeypatch.setattr(memory, "MOST_COPIED", 0)
    if how == "without a comparison":  # a platform whose C library is not found
        monkeypatch.setattr(raw_bytes, "_compare", None)
    x = torch.arange(6)
    assert total(x) == 15
    x.numpy()[0] = 100
    assert total(x) == 115
    x.data.add_(1)
    assert total(x) == 121
    x.numpy()[[0, 1]] = x.numpy()[[1, 0]]  # the same values in another order
    assert memory.remembered(x, "sum", lambda: -1) == -1


def test_what_is_read_as_its_negative_has_other_values() -> None:
    """The same bytes, in the same place of one tensor."""
    z = torch.randn(5, dtype=torch.complex64)
    plain, negative = z.imag, z.conj().imag
    assert negative.is_neg()
    assert memory.entry_of(plain) is not memory.entry_of(negative)
    for part in (plain, negative, plain):
        assert memory.remembered(part, "sum", lambda part=part: float(part.sum())) == part.sum()


def test_what_cannot_be_seen_is_forgotten_by_hand(off_cpu: None) -> None:
    x = torch.arange(6)
    assert total(x) == 15
    x.data.add_(1)
    assert total(x) == 15  # stated in docs/promises.md
    insum.forget(x)
    assert total(x) == 21


def test_views_of_one_tensor_are_found_again(anywhere: str) -> None:
    edges = torch.arange(10).reshape(2, 5)
    assert total(edges[0]) == 10 and total(edges[1]) == 35
    assert memory.remembered(edges[0], "sum", lambda: -1) == 10
    assert memory.remembered(edges[:, :2], "sum", lambda: -1) == -1
    edges[1, 0] = 50
    assert total(edges[0]) == 10 and total(edges[1]) == 80


def test_an_alias_with_a_counter_of_its_own_is_a_stranger(off_cpu: None) -> None:
    """``x.data`` starts at version 0 whatever was written before."""
    x = torch.arange(6)
    assert total(x.data) == 15
    x.data.add_(1)
    assert total(x.data) == 21


def test_addresses_that_are_used_again(off_cpu: None) -> None:
    for start in range(50):
        x = torch.arange(6) + start
        assert total(x) == 15 + 6 * start
        x.data = torch.arange(6) + 2 * start
        assert total(x) == 15 + 12 * start
        del x


def test_data_that_comes_and_goes_at_one_address(off_cpu: None) -> None:
    """Free, then assign what lies at the same address, with the same version."""
    x = torch.arange(1000)
    for start in range(50):
        x.data = torch.arange(1000) + start
        assert total(x) == int(x.sum())


def test_declared_tensors_of_inference_mode_are_trusted(off_cpu: None) -> None:
    with torch.inference_mode():
        x = insum.unchanging(torch.arange(6))
        assert total(x) == 15
        assert memory.remembered(x, "sum", lambda: -1) == 15


def test_what_depends_on_several(anywhere: str) -> None:
    x, y = torch.arange(3), torch.arange(3)
    both = lambda: memory.remembered(x, "both", lambda: int((x * y).sum()), y)
    assert both() == both() == 5
    y.add_(1)
    assert both() == 8
    x.add_(1)
    assert both() == 14
    z = y.clone()
    assert memory.remembered(x, "both", lambda: -1, z) == -1


def test_nothing_is_kept_alive(anywhere: str) -> None:
    before = memory.report()
    x, double = torch.arange(100), torch.arange(100) * 2
    made = kept(x, double)
    after = memory.report()
    assert after.entries == before.entries + 1 and after.nbytes == before.nbytes + made.nbytes
    del x, made, double
    gc.collect()
    assert memory.report() == before


def test_a_view_that_is_kept_goes_with_its_tensor(anywhere: str) -> None:
    before = memory.report()
    edges = torch.arange(10).reshape(2, 5)
    row = edges.data[0]
    kept(edges, row)
    del edges, row
    gc.collect()
    assert memory.report() == before


def test_versions_that_are_gone_take_no_room(anywhere: str) -> None:
    before = memory.report()
    x = torch.arange(1000)
    for _ in range(20):
        memory.remembered(x, "double", lambda: x * 2)
        x.add_(1)
    assert memory.report().nbytes - before.nbytes <= 2 * x.nbytes


def test_the_budget(anywhere: str) -> None:
    with settings(memory=10_000):
        tensors = [torch.arange(100) + k for k in range(20)]
        for x in tensors:
            memory.remembered(x, "double", lambda x=x: x * 2)  # type: ignore[misc]
            assert memory.report().nbytes <= 10_000
        assert memory.remembered(tensors[-1], "double", lambda: None) is not None
        again = memory.remembered(tensors[0], "double", lambda: torch.zeros(1))
        assert again.numel() == 1  # it went first, and is made anew


def test_under_a_tracer_nothing_is_remembered() -> None:
    def f(x: Tensor) -> Tensor:
        return memory.remembered(x, "double", lambda: x * 2)

    x = torch.arange(3)
    assert torch.vmap(f)(x[None]).tolist() == [[0, 2, 4]]
    assert memory.known(x) is None


def test_threads(anywhere: str) -> None:
    tensors = [torch.arange(50) + k for k in range(8)]
    wrong: list[object] = []

    def work(seed: int) -> None:
        for step in range(200):
            x = tensors[(seed + step) % len(tensors)]
            if total(x) != int(x.sum()):
                wrong.append((seed, step))
            y = torch.arange(20) + step
            total(y)
            insum.forget(y)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_report_tells_how_much() -> None:
    x = torch.arange(10)
    memory.remembered(x, "double", lambda: x * 2)
    assert "entries about" in str(memory.report())


# --- layers, as servers use them ------------------------------------------------------------------


@pytest.mark.parametrize("inference", [False, True])
def test_an_edge_buffer_that_is_filled_anew(anywhere: str, inference: bool) -> None:
    torch.manual_seed(0)
    x, layer = torch.randn(6, 4), insum.nn.GCNConv(4, 3)
    with torch.inference_mode(inference), torch.no_grad():
        edges = torch.randint(0, 6, (2, 20))
        for _ in range(3):
            edges.copy_(torch.randint(0, 6, (2, 20)))
            torch.testing.assert_close(layer(x, edges), layer(x, edges.clone()))
            got, want = insum.nn.propagate(edges, x), insum.nn.propagate(edges.clone(), x)
            torch.testing.assert_close(got, want)


def test_edges_whose_data_is_replaced(anywhere: str) -> None:
    torch.manual_seed(0)
    x, edges = torch.randn(6, 4), torch.randint(0, 6, (2, 20))
    for count in (20, 20, 12, 30):
        edges.data = torch.randint(0, 6, (2, count))
        got, want = insum.nn.propagate(edges, x), insum.nn.propagate(edges.clone(), x)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8, torch.int16, torch.int32])
def test_narrow_values_that_change_places_are_seen(kind: torch.dtype) -> None:
    """Several of them are one word, and of a product with its upper part little is left."""
    values = (torch.arange(512) % 100).to(kind)
    before, per_word = fingerprint(values), 8 // values.itemsize
    found = set()
    for other in range(1, 512 // per_word):
        changed = values.clone()
        pair = [per_word - 1, per_word * (other + 1) - 1]
        changed[pair] = changed[pair[::-1]]
        if not torch.equal(changed, values):
            found.add(fingerprint(changed) == before)
    assert found == {False}
    both = values.clone()
    both[[per_word - 1, 2 * per_word - 1]] += 64
    assert fingerprint(both) != before


def test_what_is_promised_of_a_tensor_is_promised_of_its_views() -> None:
    edges = torch.tensor([[0, 1], [1, 0]])
    before = memory.entry_of(edges[0])
    insum.unchanging(edges)
    assert before.declared and memory.entry_of(edges[0]).declared
    assert memory.entry_of(edges[1]).declared
    assert not memory.entry_of(edges.clone()[1]).declared
    part = torch.tensor([[0, 1], [1, 0]])[0]
    insum.unchanging(part)
    assert not memory.entry_of(part._base[1]).declared  # type: ignore[index]


def test_a_tensor_that_goes_while_all_is_forgotten(
    off_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector of garbage may let go of one in the middle."""
    first = torch.arange(6)
    second = torch.empty(0, dtype=first.dtype).set_(first)  # type: ignore[call-overload]
    before = [memory.entry_of(tensor) for tensor in (first, second)]
    owners = memory._storages[id(first.untyped_storage())].owners
    release = memory._release

    def released(owner: memory._Owner) -> None:
        release(owner)
        owners.clear()

    assert len(owners) == 2
    monkeypatch.setattr(memory, "_release", released)
    memory.forget()
    assert not any(entry.held for entry in before)
    assert all(memory.known(tensor) is None for tensor in (first, second))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_signs_that_change_in_pairs_are_seen(dtype: torch.dtype) -> None:
    """They are the last bits of words, of which a product keeps whether they are odd in number."""
    values = torch.randn(4000, dtype=dtype)
    assert fingerprint(-values) != fingerprint(values)
    some = values.clone()
    some[[1, 9]] *= -1
    assert fingerprint(some) != fingerprint(values)
    assert fingerprint(torch._neg_view(values)) == fingerprint(-values)
