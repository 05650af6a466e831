"""Formats as objects: frozen, printable, pytree nodes, movable, picklable, compilable."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

import insum
from insum import facts
from insum.errors import FormatError
from insum.formats import (
    COO,
    ELL,
    FORMATS,
    BlockCOO,
    BlockGroupCOO,
    GroupCOO,
    NeighborTable,
    SparseFormat,
    SparseParameter,
)

from .cases import every_format

X = torch.tensor([[1.0, 2, 3, 0], [4, 0, 0, 0], [0, 5, 0, 0], [0, 0, 6, 7]])
TABLE = NeighborTable(
    torch.tensor([[-1, 0, 1], [0, 1, 2], [1, 2, -1]], dtype=torch.int32),
    shape=(3, 3, 3),
    values=torch.arange(9.0).reshape(3, 3),
)


def all_of_them() -> list[SparseFormat]:
    return [*every_format(X), TABLE, TABLE.pattern()]


def same(a: SparseFormat, b: SparseFormat) -> bool:
    return (
        type(a) is type(b)
        and torch.equal(a.to_dense(), b.to_dense())
        and all(getattr(a, s) == getattr(b, s) for s in a._static)
    )


def test_every_format_is_listed() -> None:
    assert (
        {type(a).__name__ for a in all_of_them()}
        == set(FORMATS)
        == {"COO", "GroupCOO", "ELL", "BlockCOO", "BlockGroupCOO", "NeighborTable"}
    )


@pytest.mark.parametrize("a", all_of_them(), ids=repr)
def test_frozen_and_equal_by_identity(a: SparseFormat) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.shape = (1,)  # type: ignore[misc]
    assert a == a and a != copy.copy(a) and hash(a) != hash(copy.copy(a))
    assert not isinstance(a, Tensor)


@pytest.mark.parametrize("a", all_of_them(), ids=repr)
def test_pytree(a: SparseFormat) -> None:
    leaves, spec = pytree.tree_flatten(a)
    assert all(isinstance(leaf, Tensor) for leaf in leaves) and len(leaves) == len(
        list(a.tensors())
    )
    assert same(pytree.tree_unflatten(leaves, spec), a)
    # Unflattening takes anything, as transformations put placeholders there.
    assert type(pytree.tree_unflatten([None] * len(leaves), spec)) is type(a)
    doubled = pytree.tree_map(lambda t: t * 2 if t.is_floating_point() else t, a)
    assert torch.equal(doubled.to_dense(), a.to_dense() * (1 if a.values is None else 2))
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


@pytest.mark.parametrize("a", all_of_them(), ids=repr)
def test_pickle_copy_and_save(a: SparseFormat) -> None:
    for b in (pickle.loads(pickle.dumps(a)), copy.deepcopy(a), copy.copy(a)):
        assert same(a, b)
        assert {d: (f.low, f.high, f.sorted, f.padded) for d, f in b.facts().items()} == {
            d: (f.low, f.high, f.sorted, f.padded) for d, f in a.facts().items()
        }
    buffer = io.BytesIO()
    torch.save({"a": a}, buffer)
    buffer.seek(0)
    with torch.serialization.safe_globals(list(FORMATS.values())):
        assert same(torch.load(buffer, weights_only=True)["a"], a)


@pytest.mark.parametrize("a", all_of_them(), ids=repr)
def test_moving_and_casting(a: SparseFormat) -> None:
    assert same(a.to("cpu"), a) and same(a.cpu(), a)
    half = a.to(torch.float16)
    assert half.dtype == (None if a.values is None else torch.float16)
    assert a.to(torch.zeros(1, dtype=torch.float64)).dtype == (
        None if a.values is None else torch.float64
    )
    assert all(
        x is y
        for x, y in zip(
            list(half.tensors())[a.values is not None :], list(a.tensors())[a.values is not None :]
        )
    )
    meta = a.to(device="meta")
    assert meta.device.type == "meta" and "meta" in repr(meta)


@pytest.mark.parametrize("a", all_of_them(), ids=repr)
def test_torch_compile_and_export(a: SparseFormat) -> None:
    def double(a: SparseFormat, b: Tensor) -> tuple[SparseFormat, Tensor]:
        values = a.values * 2 if a.values is not None else None
        return a.with_values(values), b + a.shape[0]

    torch.compiler.reset()
    result, shifted = torch.compile(double, backend="eager", fullgraph=True)(a, torch.zeros(2))
    assert (
        torch.equal(result.to_dense(), a.to_dense() * (1 if a.values is None else 2))
        and shifted.tolist() == [a.shape[0]] * 2
    )

    class Dense(torch.nn.Module):
        def forward(self, a: SparseFormat) -> Tensor:
            return a.to_dense()

    exported = torch.export.export(Dense(), (a,))
    assert torch.equal(exported.module()(a), a.to_dense())


@pytest.mark.parametrize("a", all_of_them(), ids=repr)
def test_printing(a: SparseFormat) -> None:
    text, html = repr(a), a._repr_html_()
    for part in (type(a).__name__, str(a.shape), str(a.nnz), f"{a.padding:.1%}", f"{a.nbytes:,}"):
        assert part in text and part in html
    for name in ("group_size", "group_dims", "block_shape"):
        assert (name in text) == hasattr(a, name) == (name in html)


def test_constructing_where_there_is_nothing_to_check() -> None:
    i = torch.zeros(3, dtype=torch.int32, device="meta")
    assert COO(None, (i, i), (4, 4)).device.type == "meta"

    def build(nearest: Tensor) -> Tensor:
        return ELL(None, (nearest,), shape=(3, 3)).to_dense()

    torch.compiler.reset()
    assert torch.compile(build, backend="eager", fullgraph=True)(
        torch.tensor([[1], [0], [-1]])
    ).tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 0]]


def test_bytes_and_padding_of_the_papers_example() -> None:
    a = GroupCOO.from_dense(X, group_size=2)
    assert (
        a.nbytes == 4 * (5 * 2 + 5 * 2 + 5)
        and a.padding == pytest.approx(0.3)
        and a.stored == 10
        and a.nnz == 7
    )
    assert ELL.from_dense(X).stored == 12 and COO.from_dense(X).nbytes == 7 * 12


def test_facts_are_handed_on() -> None:
    coo, grouped = COO.from_dense(X), GroupCOO.from_dense(X, group_size=2)
    assert [(f.sorted, f.unique, f.low, f.high, f.padded) for f in coo.facts().values()] == [
        (True, False, 0, 3, False),
        (False, False, 0, 3, False),
    ]
    assert [(f.sorted, f.padded) for f in grouped.facts().values()] == [
        (True, False),
        (False, True),
    ]
    assert facts.known(grouped.slot_indices[0]) is not None
    assert COO.from_dense(X[0]).facts()[0].unique
    assert not GroupCOO.from_dense(X, group_size=1).facts()[1].padded
    assert grouped.segment_pointers().tolist() == [0, 2, 3, 4, 5]
    assert BlockGroupCOO.from_dense(X, block_shape=2, group_size=2).facts()[0].high == 1
    with pytest.raises(FormatError, match="no segments"):
        ELL.from_dense(X).segment_pointers()


def test_new_values_share_the_pattern() -> None:
    a = GroupCOO.from_dense(X, group_size=2)
    assert a.values is not None
    b = a.with_values(a.values + 1)
    assert b.slot_indices[0] is a.slot_indices[0]
    assert torch.equal(b.to_dense(), torch.where(X != 0, X + 1, 0.0))
    assert a.requires_grad_().requires_grad and not a.detach().requires_grad


def test_transposing_groups_is_free() -> None:
    a = BlockGroupCOO.from_dense(X, block_shape=(2, 1), group_size=2)
    assert (
        a.T.group_dims == (1,)
        and a.T.slot_indices[0] is a.slot_indices[0]
        and a.T.block_shape == (1, 2)
    )
    assert torch.equal(a.T.to_dense(), X.T) and torch.equal(a.transpose(-1, 0).to_dense(), X.T)
    assert BlockCOO.from_dense(X, block_shape=(2, 1)).T.block_shape == (1, 2)


# --- broken files ---------------------------------------------------------------------------------


def broken_states(a: SparseFormat) -> Iterator[tuple[str, dict[str, Any]]]:
    """The state of a format with one thing wrong in it."""
    state = a.__getstate__()
    for name in state:
        yield f"no {name}", {k: v for k, v in state.items() if k != name}
        for junk in ("text", 7, None, [], {"a": 1}, (None,)):
            if not (name == "values" and junk is None):
                yield f"{name} {junk!r}", {**state, name: junk}
    for name in a._arrays[1:]:
        held = state[name]
        arrays = held if isinstance(held, tuple) else (held,)
        for k, array in enumerate(arrays):
            for what, new in _broken(array):
                many = (*arrays[:k], new, *arrays[k + 1 :])
                yield (
                    f"{name}[{k}] {what}",
                    {
                        **state,
                        name: many if isinstance(held, tuple) else many[0],
                    },
                )
    if a.values is not None:
        yield "values of another shape", {**state, "values": a.values[:-1]}
    yield "a smaller shape", {**state, "shape": tuple(1 for _ in a.shape)}
    yield "another rank", {**state, "shape": (*a.shape, 2)}


def _broken(array: Tensor) -> Iterator[tuple[str, Tensor]]:
    for value in (2**30, -2, -(2**31)):
        new = array.clone()
        new.view(-1)[-1] = value
        yield f"with {value}", new
    yield "as floats", array.float()
    yield "as bytes", array.to(torch.uint8)
    yield "cut", array[:-1]
    yield "of more dimensions", array[None]


@pytest.mark.parametrize("a", all_of_them(), ids=repr)
def test_a_broken_pickle_is_an_error(a: SparseFormat) -> None:
    """Never a format whose arrays are declared to be what they are not; what is accepted is what a
    constructor accepts.
    """
    refused = []
    for what, state in broken_states(a):
        made = object.__new__(type(a))
        try:
            made.__setstate__(state)
        except insum.InsumError:
            refused.append(what)
        else:
            assert same(made, type(a)(**state)), what
    assert len([what for what in refused if "with" in what]) == 3 * len(list(a.index_arrays()))


@pytest.mark.parametrize("a", all_of_them(), ids=repr)
def test_a_broken_state_dict_is_an_error(a: SparseFormat) -> None:
    held = SparseParameter(a)
    whole = {k: copy.deepcopy(v) for k, v in held.state_dict().items()}
    for name in held._buffer_names():
        for what, new in _broken(whole[name]):
            fresh = SparseParameter(a)
            with pytest.raises(insum.InsumError):
                fresh.load_state_dict({**whole, name: new})
                pytest.fail(f"{name} {what}")
            with (
                pytest.raises(insum.InsumError)
                if what.startswith("with ")
                else (contextlib.nullcontext())
            ):
                fresh()  # nor can values that were loaded be used; of shapes none are loaded
    fresh = SparseParameter(a)
    fresh.load_state_dict(whole)
    assert same(fresh().detach(), a)
    fresh.load_state_dict(whole, assign=True)
    assert same(fresh().detach(), a)
    junk: list[Any] = [None, [], {"format": torch.ones(2)}, torch.ones(3), {"format": "COO"}]
    for one in junk:
        for name in ("encoding", "_extra_state"):
            with pytest.raises(insum.FormatError, match="cannot be read"):
                fresh.load_state_dict({**whole, name: one})
    text = bytes(whole["encoding"].tolist())
    for wrong in (b"", b"[" * 9000, text[:-1], text.replace(b'"shape": [', b'"shape": ["a", ')):
        with pytest.raises(insum.FormatError):
            fresh.load_state_dict({**whole, "encoding": torch.tensor([*wrong], dtype=torch.uint8)})
    assert same(fresh().detach(), a)
    del whole["encoding"]
    fresh.load_state_dict({**whole, "_extra_state": held.layout})  # as version 0.1.0 wrote it
    assert same(fresh().detach(), a)


def test_loading_leaves_the_format_that_a_module_was_made_of_alone() -> None:
    a, b = COO.from_dense(torch.eye(3)), COO.from_dense(torch.eye(3).flip(0))
    one, two = SparseParameter(a), SparseParameter(a)
    one.load_state_dict(SparseParameter(b).state_dict())
    assert same(one().detach(), b) and same(two().detach(), a)
    assert torch.equal(a.to_dense(), torch.eye(3))


def test_vectors_in_groups_have_no_array_of_groups() -> None:
    for kind, options in ((GroupCOO, {}), (BlockGroupCOO, {"block_shape": 2})):
        held = SparseParameter(kind.from_dense(torch.arange(5.0), **options))
        fresh = SparseParameter(kind.from_dense(torch.ones(5), **options))
        fresh.load_state_dict(held.state_dict())
        assert torch.equal(fresh().to_dense(), torch.arange(5.0))


def test_arrays_that_no_memory_holds_or_that_are_sparse_are_errors() -> None:
    held = SparseParameter(COO.from_dense(torch.eye(3)))
    whole = dict(held.state_dict())
    huge = {name: whole[name].expand(2**40, 3) for name in ("values", "indices_0")}
    long = {name: whole[name][:1].expand(2**50) for name in ("values", "indices_0", "indices_1")}
    sparse = {"encoding": whole["encoding"].to_sparse()}
    odd = {"indices_0": whole["indices_0"].to_sparse()}
    for wrong in (huge, {"values": huge["values"]}, long, sparse, odd):
        with pytest.raises(insum.FormatError):
            held.load_state_dict({**whole, **wrong}, assign=wrong is odd)
        assert torch.equal(held().to_dense(), torch.eye(3))  # nothing was changed


def test_index_arrays_of_another_width_are_loaded_whole() -> None:
    a = COO(torch.ones(1), (torch.tensor([5]), torch.tensor([2])), (2**33, 8))
    b = COO(torch.ones(1), (torch.tensor([1]).int(), torch.tensor([2]).int()), (2**33, 8))
    layer, state = SparseParameter(b), SparseParameter(a).state_dict()
    layer.load_state_dict(state)
    assert layer().indices[0].dtype == torch.int64 and layer().indices[0].item() == 5  # type: ignore[attr-defined]
    state["indices_0"] = torch.tensor([2**32 + 1])
    layer.load_state_dict(state)
    assert layer().indices[0].item() == 2**32 + 1  # type: ignore[attr-defined]
    state["indices_0"] = torch.tensor([2**34 + 1])
    with pytest.raises(insum.IndexRangeError, match=r"indices\[0\]\[0\] is"):
        layer.load_state_dict(state)


@pytest.mark.parametrize("a", all_of_them(), ids=repr)
def test_arrays_that_nobody_vouches_for_are_looked_at(a: SparseFormat) -> None:
    """After unflattening, moving and writing: nothing is declared that was not seen."""
    spoilt = pytree.tree_map(lambda t: t if t.is_floating_point() else t + 2**20, a)
    with pytest.raises(insum.InsumError):
        spoilt.entries()
    moved = spoilt.to(device="cpu")
    assert all(facts.known(array) is None for _, _, array in moved.index_arrays())
    with pytest.raises(insum.InsumError):
        moved.to_format("COO")
    turned = spoilt.permute(*reversed(range(a.ndim))) if a.sorted_dims == () else None
    assert turned is None or all(
        facts.known(array) is None for _, _, array in turned.index_arrays()
    )
    own = copy.deepcopy(a)
    next(own.index_arrays())[2].add_(2**20)
    with pytest.raises(insum.InsumError):
        own.to_format("COO")


def test_what_is_known_moves_with_the_arrays() -> None:
    a = COO.from_dense(torch.eye(3))
    b = a.to(device="meta")
    assert [(f.low, f.high, f.sorted) for f in b.facts().values()] == [
        (f.low, f.high, f.sorted) for f in a.facts().values()
    ]
