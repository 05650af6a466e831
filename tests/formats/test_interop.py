"""torch.sparse, SciPy and edge_index, there and back."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from insum.errors import FormatError, IndexRangeError, InsumError, UnsupportedError
from insum.formats import COO, ELL, BlockCOO, BlockGroupCOO, GroupCOO, SparseFormat

from .cases import GENERAL, dense_tensors, every_format, options_for

warnings.filterwarnings("ignore", message="Sparse .* tensor support is in beta")
LAYOUTS = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc]
SCIPY = ["coo", "csr", "csc", "bsr", "lil", "dok", "dia"]


def as_layout(x: Tensor, layout: torch.layout, block: tuple[int, int]) -> Tensor:
    return (
        x.to_sparse(layout=layout, blocksize=block)
        if layout in (torch.sparse_bsr, torch.sparse_bsc)
        else x.to_sparse(layout=layout)
    )


@settings(max_examples=100, deadline=None)
@given(
    dense_tensors(
        ranks=(2, 2),
        dtypes=[torch.float32, torch.float64, torch.int64, torch.complex64],
        smallest=1,
    ),
    st.sampled_from(LAYOUTS),
    st.data(),
)
def test_from_every_torch_layout(x: Tensor, layout: torch.layout, data: st.DataObject) -> None:
    block = (2, 3)
    x = x.repeat_interleave(2, 0).repeat_interleave(3, 1)
    format = data.draw(st.sampled_from(GENERAL))
    options = data.draw(options_for(format, 2))
    a = format.from_torch(as_layout(x, layout, block), **options, validate=data.draw(st.booleans()))
    assert torch.equal(a.to_dense(), x)
    assert [t.tolist() for t in a.tensors()] == [
        t.tolist() for t in format.from_dense(x, **options).tensors()
    ]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_to_every_torch_layout(layout: torch.layout) -> None:
    x = torch.tensor(
        [[1.0, 0, 0, 0, 0, 2], [0, 0, 0, 0, 0, 0], [0, 3, 4, 0, 0, 0], [0, 0, 0, 0, 5, 6]]
    )
    for a in every_format(x):
        block = (2, 3) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
        t = a.to_torch(layout, block_shape=block)
        assert t.layout == layout and torch.equal(t.to_dense(), x)
        with torch.sparse.check_sparse_tensor_invariants():
            torch.sparse_compressed_tensor(
                *_parts(t), t.shape, layout=layout
            ) if layout != torch.sparse_coo else t.coalesce()


def _parts(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    by_row = t.layout in (torch.sparse_csr, torch.sparse_bsr)
    return (
        (t.crow_indices(), t.col_indices(), t.values())
        if by_row
        else (t.ccol_indices(), t.row_indices(), t.values())
    )


def test_block_tensors_keep_their_blocks() -> None:
    x = torch.block_diag(*[torch.ones(2, 2)] * 3)
    a = BlockCOO.from_torch(x.to_sparse_bsr((2, 2)), block_shape=(2, 2))
    assert (
        a.positions == (3,)
        and torch.equal(a.to_dense(), x)
        and a.to_torch(torch.sparse_bsr).values().shape == (3, 2, 2)
    )
    with pytest.raises(UnsupportedError, match="not divisible"):
        BlockCOO.from_dense(torch.eye(3), block_shape=2).to_torch(torch.sparse_bsr)
    with pytest.raises(FormatError, match="needs a block shape"):
        COO.from_dense(torch.eye(4)).to_torch(torch.sparse_bsr)


def test_uncoalesced_and_hybrid_coo() -> None:
    i = torch.tensor([[1, 0, 1], [2, 0, 2]])
    t = torch.sparse_coo_tensor(i, torch.tensor([1.0, 2.0, 3.0]), (2, 3))
    assert torch.equal(GroupCOO.from_torch(t).to_dense(), t.to_dense())
    hybrid = torch.sparse_coo_tensor(i, torch.arange(12.0).reshape(3, 4), (2, 3, 4))
    for format, options in (
        (COO, {}),
        (GroupCOO, {"group_dims": 2}),
        (ELL, {}),
        (BlockCOO, {"block_shape": (1, 1, 4)}),
    ):
        assert torch.equal(format.from_torch(hybrid, **options).to_dense(), hybrid.to_dense())


@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc"])
def test_batched_compressed(layout: str) -> None:
    x = torch.stack([torch.eye(4), torch.eye(4).flip(0)]).reshape(2, 1, 4, 4).repeat(1, 3, 1, 1)
    to = getattr(x, f"to_sparse_{layout}")
    t = to((2, 2)) if layout in ("bsr", "bsc") else to()
    for format, options in (
        (COO, {}),
        (GroupCOO, {"group_dims": (0, 2)}),
        (BlockCOO, {"block_shape": (1, 1, 2, 2)}),
    ):
        assert torch.equal(format.from_torch(t, **options).to_dense(), x)


def test_pointers_come_with_csr() -> None:
    x = torch.tensor([[1.0, 0, 2], [0, 0, 0], [0, 3, 0]]).to_sparse_csr()
    a = COO.from_torch(x)
    assert a.segment_pointers().tolist() == x.crow_indices().tolist()
    assert GroupCOO.from_torch(x, group_size=1).segment_pointers().tolist() == [0, 2, 2, 3]


@settings(max_examples=60, deadline=None)
@given(
    dense_tensors(
        ranks=(2, 2),
        dtypes=[torch.float32, torch.float64, torch.int32, torch.bool, torch.complex64],
        smallest=1,
    ),
    st.sampled_from(SCIPY),
    st.data(),
)
def test_from_every_scipy_format(x: Tensor, kind: str, data: st.DataObject) -> None:
    format = data.draw(st.sampled_from(GENERAL))
    options = data.draw(options_for(format, 2))
    m = sp.coo_array(x.numpy()).asformat(kind)
    a = format.from_scipy(m, **options)
    assert a.dtype == x.dtype and torch.equal(a.to_dense(), x)


@pytest.mark.parametrize("kind", ["coo", "csr", "csc", "bsr", None])
def test_to_scipy(kind: Any) -> None:
    x = torch.tensor(
        [[1.0, 0, 0, 0, 0, 2], [0, 0, 0, 0, 0, 0], [0, 3, 4, 0, 0, 0], [0, 0, 0, 0, 5, 6]]
    )
    for a in every_format(x):
        if kind == "bsr" and a.block_shape_or_none is None:
            continue
        m = a.to_scipy(kind)
        assert np.array_equal(m.toarray(), x.numpy())
        assert kind is None or m.format == kind


def test_scipy_that_is_not_canonical() -> None:
    m = sp.csr_array(
        (np.array([1.0, 2.0, 4.0, 8.0]), np.array([2, 0, 2, 1]), np.array([0, 3, 4])), shape=(2, 3)
    )
    assert not m.has_canonical_format
    for format, options in ((COO, {}), (GroupCOO, {}), (BlockGroupCOO, {"block_shape": 2})):
        assert format.from_scipy(m, **options).to_dense().tolist() == [[2, 0, 5], [0, 8, 0]]
    blocks = sp.bsr_array(
        (np.ones((3, 2, 2)), np.array([1, 0, 1]), np.array([0, 3, 3])), shape=(4, 4)
    )
    assert (
        BlockCOO.from_scipy(blocks, block_shape=2).to_dense().tolist() == blocks.toarray().tolist()
    )


def test_scipy_of_other_ranks_and_dtypes() -> None:
    x = torch.zeros(3, 2, 4, dtype=torch.int64)
    x[0, 1, 2] = x[2, 0, 3] = 5
    back = COO.from_dense(x).to_scipy()
    assert back.shape == (3, 2, 4) and torch.equal(GroupCOO.from_scipy(back).to_dense(), x)
    assert COO.from_scipy(sp.eye_array(3), dtype=torch.float16).dtype == torch.float16
    with pytest.raises(UnsupportedError, match="float16"):
        COO.from_dense(torch.eye(2, dtype=torch.float16)).to_scipy()
    with pytest.raises(UnsupportedError, match="a matrix"):
        COO.from_dense(x).to_scipy("csr")


def test_scipy_is_copied() -> None:
    m = sp.csr_array(np.eye(3))
    a = COO.from_scipy(m)
    m.data[:] = 7
    m.indices[:] = 0
    assert torch.equal(a.to_dense(), torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize("format", GENERAL)
def test_edge_index(format: type[SparseFormat]) -> None:
    options = {"block_shape": 2} if "block_shape" in format._options else {}
    edges = torch.tensor([[3, 0, 1, 1, 3], [1, 2, 0, 3, 1]])
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    want = torch.zeros(4, 4).index_put((edges[0], edges[1]), weights, accumulate=True)
    assert torch.equal(
        format.from_edge_index(edges, weights, num_nodes=4, **options).to_dense(), want
    )
    assert torch.equal(
        format.from_edge_index(edges, num_nodes=4, **options).to_dense(), (want != 0).float()
    )
    index, back = format.from_edge_index(edges, weights, **options).to_edge_index()
    assert (
        index.tolist() == [[0, 1, 1, 3], [2, 0, 3, 1]]
        and back is not None
        and back.tolist() == [2, 3, 4, 6]
    )
    assert format.from_edge_index(edges, num_nodes=(5, 7), **options).shape == (5, 7)
    assert format.from_edge_index(edges[:, :0], **options).shape == (0, 0)


def test_gradients_of_edge_weights() -> None:
    weights = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    a = GroupCOO.from_edge_index(torch.tensor([[1, 0, 1], [0, 1, 0]]), weights, num_nodes=2)
    (a.to_dense() * torch.tensor([[1.0, 10.0], [100.0, 1.0]])).sum().backward()
    assert weights.grad is not None and weights.grad.tolist() == [100, 10, 100]


# --- indices in narrow dtypes, and what others did not look at ------------------------------------

NARROW = [torch.int8, torch.uint8, torch.int16, torch.int32]
#: Around what each of the dtypes holds, where a limit that is converted to one wraps.
LIMITS = [101, 127, 128, 200, 255, 256, 300, 32768, 65536, 65637, 2**31, 3 * 10**9, 2**33]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("size", LIMITS)
def test_a_limit_that_the_dtype_of_the_indices_does_not_hold(dtype: torch.dtype, size: int) -> None:
    i, j = torch.tensor([100, 3, 100], dtype=dtype), torch.tensor([2, 0, 2], dtype=dtype)
    a = COO.from_entries([i, j], torch.tensor([1.0, 2.0, 4.0]), shape=(size, size))
    assert [c.tolist() for c in a.indices] == [[3, 100], [0, 2]]
    assert a.values is not None and a.values.tolist() == [2.0, 5.0]
    b = GroupCOO.from_edge_index(torch.stack([i, j]), num_nodes=(size, 3), group_dims=1)
    assert b.shape == (size, 3) and b.nnz == 2


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_an_index_out_of_range_is_named_whatever_its_dtype(dtype: torch.dtype) -> None:
    i = torch.tensor([0, 100, 5], dtype=dtype)
    with pytest.raises(IndexRangeError, match=r"indices\[0\]\[1\] is 100, outside .* of size 100"):
        COO.from_entries([i], torch.ones(3), shape=(100,))
    if dtype.is_signed:
        with pytest.raises(IndexRangeError, match=r"indices\[0\]\[0\] is -1, outside"):
            COO.from_entries([-1 - i], torch.ones(3), shape=(300,))


def test_a_dimension_that_int32_does_not_hold() -> None:
    i = torch.tensor([0, 7], dtype=torch.int32)
    a = COO(torch.ones(2), (i, i), (3 * 10**9, 5 * 10**9))
    assert a.to_edge_index()[0].tolist() == [[0, 7], [0, 7]]


@pytest.mark.filterwarnings("ignore:Sparse .*")
def test_indices_that_torch_and_scipy_did_not_look_at() -> None:
    far = torch.tensor([[0, 50], [0, 2]])
    for coalesced in (True, False):
        x = torch.sparse_coo_tensor(far, torch.ones(2), (3, 3), is_coalesced=coalesced)
        with pytest.raises(IndexRangeError, match=r"indices\[0\]\[1\] is 50"):
            GroupCOO.from_torch(x)
    # 0,5 has the key of 1,2
    x = torch.sparse_coo_tensor(torch.tensor([[0], [5]]), torch.ones(1), (3, 3))
    with pytest.raises(IndexRangeError, match=r"indices\[1\]\[0\] is 5"):
        COO.from_torch(x)
    m = sp.coo_array(np.eye(3))
    m.coords[0][1] = 77
    with pytest.raises(IndexRangeError, match=r"indices\[0\]\[1\] is 77"):
        COO.from_scipy(m)


@pytest.mark.filterwarnings("ignore:Sparse .*")
def test_a_claim_to_be_in_order_is_looked_at() -> None:
    i = torch.tensor([[2, 0, 2], [1, 0, 1]])
    v = torch.tensor([1.0, 2.0, 3.0])
    a = COO.from_torch(torch.sparse_coo_tensor(i, v, (3, 3), is_coalesced=True))
    assert a.to_dense().tolist() == [[2, 0, 0], [0, 0, 0], [0, 4, 0]]


@pytest.mark.filterwarnings("ignore:Sparse .*")
@pytest.mark.parametrize(
    ("pointers", "columns", "message"),
    [
        ([[0, 1, 2], [0, 1, 2]], [[0, 1], [0, 99]], r"indices\[1, 1\] is 99"),
        ([[0, 1, 5], [0, 1, 2]], [[0, 1], [0, 1]], "row pointers do not rise"),
        ([[0, 1, 2], [0, 2, 1]], [[0, 1], [0, 1]], "row pointers do not rise"),
    ],
)
def test_batches_are_looked_at(pointers: Any, columns: Any, message: str) -> None:
    x = torch.sparse_csr_tensor(
        torch.tensor(pointers), torch.tensor(columns), torch.ones(2, 2), (2, 2, 2)
    )
    with pytest.raises(InsumError, match=message):
        COO.from_torch(x)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_coordinates_of_unsigned_integers(dtype: torch.dtype) -> None:
    places = torch.tensor([[0, 1, 1], [2, 0, 1]])
    want = COO.from_entries(tuple(places), torch.ones(3), (2, 3)).to_dense()
    found = COO.from_entries(tuple(places.to(dtype)), torch.ones(3), (2, 3))
    assert torch.equal(found.to_dense(), want)
    edges = COO.from_edge_index(places.to(dtype), num_nodes=3)
    assert torch.equal(edges.to_dense(), COO.from_edge_index(places, num_nodes=3).to_dense())
