"""Layers with the habits of the libraries that they stand beside, each of them one statement.

- `SparseLinear`, `BlockSparseLinear`, beside `torch.nn.Linear` and `torch.sparse` BSR:
  ``Y[i,o] = W[o,k] * X[i,k]``
- `spmm`, `sddmm`, beside cuSPARSE:
  ``C[m,n] = A[m,k] * B[k,n]``, ``S[m,n] = A[m,n] * X[m,k] * Y[k,n]``
- `propagate`, `GraphConv`, `GCNConv`, beside PyG:
  ``Out[dst[e],f] = W[e] * X[src[e],f]``
- `edge_softmax`, `graph_attention`, `GATConv`, beside PyG:
  ``Out[dst[e],h,c] = P[e,h] * X[src[e],h,c]``
- `RelationalConv`, beside PyG's `RGCNConv`:
  ``Out[dst[p],m] = N[p] * In[src[p],c] * W[rel[p],c,m]``
- `SparseConv3d`, beside spconv, TorchSparse and MinkowskiEngine:
  ``Out[x,m] = Map[z,x,y] * In[y,c] * W[z,c,m]``
- `TensorProduct`, `FullyConnectedTensorProduct`, beside e3nn:
  ``Z[b,I[p,q],w] = V[p,q] * X[b,J[p,q],u] * Y[b,K[p,q]] * W[b,L[p],u,w]``

>>> import torch
>>> from insum.nn import GraphConv
>>> GraphConv(3, 4)(torch.randn(5, 3), torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
torch.Size([5, 4])
"""

from insum.nn.attention import GATConv, edge_softmax, graph_attention
from insum.nn.conv import SparseConv3d
from insum.nn.edges import gcn_norm
from insum.nn.functional import adjacency, propagate, sddmm, spmm
from insum.nn.graph import GCNConv, GraphConv, RelationalConv
from insum.nn.irreps import Irrep, Irreps
from insum.nn.linear import BlockSparseLinear, SparseLinear
from insum.nn.prune import block_mask, magnitude_mask
from insum.nn.tensor_product import FullyConnectedTensorProduct, TensorProduct
from insum.nn.voxels import SparseTensor, Voxels
from insum.nn.wigner import spherical_harmonics, wigner_3j

__all__ = [
    "BlockSparseLinear",
    "FullyConnectedTensorProduct",
    "GATConv",
    "GCNConv",
    "GraphConv",
    "Irrep",
    "Irreps",
    "RelationalConv",
    "SparseConv3d",
    "SparseLinear",
    "SparseTensor",
    "TensorProduct",
    "Voxels",
    "adjacency",
    "block_mask",
    "edge_softmax",
    "gcn_norm",
    "graph_attention",
    "magnitude_mask",
    "propagate",
    "sddmm",
    "spherical_harmonics",
    "spmm",
    "wigner_3j",
]
