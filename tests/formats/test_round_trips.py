"""Dense -> format -> dense is exact, for every format, dtype and rank, on patterns that break
things.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from insum.formats import COO, ELL, BlockCOO, BlockGroupCOO, GroupCOO, NeighborTable, SparseFormat

from .cases import (
    DTYPES,
    GENERAL,
    PATTERNS,
    dense_tensors,
    every_format,
    filled,
    options_for,
    pattern,
    single_along,
    sparse_cases,
)


@settings(max_examples=250, deadline=None)
@given(sparse_cases())
def test_dense_round_trip(case: tuple[Tensor, type[SparseFormat], dict[str, Any]]) -> None:
    x, format, options = case
    a = format.from_dense(x, **options)
    back = a.to_dense()
    assert back.dtype == x.dtype and torch.equal(back, x)
    assert a.shape == tuple(x.shape) and a.nnz == int((x != 0).sum())
    assert all(t.dtype == torch.int32 for t in list(a.tensors())[1:])


@settings(max_examples=60, deadline=None)
@given(sparse_cases())
def test_what_is_built_is_valid(case: tuple[Tensor, type[SparseFormat], dict[str, Any]]) -> None:
    x, format, options = case
    a = format.from_dense(x, **options)
    again = format(**a._fields(), validate=True)
    assert torch.equal(again.to_dense(), x)


@settings(max_examples=60, deadline=None)
@given(dense_tensors(ranks=(2, 5)), st.data())
def test_neighbour_table_round_trip(x: Tensor, data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, x.dim() - 1))
    x = single_along(x, dim)
    a = NeighborTable.from_dense(x, dim=dim)
    assert torch.equal(a.to_dense(), x)
    assert a.positions == tuple(s for d, s in enumerate(x.shape) if d != dim)


@settings(max_examples=100, deadline=None)
@given(sparse_cases(), st.data())
def test_formats_into_each_other(
    case: tuple[Tensor, type[SparseFormat], dict[str, Any]], data: st.DataObject
) -> None:
    x, format, options = case
    target = data.draw(st.sampled_from(GENERAL))
    into = data.draw(options_for(target, x.dim()))
    b = format.from_dense(x, **options).to_format(target, **into)
    assert type(b) is target and torch.equal(b.to_dense(), x)
    assert [t.tolist() for t in b.tensors()] == [
        t.tolist() for t in target.from_dense(x, **into).tensors()
    ]


@settings(max_examples=80, deadline=None)
@given(sparse_cases(), st.data())
def test_permutation_stays_in_the_format(
    case: tuple[Tensor, type[SparseFormat], dict[str, Any]], data: st.DataObject
) -> None:
    x, format, options = case
    dims = data.draw(st.permutations(range(x.dim())))
    b = format.from_dense(x, **options).permute(*dims)
    assert type(b) is format and torch.equal(b.to_dense(), x.permute(*dims))
    format(**b._fields(), validate=True)


@settings(max_examples=60, deadline=None)
@given(sparse_cases(), st.data())
def test_entries_in_any_order_with_duplicates(
    case: tuple[Tensor, type[SparseFormat], dict[str, Any]], data: st.DataObject
) -> None:
    x, format, options = case
    coords = x.nonzero()
    shuffle = torch.randperm(
        2 * len(coords), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    )
    twice = coords.repeat(2, 1)[shuffle]
    values = x[tuple(twice.T)] if len(coords) else x.new_zeros(0)
    a = format.from_entries(list(twice.T), values, x.shape, **options)
    want = x if x.dtype == torch.bool else x + x
    assert torch.equal(a.to_dense(), want.to(x.dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", PATTERNS)
def test_every_dtype_and_pattern_in_every_format(dtype: torch.dtype, kind: str) -> None:
    x = filled(pattern(kind, (7, 9), 3), dtype, 5)
    for a in every_format(x):
        assert torch.equal(a.to_dense(), x), a


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (0, 0), (1,), (1, 1), (2, 0, 3)], ids=str)
def test_zero_sizes(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape)
    for a in every_format(x):
        assert a.nnz == 0 and a.to_dense().shape == x.shape
        assert tuple(a.T.to_dense().shape) == tuple(reversed(x.shape))


def test_values_that_are_not_finite() -> None:
    x = torch.tensor([[float("nan"), 0.0], [float("inf"), -float("inf")]])
    for a in every_format(x):
        assert torch.equal(a.to_dense().nan_to_num(7), x.nan_to_num(7))


def test_a_dimension_beyond_64_bits_in_all() -> None:
    """Coordinates whose linear key does not fit 64 bits are sorted dimension by dimension."""
    shape = (2**31 - 1, 2**31 - 1, 2**31 - 1)
    i = torch.tensor([5, 2, 5, 2**31 - 2])
    a = COO.from_entries([i, i.flip(0), i], torch.tensor([1.0, 2.0, 4.0, 8.0]), shape)
    assert (
        a.indices[0].tolist() == [2, 5, 5, 2**31 - 2]
        and a.values is not None
        and a.values.tolist() == [2.0, 4.0, 1.0, 8.0]
    )
    merged = COO.from_entries([torch.cat([i, i])] * 3, torch.ones(8), shape)
    assert (
        merged.nnz == 3 and merged.values is not None and merged.values.tolist() == [2.0, 4.0, 2.0]
    )
    blocks = BlockCOO.from_entries([i, i, i], None, shape, block_shape=(1, 2, 1))
    assert blocks.to_format(COO).indices[1].tolist() == [2, 5, 2**31 - 2]
    grouped = merged.to_format(GroupCOO, group_dims=(0, 1), group_size=2)
    assert grouped.group_indices[1].tolist() == [2, 5, 2**31 - 2]


def test_index_arrays_are_wide_where_they_must_be() -> None:
    a = COO.from_entries([torch.tensor([2**40]), torch.tensor([1])], torch.ones(1), (2**41, 3))
    assert [t.dtype for t in a.indices] == [torch.int64, torch.int32] and a.indices[0].tolist() == [
        2**40
    ]


@pytest.mark.parametrize("format", GENERAL)
def test_gradients_reach_stored_values_only(format: type[SparseFormat]) -> None:
    options = {"block_shape": (2, 2)} if "block_shape" in format._options else {}
    x = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 0.0], [0.0, 3.0, 4.0]], requires_grad=True)
    a = format.from_dense(x, **options)
    (a.to_dense() * torch.arange(9.0).reshape(3, 3)).sum().backward()
    stored = torch.ones(3, 3) if format in (BlockCOO, BlockGroupCOO) else (x != 0).float()
    if format in (BlockCOO, BlockGroupCOO):
        stored[2:, :2], stored[0:2, 2:], stored[2:, 2:] = 1, 1, 1
    assert x.grad is not None and torch.equal(x.grad, torch.arange(9.0).reshape(3, 3) * stored)


def test_gradient_of_padding_is_zero() -> None:
    a = GroupCOO.from_dense(
        torch.tensor([[1.0, 2.0, 3.0], [0.0, 4.0, 0.0]]), group_size=2
    ).requires_grad_()
    a.to_dense().sum().backward()
    assert a.values is not None and a.values.grad is not None
    assert a.values.grad.tolist() == [[1, 1], [1, 0], [1, 0]]


def test_patterns_have_no_values() -> None:
    x = torch.tensor([[1.0, 0, 2], [0, 3, 0]])
    for a in every_format(x):
        p = a.pattern()
        ones = p.to_dense()
        assert p.values is None and p.dtype is None and ones.dtype == torch.float32
        assert torch.equal(ones != 0, x != 0) or p.block_shape_or_none
        assert torch.equal(p.to_dense(torch.int64), ones.long())


def test_a_pattern_of_blocks_stays_inside_the_shape() -> None:
    p = BlockCOO.from_dense(torch.eye(3), block_shape=2).pattern()
    assert p.nnz == 5 and p.to_format(COO).nnz == 5
    assert p.to_dense().tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    assert (
        ELL.from_dense(torch.eye(3))
        .pattern()
        .to_format(BlockCOO, block_shape=2)
        .to_dense()
        .tolist()
        == torch.eye(3).tolist()
    )
