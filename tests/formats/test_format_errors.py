"""The messages alone: each names the array, the position, the value and the limit."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from insum.errors import (
    DeviceError,
    DtypeError,
    FormatError,
    IndexRangeError,
    InsumError,
    UnsupportedError,
)
from insum.formats import COO, ELL, BlockCOO, BlockGroupCOO, GroupCOO, NeighborTable, count_groups

Make = Callable[..., Any]


def t(*values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def v(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


EYE = torch.eye(3)
META = torch.zeros(2, dtype=torch.int32, device="meta")
CASES: list[tuple[str, type[InsumError], Make, str]] = [
    # shapes and ranks
    ("shape", FormatError, lambda: COO(v(1), (t(0),), (-3,)), "shape is (-3,)"),
    ("no shape", FormatError, lambda: GroupCOO(v(1, 1), (t(0),), (t([0]),), None), "shape is None"),  # type: ignore[arg-type]
    (
        "no dimension",
        FormatError,
        lambda: COO.from_dense(torch.tensor(1.0)),
        "a sparse tensor has at least one dimension",
    ),
    (
        "arrays",
        FormatError,
        lambda: COO(v(2), (t(0, 1),), (3, 3)),
        "indices has 1 array(s), but shape (3, 3) needs 2",
    ),
    (
        "lengths",
        FormatError,
        lambda: COO(v(2), (t(0, 1), t(0, 1, 2)), (3, 3)),
        "indices[1] has shape (3,), but the other arrays have (2,)",
    ),
    (
        "rank of an array",
        FormatError,
        lambda: GroupCOO(v(1, 2), (t([0, 1]),), (t([0, 1]),), (3, 3)),
        "group_indices[0] has 2 dimension(s)",
    ),
    ("values", FormatError, lambda: COO(v(3), (t(0, 1), t(0, 1)), (3, 3)), "values has shape (3,)"),
    (
        "values of blocks",
        FormatError,
        lambda: BlockCOO(v(1, 2, 3), (t(0), t(0)), (4, 4), (2, 2)),
        "expected: (1, 2, 2), one value for every position",
    ),
    (
        "rows of ELL",
        FormatError,
        lambda: ELL(v(2, 1), (t([0], [1]),), (3, 3)),
        "the arrays have 2 rows along axis 0, but dimension 0 has size 3",
    ),
    ("not a tensor", FormatError, lambda: COO(v(1), ([0], t(0)), (3, 3)), "is a list"),
    # dtypes and devices
    (
        "float index",
        DtypeError,
        lambda: COO(v(1), (v(1), t(0)), (3, 3)),
        "indices[0] holds float32",
    ),
    (
        "small index",
        DtypeError,
        lambda: COO(v(1), (t(0, dtype=torch.int16), t(0)), (3, 3)),
        "expected: int32 or int64",
    ),
    (
        "devices of indices",
        DeviceError,
        lambda: COO(v(2), (t(0, 1), META), (3, 3)),
        "indices[1] is on meta, other arrays on cpu",
    ),
    (
        "devices of values",
        DeviceError,
        lambda: COO.from_dense(EYE).with_values(v(3).to("meta")),
        "values are on meta but the index arrays on cpu",
    ),
    # contents
    (
        "too large",
        IndexRangeError,
        lambda: COO(v(2), (t(0, 1), t(2, 5)), (3, 3)),
        "indices[1][1] is 5, outside dimension 1 of size 3",
    ),
    (
        "the limit",
        IndexRangeError,
        lambda: COO(v(2), (t(0, 1), t(2, 5)), (3, 3)),
        "values from 0 to 2",
    ),
    (
        "negative",
        IndexRangeError,
        lambda: COO(v(2), (t(-1, 1), t(2, 0)), (3, 3)),
        "indices[0][0] is -1, outside dimension 0",
    ),
    (
        "other negative",
        IndexRangeError,
        lambda: ELL(v(3, 1), (t([0], [-2], [1]),), (3, 3)),
        "indices[0][1, 0] is -2, outside dimension 1 of size 3",
    ),
    (
        "padding",
        IndexRangeError,
        lambda: ELL(v(3, 1), (t([0], [-2], [1]),), (3, 3)),
        "or -1 for padding",
    ),
    (
        "padded group",
        IndexRangeError,
        lambda: GroupCOO(v(2, 1), (t(0, -1),), (t([0], [1]),), (3, 3)),
        "group_indices[0][1] is -1",
    ),
    (
        "block range",
        IndexRangeError,
        lambda: BlockCOO(v(1, 2, 2), (t(2), t(0)), (4, 4), (2, 2)),
        "indices[0][0] is 2, outside dimension 0, which has 2 blocks of 2 (size 4)",
    ),
    (
        "table",
        IndexRangeError,
        lambda: NeighborTable(t([0, 3]), shape=(1, 3, 2)),
        "table[0, 1] is 3, outside dimension 1 of size 3",
    ),
    (
        "disagreeing padding",
        FormatError,
        lambda: ELL(v(1, 2), (t([0, -1]), t([0, 1])), (1, 2, 2)),
        "indices[0] and indices[1] disagree about padding at [0, 1]",
    ),
    (
        "unsorted",
        FormatError,
        lambda: COO(v(2), (t(1, 0), t(0, 2)), (3, 3)),
        "entry 1 at (0, 2) comes after entry 0 at (1, 0)",
    ),
    (
        "unsorted within",
        FormatError,
        lambda: COO(v(2), (t(1, 1), t(2, 0)), (3, 3)),
        "expected: sorted by dimension 0, then 1",
    ),
    (
        "duplicate",
        FormatError,
        lambda: COO(v(2), (t(1, 1), t(2, 2)), (3, 3)),
        "entry 0 and entry 1 are both at (1, 2)",
    ),
    (
        "unsorted groups",
        FormatError,
        lambda: GroupCOO(v(2, 1), (t(1, 0),), (t([0], [1]),), (3, 3)),
        "group 1 at (0,) comes after group 0 at (1,)",
    ),
    (
        "duplicate in groups",
        FormatError,
        lambda: GroupCOO(v(2, 2), (t(1, 1),), (t([0, 2], [2, -1]),), (3, 3)),
        "there is more than one entry at (1, 2)",
    ),
    (
        "duplicate in ELL",
        FormatError,
        lambda: ELL(v(1, 2), (t([1, 1]),), (1, 3)),
        "there is more than one entry at (0, 1)",
    ),
    (
        "duplicate block",
        FormatError,
        lambda: BlockCOO(v(2, 2, 2), (t(0, 0), t(0, 0)), (4, 4), (2, 2)),
        "block 0 and block 1 are both at (0, 0)",
    ),
    (
        "beyond the edge",
        FormatError,
        lambda: BlockCOO(v(1, 2, 2), (t(1), t(1)), (3, 3), (2, 2)),
        "values[0, 0, 1] is 1.0, outside shape (3, 3)",
    ),
    # options
    ("group dims", FormatError, lambda: GroupCOO.from_dense(EYE, group_dims=2), "group_dims is 2"),
    (
        "group dims twice",
        FormatError,
        lambda: GroupCOO.from_dense(torch.ones(2, 2, 2), group_dims=(0, 0)),
        "names a dimension twice",
    ),
    (
        "all grouped",
        FormatError,
        lambda: ELL.from_dense(EYE, group_dims=(0, 1)),
        "leaves none of 2 dimension(s) ungrouped",
    ),
    (
        "group size 0",
        FormatError,
        lambda: GroupCOO.from_dense(EYE, group_size=0),
        "group_size is 0",
    ),
    (
        "group size word",
        FormatError,
        lambda: GroupCOO.from_dense(EYE, group_size="best"),
        "group_size is 'best'",
    ),
    ("count", FormatError, lambda: count_groups([1], 1.5), "group_size is 1.5"),  # type: ignore[arg-type]
    (
        "no block shape",
        FormatError,
        lambda: BlockCOO.from_dense(EYE),
        "BlockCOO needs a block shape",
    ),
    (
        "block rank",
        FormatError,
        lambda: BlockCOO.from_dense(EYE, block_shape=(2,)),
        "block_shape is (2,), but the tensor has 2 dimension(s)",
    ),
    (
        "block size 0",
        FormatError,
        lambda: BlockGroupCOO.from_dense(EYE, block_shape=(2, 0)),
        "block sizes of at least 1",
    ),
    (
        "unknown option",
        FormatError,
        lambda: GroupCOO.from_dense(EYE, block_shape=2),
        "GroupCOO has no option 'block_shape'",
    ),
    (
        "options of ELL",
        FormatError,
        lambda: ELL.from_dense(EYE, size=2),
        "options of ELL: group_dims",
    ),
    (
        "table with two",
        FormatError,
        lambda: NeighborTable.from_dense(torch.ones(1, 2), dim=1),
        "[0, :] has more than one entry along dimension 1: at 0 and 1",
    ),
    ("table dim", FormatError, lambda: NeighborTable.from_dense(EYE, dim=3), "dim is 3"),
    (
        "permutation",
        FormatError,
        lambda: COO.from_dense(EYE).permute(0, 0),
        "every dimension of 0 to 1 once",
    ),
    (
        "unknown format",
        FormatError,
        lambda: COO.from_dense(EYE).to_format("CSR"),
        "there is no format 'CSR'",
    ),
    (
        "gradient of a pattern",
        FormatError,
        lambda: COO.from_dense(EYE).pattern().requires_grad_(),
        "is a pattern",
    ),
    # sources
    (
        "list as dense",
        FormatError,
        lambda: COO.from_dense([[1.0]]),  # type: ignore[arg-type]
        "from_dense takes a tensor, not list",
    ),
    ("sparse as dense", FormatError, lambda: COO.from_dense(EYE.to_sparse()), "from_torch(x)"),
    (
        "array as scipy",
        FormatError,
        lambda: COO.from_scipy(np.eye(3)),
        "from_scipy takes a scipy.sparse array, not ndarray",
    ),
    (
        "entries",
        IndexRangeError,
        lambda: COO.from_entries([t(0, 7), t(0, 1)], v(2), (3, 3)),
        "indices[0][1] is 7, outside dimension 0 of size 3",
    ),
    (
        "ranks of entries",
        FormatError,
        lambda: COO.from_entries([t(0)], v(1), (3, 3)),
        "indices has 1 array(s), but shape (3, 3) has 2 dimension(s)",
    ),
    (
        "values of entries",
        FormatError,
        lambda: COO.from_entries([t(0), t(0)], v(2), (3, 3)),
        "values has shape (2,)",
    ),
    ("edges", FormatError, lambda: COO.from_edge_index(t(0, 1, 2)), "edge_index has shape (3,)"),
    (
        "edge range",
        IndexRangeError,
        lambda: COO.from_edge_index(t([0, 1], [2, 9]), num_nodes=3),
        "edge_index[1][1] is 9, outside 3 nodes",
    ),
    (
        "edge weights",
        FormatError,
        lambda: COO.from_edge_index(t([0, 1], [1, 0]), v(3)),
        "weights has shape (3,)",
    ),
    ("edge dtype", DtypeError, lambda: COO.from_edge_index(v(2, 3)), "edge_index holds float32"),
    (
        "pointers",
        FormatError,
        lambda: COO.from_torch(torch.sparse_csr_tensor(t(0, 3, 2), t(0, 1), v(2), (2, 2))),
        "row pointers do not rise",
    ),
    (
        "columns",
        IndexRangeError,
        lambda: COO.from_torch(torch.sparse_csr_tensor(t(0, 1, 2), t(0, 7), v(2), (2, 2))),
        "indices[1] is 7, outside dimension 1 of size 2",
    ),
    (
        "dense of a sparse",
        UnsupportedError,
        lambda: COO.from_torch(torch.sparse_csr_tensor(t(0, 1), t(0), v(1, 2), (1, 1, 2))),
        "compressed tensor with dense dimensions",
    ),
    (
        "layout",
        UnsupportedError,
        lambda: COO.from_dense(EYE).to_torch(torch.strided),
        "to_torch(torch.strided)",
    ),
    (
        "scipy format",
        UnsupportedError,
        lambda: COO.from_dense(EYE).to_scipy("lil"),  # type: ignore[arg-type]
        "asformat('lil')",
    ),
    (
        "a matrix",
        UnsupportedError,
        lambda: COO.from_dense(v(2, 2, 2)).to_edge_index(),
        "a tensor with 3 dimension(s)",
    ),
]


@pytest.mark.filterwarnings("ignore:Sparse .*")
@pytest.mark.parametrize(
    ("kind", "make", "message"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_message(kind: type[InsumError], make: Make, message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)) as caught:
        make()
    assert type(caught.value) is kind and caught.value.fact


def test_validation_can_be_skipped() -> None:
    wrong = COO(v(2), (t(1, 0), t(0, 9)), (3, 3), validate=False)
    assert wrong.indices[1].tolist() == [0, 9]
    m = sp.csr_array((np.ones(2), np.array([0, 2]), np.array([0, 1, 2])), shape=(2, 3))
    assert torch.equal(COO.from_scipy(m, validate=False).to_dense(), COO.from_scipy(m).to_dense())
    edges = t([0, 1], [1, 0])
    assert torch.equal(
        GroupCOO.from_edge_index(edges, validate=False).to_dense(), torch.eye(2).flip(0)
    )
