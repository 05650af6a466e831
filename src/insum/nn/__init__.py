"""Layers with the habits of the libraries that they stand beside, each of them one statement.

- `SparseLinear`, `BlockSparseLinear`, beside `torch.nn.Linear` and `torch.sparse` BSR:
  ``Y[i,o] = W[o,k] * X[i,k]``
- `spmm`, `sddmm`, beside cuSPARSE:
  ``C[m,n] = A[m,k] * B[k,n]``, ``S[m,n] = A[m,n] * X[m,k] * Y[k,n]``
- `propagate`, `GraphConv`, `GCNConv`, beside PyG:
  ``Out[dst[e],f] = W[e] * X[src[e],f]``
- `RelationalConv`, beside PyG's `RGCNConv`:
  ``Out[dst[p],m] = N[p] * In[src[p],c] * W[rel[p],c,m]``
- `SparseConv3d`, beside spconv, TorchSparse and MinkowskiEngine:
  ``Out[x,m] = Map[z,x,y] * In[y,c] * W[z,c,m]``
- `TensorProduct`, `FullyConnectedTensorProduct`, beside e3nn:
  ``Z[b,I[p,q],w] = V[p,q] * X[b,J[p,q],u] * Y[b,K[p,q]] * W[b,L[p],u,w]``
- `TensorProductConv`, beside OpenEquivariance and cuEquivariance:
  ``Z[dst[e],I[p],u] = V[p] * X[src[e],J[p],u] * Y[e,K[p]] * W[e,L[p],u]``

>>> import torch
>>> from insum.nn import GraphConv
>>> GraphConv(3, 4)(torch.randn(5, 3), torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
torch.Size([5, 4])
"""

from insum.nn.conv import SparseConv3d
from insum.nn.edges import gcn_norm
from insum.nn.functional import adjacency, propagate, sddmm, spmm
from insum.nn.graph import GCNConv, GraphConv, RelationalConv
from insum.nn.irreps import Irrep, Irreps
from insum.nn.irreps_linear import Linear
from insum.nn.linear import BlockSparseLinear, SparseLinear
from insum.nn.prune import block_mask, magnitude_mask
from insum.nn.swapping import from_e3nn, swap
from insum.nn.symmetric_contraction import SymmetricContraction
from insum.nn.tensor_product import (
    ElementwiseTensorProduct,
    FullTensorProduct,
    FullyConnectedTensorProduct,
    TensorProduct,
)
from insum.nn.tensor_product_conv import TensorProductConv
from insum.nn.voxels import SparseTensor, Voxels
from insum.nn.wigner import spherical_harmonics, wigner_3j

__all__ = [
    "BlockSparseLinear",
    "ElementwiseTensorProduct",
    "FullTensorProduct",
    "FullyConnectedTensorProduct",
    "GCNConv",
    "GraphConv",
    "Irrep",
    "Irreps",
    "Linear",
    "RelationalConv",
    "SparseConv3d",
    "SparseLinear",
    "SparseTensor",
    "SymmetricContraction",
    "TensorProduct",
    "TensorProductConv",
    "Voxels",
    "adjacency",
    "block_mask",
    "from_e3nn",
    "gcn_norm",
    "magnitude_mask",
    "propagate",
    "sddmm",
    "spherical_harmonics",
    "spmm",
    "swap",
    "wigner_3j",
]
