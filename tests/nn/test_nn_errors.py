"""Mistakes are found before any kernel runs, and the message names them. Devices are told apart by
`meta`, which every machine has.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import insum
from insum.formats import COO, GroupCOO
from insum.nn import (
    BlockSparseLinear,
    FullyConnectedTensorProduct,
    GCNConv,
    GraphConv,
    Irreps,
    RelationalConv,
    SparseConv3d,
    SparseLinear,
    SparseTensor,
    TensorProduct,
    TensorProductConv,
    adjacency,
    magnitude_mask,
    propagate,
    sddmm,
    spherical_harmonics,
    spmm,
    wigner_3j,
)

EDGES = torch.tensor([[0, 1, 5], [1, 2, 0]])
X = torch.randn(4, 3)
A = GroupCOO.from_dense(torch.eye(3))


def cloud(coords: list[list[int]], **options: object) -> SparseTensor:
    return SparseTensor(torch.tensor(coords), torch.ones(len(coords), 2), **options)  # type: ignore[arg-type]


def product(**options: object) -> TensorProduct:
    return FullyConnectedTensorProduct("2x0e+2x1o", "0e+1o", "2x0e", **options)


CASES: dict[str, tuple[Callable[[], object], type[insum.InsumError], str]] = {
    # coordinates
    "duplicate": (
        lambda: cloud([[0, 1, 2], [3, 3, 3], [0, 1, 2]]),
        insum.FormatError,
        "coords[0] and coords[2] are both (0, 0, 1, 2)\n  expected: every voxel once\n"
        "  try: merge them first",
    ),
    "outside": (
        lambda: cloud([[0, 0, 1, 2], [1, 0, 7, 0]], spatial_shape=(4, 4, 4)),
        insum.IndexRangeError,
        "coords[1] is (1, 0, 7, 0), outside the spatial shape: y is 7\n  expected: y from 0 to 3",
    ),
    "negative in a grid": (
        lambda: cloud([[0, -1, 2]], spatial_shape=(4, 4, 4)),
        insum.IndexRangeError,
        "y is -1",
    ),
    "negative batch": (
        lambda: cloud([[0, 0, 0, 0], [-2, 0, 1, 2]]),
        insum.IndexRangeError,
        "coords[1] is (-2, 0, 1, 2): batch -2",
    ),
    "floating coordinates": (
        lambda: SparseTensor(torch.rand(2, 3), torch.ones(2, 2)),
        insum.DtypeError,
        "coords holds float32",
    ),
    "coordinates that are none": (
        lambda: SparseTensor("none", torch.ones(1, 2), None, cloud([[0, 0, 0]]).voxels),  # type: ignore[arg-type]
        insum.DtypeError,
        "coords is 'none'",
    ),
    "five columns": (
        lambda: cloud([[0, 0, 0, 0, 0]]),
        insum.BindingError,
        "coords have shape (1, 5)",
    ),
    "rows": (
        lambda: SparseTensor(torch.tensor([[0, 0, 0]]), torch.ones(2, 2)),
        insum.BindingError,
        "features have shape (2, 2), but there are 1 voxels",
    ),
    "spatial shape": (
        lambda: cloud([[0, 0, 0]], spatial_shape=(4, 0, 4)),
        insum.BindingError,
        "spatial_shape is (4, 0, 4)",
    ),
    "huge box": (
        lambda: cloud([[0, 0, 0], [2**22, 2**22, 2**22]]),
        insum.FormatError,
        "too large for 64-bit keys",
    ),
    "coords elsewhere": (
        lambda: SparseTensor(torch.tensor([[0, 0, 0]]), torch.ones(1, 2, device="meta")),
        insum.DeviceError,
        "coords is on cpu but features is on meta",
    ),
    # convolutions
    "channels": (
        lambda: SparseConv3d(3, 4, 3)(cloud([[0, 0, 0]])),
        insum.BindingError,
        "x.features has shape (1, 2)",
    ),
    "kernel": (lambda: SparseConv3d(3, 4, (3, 3)), insum.BindingError, "kernel_size is (3, 3)"),
    "stride 0": (lambda: SparseConv3d(3, 4, 3, stride=0), insum.BindingError, "stride is 0"),
    "strided submanifold": (
        lambda: SparseConv3d(3, 4, 3, stride=2, submanifold=True),
        insum.UnsupportedError,
        "its outputs are its inputs",
    ),
    "small grid": (
        lambda: SparseConv3d(2, 2, 5)(cloud([[0, 0, 0]], spatial_shape=(4, 4, 4))),
        insum.BindingError,
        "a grid of (4, 4, 4) is too small",
    ),
    "like": (
        lambda: SparseConv3d(2, 2, 3, submanifold=True)(
            cloud([[0, 0, 0]]), like=cloud([[0, 0, 0]])
        ),
        insum.UnsupportedError,
        "like=",
    ),
    "layer elsewhere": (
        lambda: SparseConv3d(2, 2, 3).to("meta")(cloud([[0, 0, 0]])),
        insum.DeviceError,
        "weight is on meta but features is on cpu",
    ),
    # linear layers
    "mask": (
        lambda: SparseLinear.from_dense(nn.Linear(4, 3), torch.ones(4, 3)),
        insum.FormatError,
        "the mask has shape (4, 3), but the weight (3, 4)\n  expected: (3, 4)",
    ),
    "block mask": (
        lambda: BlockSparseLinear.from_dense(nn.Linear(8, 8), torch.ones(3, 3), block_shape=4),
        insum.FormatError,
        "expected: (2, 2), one for each block, or (8, 8)",
    ),
    "mask and density": (
        lambda: SparseLinear.from_dense(nn.Linear(4, 3)),
        insum.FormatError,
        "neither of mask and density given",
    ),
    "density": (lambda: magnitude_mask(torch.ones(3, 3), 1.5), insum.FormatError, "density is 1.5"),
    "mask elsewhere": (
        lambda: SparseLinear.from_dense(nn.Linear(4, 3), torch.ones(3, 4, device="meta")),
        insum.DeviceError,
        "weight is on cpu but mask is on meta",
    ),
    "block shape": (
        lambda: BlockSparseLinear.from_dense(nn.Linear(4, 3), density=1, block_shape=(2, 2, 2)),
        insum.FormatError,
        "block_shape is (2, 2, 2)",
    ),
    "dense weight": (lambda: SparseLinear(torch.ones(2, 2)), insum.FormatError, "weight is Tensor"),  # type: ignore[arg-type]
    "pattern": (
        lambda: SparseLinear(A.pattern()),
        insum.FormatError,
        "weight is GroupCOO(shape=(3, 3), pattern",
    ),
    "bias": (lambda: SparseLinear(A, torch.ones(4)), insum.BindingError, "bias has shape (4,)"),
    "features": (
        lambda: SparseLinear(A)(torch.ones(2, 4)),
        insum.BindingError,
        "x has shape (2, 4)\n  expected: 3 in the last dimension: in_features",
    ),
    "x elsewhere": (
        lambda: SparseLinear(A)(torch.ones(2, 3, device="meta")),
        insum.DeviceError,
        "is on",
    ),
    # products
    "spmm": (
        lambda: spmm(A, torch.ones(4, 2)),
        insum.BindingError,
        "A has shape (3, 3) but B (4, 2)",
    ),
    "spmm of a vector": (
        lambda: spmm(COO.from_dense(torch.ones(3)), torch.ones(3)),
        insum.FormatError,
        "A has 1 dimension(s)",
    ),
    "sddmm": (
        lambda: sddmm(A, torch.ones(3, 2), torch.ones(3, 2)),
        insum.BindingError,
        "X of shape (3, k) and Y (k, 3)",
    ),
    "sddmm elsewhere": (
        lambda: sddmm(A, torch.ones(3, 2, device="meta"), torch.ones(2, 3)),
        insum.DeviceError,
        "A is on cpu but X is on meta",
    ),
    # graphs
    "source": (
        lambda: propagate(EDGES, X),
        insum.IndexRangeError,
        "edge_index[0, 2] is 5, but there are 4 nodes\n  expected: values from 0 to 3",
    ),
    "target": (
        lambda: propagate(EDGES.flip(0), X),
        insum.IndexRangeError,
        "edge_index[1, 2] is 5, but there are 4 nodes",
    ),
    "negative node": (
        lambda: GraphConv(3, 2)(X, torch.tensor([[0], [-1]])),
        insum.IndexRangeError,
        "edge_index[1, 0] is -1",
    ),
    "GCN": (lambda: GCNConv(3, 2)(X, EDGES), insum.IndexRangeError, "edge_index[0, 2] is 5"),
    "GCN with weights": (
        lambda: GCNConv(3, 2)(X, EDGES, torch.ones(3)),
        insum.IndexRangeError,
        "edge_index[0, 2] is 5",
    ),
    "adjacency": (
        lambda: adjacency(EDGES, num_nodes=4),
        insum.IndexRangeError,
        "edge_index[0, 2] is 5",
    ),
    "relational": (
        lambda: RelationalConv(3, 2, 2)(X, EDGES, torch.zeros(3).long()),
        insum.IndexRangeError,
        "edge_index[0, 2] is 5",
    ),
    "relation": (
        lambda: RelationalConv(3, 2, 2)(X, EDGES % 4, torch.tensor([0, 2, 1])),
        insum.IndexRangeError,
        "edge_type[1] is 2, but there are 2 relations",
    ),
    "relations": (
        lambda: RelationalConv(3, 2, 2)(X, EDGES % 4, torch.zeros(2).long()),
        insum.BindingError,
        "edge_type has shape (2,)",
    ),
    "edges": (
        lambda: propagate(EDGES.T.contiguous(), X),
        insum.BindingError,
        "edge_index has shape (3, 2)",
    ),
    "floating edges": (
        lambda: propagate(EDGES.float(), X),
        insum.DtypeError,
        "edge_index holds float32",
    ),
    "weights": (
        lambda: propagate(EDGES % 4, X, torch.ones(2)),
        insum.BindingError,
        "edge_weight has shape (2,), but there are 3 edges",
    ),
    "aggregation": (
        lambda: propagate(EDGES % 4, X, aggr="median"),
        insum.UnsupportedError,
        "there is no aggregation 'median'",
    ),
    "aggregation of a layer": (
        lambda: GraphConv(3, 2, aggr="median"),
        insum.UnsupportedError,
        "there is no aggregation 'median'",
    ),
    "aggregation of relations": (
        lambda: RelationalConv(3, 2, 2, aggr="max"),
        insum.UnsupportedError,
        "there is no aggregation 'max' over relations",
    ),
    "edges elsewhere": (
        lambda: GraphConv(3, 2)(X, EDGES.to("meta")),
        insum.DeviceError,
        "edge_index is on meta but x is on cpu",
    ),
    "GCN elsewhere": (
        lambda: GCNConv(3, 2)(X, EDGES.to("meta")),
        insum.DeviceError,
        "edge_index is on meta but x is on cpu",
    ),
    "no edges": (
        lambda: GraphConv(3, 2)(X, None),
        insum.DtypeError,
        "edge_index is None",
    ),
    "edges of a list": (
        lambda: GCNConv(3, 2, normalize=False)(X, [[0], [1]]),
        insum.DtypeError,
        "edge_index is a list",
    ),
    "edges of a product, a number": (
        lambda: TensorProductConv("0e", "0e", "0e", [(0, 0, 0, "uvu", False)])(
            torch.ones(4, 1), torch.ones(3, 1), torch.tensor(1)
        ),
        insum.BindingError,
        "edge_index has shape ()",
    ),
    "no sources, of a size that waits": (
        lambda: GraphConv(-1, 2)((None, X), EDGES % 4),
        insum.DtypeError,
        "x is None",
    ),
    "matrix and weights": (
        lambda: propagate(A, torch.ones(3, 2), torch.ones(3)),
        insum.BindingError,
        "edge_weight was passed beside a matrix",
    ),
    "matrix": (
        lambda: propagate(A, X),
        insum.BindingError,
        "the adjacency matrix has shape (3, 3), but x has 4 rows",
    ),
    "node features": (
        lambda: GraphConv(5, 2)(X, EDGES % 4),
        insum.BindingError,
        "x has shape (4, 3)\n  expected: 5 in the last dimension: in_channels",
    ),
    # irreps
    "irreps": (
        lambda: Irreps.of("16x0e + 16x1z"),
        insum.StatementError,
        "' 16x1z' is not an irrep\n    16x0e + 16x1z\n           ^^^^^^",
    ),
    "empty term": (lambda: Irreps.of("0e + "), insum.StatementError, "' ' is not an irrep"),
    "irreps of a layer": (
        lambda: FullyConnectedTensorProduct("2x0e", "1q", "0e"),
        insum.StatementError,
        "'1q' is not an irrep",
    ),
    "irreps of another kind": (
        lambda: Irreps.of(3.5),
        insum.StatementError,
        "'3.5' is not an irrep",
    ),
    # tensor products
    "coupling": (
        lambda: TensorProduct("0e", "1o", "2e", [(0, 0, 0, "uvw", True)]),
        insum.BindingError,
        "instruction 0, (0, 0, 0, 'uvw', True): 0e and 1o do not couple to 2e\n"
        "  expected: one of 1o",
    ),
    "mode": (
        lambda: TensorProduct("0e", "0e", "0e", [(0, 0, 0, "vuw", True)]),
        insum.UnsupportedError,
        "there is no mode 'vuw'",
    ),
    "term": (
        lambda: TensorProduct("0e", "0e", "0e", [(0, 1, 0, "uvw", True)]),
        insum.BindingError,
        "i_in2 is 1",
    ),
    "parts": (
        lambda: TensorProduct("0e", "0e", "0e", [(0, 0, 0)]),
        insum.BindingError,
        "has 3 parts",
    ),
    "multiplicities": (
        lambda: TensorProduct("2x0e", "0e", "3x0e", [(0, 0, 0, "uvu", True)]),
        insum.BindingError,
        "u is 2, but 3 in the output",
    ),
    "uvuv": (
        lambda: TensorProduct("2x0e", "2x0e", "3x0e", [(0, 0, 0, "uvuv", True)]),
        insum.BindingError,
        "the output has multiplicity 3",
    ),
    "no weights": (
        lambda: TensorProduct("0e", "0e", "0e", [(0, 0, 0, "uvw", False)]),
        insum.UnsupportedError,
        "uvw without weights",
    ),
    "normalisation": (
        lambda: product(irrep_normalization="unit"),
        insum.UnsupportedError,
        "irrep_normalization is 'unit'",
    ),
    "a negative variance": (
        lambda: TensorProduct("0e", "0e", "0e", [], in2_var=[-1.0]),
        insum.DtypeError,
        "in2_var[0] is -1.0",
    ),
    "a negative path weight": (
        lambda: TensorProduct("0e", "0e", "0e", [(0, 0, 0, "uvw", True, -1.0)]),
        insum.DtypeError,
        "path_weight is -1.0",
    ),
    "a path weight that is no number": (
        lambda: TensorProduct("0e", "0e", "0e", [(0, 0, 0, "uvw", True, float("nan"))]),
        insum.DtypeError,
        "path_weight is nan",
    ),
    "variances": (
        lambda: TensorProduct("0e", "0e", "0e", [], in1_var=[1.0, 2.0]),
        insum.BindingError,
        "in1_var has 2 value(s)",
    ),
    "layout": (
        lambda: product(layout="other"),
        insum.UnsupportedError,
        "there is no layout 'other'",
    ),
    "own weights": (
        lambda: product(shared_weights=False, internal_weights=True),
        insum.BindingError,
        "internal weights that are not shared",
    ),
    "size of x": (
        lambda: product()(torch.ones(2, 7), torch.ones(2, 4)),
        insum.BindingError,
        "8 in the last dimension: irreps_in1 2x0e+2x1o",
    ),
    "size of y": (
        lambda: product()(torch.ones(2, 8), torch.ones(2, 3)),
        insum.BindingError,
        "4 in the last dimension: irreps_in2 1x0e+1x1o",
    ),
    "weight": (
        lambda: product()(torch.ones(2, 8), torch.ones(2, 4), torch.ones(2, 8)),
        insum.BindingError,
        "weight has shape (2, 8)\n  expected: (8,)",
    ),
    "weight of items": (
        lambda: product(shared_weights=False)(torch.ones(2, 8), torch.ones(2, 4), torch.ones(2, 3)),
        insum.BindingError,
        "expected: (..., 8)",
    ),
    "missing weight": (
        lambda: product(shared_weights=False)(torch.ones(2, 8), torch.ones(2, 4)),
        insum.BindingError,
        "has no weights of its own",
    ),
    "product elsewhere": (
        lambda: product()(torch.ones(2, 8, device="meta"), torch.ones(2, 4)),
        insum.DeviceError,
        "module is on cpu but x is on meta",
    ),
    "wigner": (lambda: wigner_3j(1, 1, 3), insum.BindingError, "degrees 1, 1, 3 do not couple"),
    "harmonics": (
        lambda: spherical_harmonics(2, torch.ones(4)),
        insum.BindingError,
        "vectors has shape (4,)",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_message(name: str) -> None:
    call, kind, text = CASES[name]
    with pytest.raises(kind) as caught:
        call()
    assert text in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_scripting_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), GraphConv(3, 2))
    with pytest.raises(insum.UnsupportedError, match="TorchScript cannot compile GraphConv"):
        torch.jit.script(model)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_tracing_is_refused() -> None:
    layer = BlockSparseLinear.from_dense(torch.nn.Linear(8, 8), block_shape=(4, 4), density=0.5)
    for model, given in (
        (layer, (torch.ones(3, 8),)),
        (GraphConv(4, 2), (torch.ones(3, 4), EDGES)),
    ):
        with pytest.raises(insum.UnsupportedError, match=r"torch\.jit\.trace cannot record this"):
            torch.jit.trace(model, given)


def test_a_failed_call_leaves_the_layer_usable() -> None:
    layer = GraphConv(3, 2)
    with pytest.raises(insum.IndexRangeError):
        layer(X, EDGES)
    good: Tensor = layer(X, EDGES % 4)
    assert good.isfinite().all()


@pytest.mark.parametrize(
    "call",
    [
        lambda: GCNConv(3, 2)(X, EDGES, torch.ones(3)),
        lambda: RelationalConv(3, 2, 2)(X, EDGES, torch.zeros(3).long()),
    ],
    ids=["GCN", "relational"],
)
def test_edges_under_autocast(call: Callable[[], object]) -> None:
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(insum.IndexRangeError, match=r"edge_index\[0, 2\] is 5, but there are 4"),
    ):
        call()
