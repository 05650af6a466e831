"""Layers with the habits of the libraries that they stand beside, each of them one statement.

- `SparseLinear`, `BlockSparseLinear`, beside `torch.nn.Linear` and `torch.sparse` BSR:
  ``Y[i,o] = W[o,k] * X[i,k]``
- `SemiStructuredLinear`, two of every four weights, beside torch's semi-structured tensors:
  ``W[o,C[o,q]] = V[o,q]``
- `sparsify`, `layouts`, `restore`: whole models made sparse, and made ready for a saved state
- `spmm`, `sddmm`, beside cuSPARSE:
  ``C[m,n] = A[m,k] * B[k,n]``, ``S[m,n] = A[m,n] * X[m,k] * Y[k,n]``
- `propagate`, `GraphConv`, `SAGEConv`, `GCNConv`, beside PyG:
  ``Out[dst[e],f] = W[e] * X[src[e],f]``
- `edge_softmax`, `graph_attention`, `GATConv`, beside PyG:
  ``Out[dst[e],h,c] = P[e,h] * X[src[e],h,c]``
- `RelationalConv`, beside PyG's `RGCNConv`:
  ``Out[dst[p],m] = N[p] * In[src[p],c] * W[rel[p],c,m]``
- `SparseConv1d` to `SparseConv4d`, beside spconv, TorchSparse and MinkowskiEngine:
  ``Out[x,m] = Map[z,x,y] * In[y,c] * W[z,c,m]``
- `SparseMaxPool3d`, `SparseAvgPool3d` and those of other dimensions, `GlobalPool`:
  ``Out[x,c] max= In[Nb[z,x],c]``, ``Out[b[x],c] = In[x,c]``
- `voxelize`, `devoxelize`, from points to voxels and back:
  ``Out[v[p],c] = In[p,c]``, ``Out[p,c] = Share[k,p] * In[Nb[k,p],c]``
- `TensorProduct`, `FullyConnectedTensorProduct`, beside e3nn:
  ``Z[b,I[p,q],w] = V[p,q] * X[b,J[p,q],u] * Y[b,K[p,q]] * W[b,L[p],u,w]``
- `TensorProductConv`, beside OpenEquivariance and cuEquivariance:
  ``Z[dst[e],I[p],u] = V[p] * X[src[e],J[p],u] * Y[e,K[p]] * W[e,L[p],u]``
- `SphericalHarmonics`, `FullyConnectedNet`, `Gate`, `BesselBasis`, beside e3nn and MACE:
  ``Y[e,I[p]] = V[p] * U[e,A[p]] * U[e,B[p]] * U[e,C[p]]``, ``Z[b,u,i] = silu(G[b,u]) * X[b,u,i]``

Examples:
    >>> import torch
    >>> from insum.nn import GraphConv
    >>> GraphConv(3, 4)(torch.randn(5, 3), torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
    torch.Size([5, 4])
"""

from torch.nn import Module as _Module

from insum.nn.activations import FullyConnectedNet, Gate
from insum.nn.attention import GATConv, edge_softmax, graph_attention
from insum.nn.checks import refuse_scripting as _refuse_scripting
from insum.nn.clouds import devoxelize, voxelize
from insum.nn.collating import batch, cat, collate
from insum.nn.conv import SparseConv1d, SparseConv2d, SparseConv3d, SparseConv4d
from insum.nn.edges import gcn_norm
from insum.nn.functional import adjacency, propagate, sddmm, spmm
from insum.nn.graph import GCNConv, GraphConv, RelationalConv, SAGEConv
from insum.nn.harmonics import SphericalHarmonics, spherical_harmonics
from insum.nn.irreps import Irrep, Irreps
from insum.nn.irreps_linear import Linear
from insum.nn.linear import BlockSparseLinear, SparseLinear
from insum.nn.modules import SparseModule, SparseSequential
from insum.nn.pool import (
    GlobalPool,
    SparseAvgPool1d,
    SparseAvgPool2d,
    SparseAvgPool3d,
    SparseAvgPool4d,
    SparseMaxPool1d,
    SparseMaxPool2d,
    SparseMaxPool3d,
    SparseMaxPool4d,
)
from insum.nn.prune import block_mask, magnitude_mask
from insum.nn.radial import BesselBasis
from insum.nn.semi_structured import SemiStructuredLinear, semi_structured_mask
from insum.nn.sparse_tensor import SparseTensor
from insum.nn.sparsify import LayerReport, SparsityReport, layouts, restore, sparsify
from insum.nn.swapping import from_e3nn, swap
from insum.nn.symmetric_contraction import SymmetricContraction
from insum.nn.tensor_product import (
    ElementwiseTensorProduct,
    FullTensorProduct,
    FullyConnectedTensorProduct,
    TensorProduct,
)
from insum.nn.tensor_product_conv import TensorProductConv
from insum.nn.voxels import Voxels
from insum.nn.weights import load_minkowski, load_spconv, load_torchsparse
from insum.nn.wigner import wigner_3j

__all__ = [
    "BesselBasis",
    "BlockSparseLinear",
    "ElementwiseTensorProduct",
    "FullTensorProduct",
    "FullyConnectedNet",
    "FullyConnectedTensorProduct",
    "GATConv",
    "GCNConv",
    "Gate",
    "GlobalPool",
    "GraphConv",
    "Irrep",
    "Irreps",
    "LayerReport",
    "Linear",
    "RelationalConv",
    "SAGEConv",
    "SemiStructuredLinear",
    "SparseAvgPool1d",
    "SparseAvgPool2d",
    "SparseAvgPool3d",
    "SparseAvgPool4d",
    "SparseConv1d",
    "SparseConv2d",
    "SparseConv3d",
    "SparseConv4d",
    "SparseLinear",
    "SparseMaxPool1d",
    "SparseMaxPool2d",
    "SparseMaxPool3d",
    "SparseMaxPool4d",
    "SparseModule",
    "SparseSequential",
    "SparseTensor",
    "SparsityReport",
    "SphericalHarmonics",
    "SymmetricContraction",
    "TensorProduct",
    "TensorProductConv",
    "Voxels",
    "adjacency",
    "batch",
    "block_mask",
    "cat",
    "collate",
    "devoxelize",
    "edge_softmax",
    "from_e3nn",
    "gcn_norm",
    "graph_attention",
    "layouts",
    "load_minkowski",
    "load_spconv",
    "load_torchsparse",
    "magnitude_mask",
    "propagate",
    "restore",
    "sddmm",
    "semi_structured_mask",
    "sparsify",
    "spherical_harmonics",
    "spmm",
    "swap",
    "voxelize",
    "wigner_3j",
]

for _layer in [globals()[_name] for _name in __all__]:
    if isinstance(_layer, type) and issubclass(_layer, _Module):
        _layer.__prepare_scriptable__ = _refuse_scripting  # type: ignore[attr-defined]
