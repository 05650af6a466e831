"""Graphs whose nodes are on several ranks."""

from __future__ import annotations

import torch

from insum.distributed.partitioned import Partitioned
from insum.errors import BindingError
from insum.formats.einsum import einsum


def gcn_norm(A: Partitioned) -> Partitioned:
    """Weights ``w / sqrt(degree[target] * degree[source])``, as `insum.nn.gcn_norm` has them, for a
    graph ``A[target, source]`` on several ranks: what `insum.nn.GCNConv` takes.

    Loops are not added: `partition_edges` does, with ``self_loops=1.0``.

    Args:
        A: A square partition with values.

    Returns:
        The same partition with other values.

    Raises:
        BindingError: The matrix is not square, or a pattern.

    Examples:
        >>> import torch
        >>> from insum.distributed import partition
        >>> from insum.formats import COO
        >>> A = partition(COO.from_dense(torch.ones(2, 2)), mesh)
        >>> gcn_norm(A).own.values
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    if not isinstance(A, Partitioned) or A.shape[0] != A.shape[1] or not A.values:
        raise BindingError(
            f"A is {A!r}", expected="a square partition with values", remedy="partition_edges(...)"
        )
    degree = einsum("D[m] = A[m,k]", A=A)
    root = torch.where(degree > 0, degree, 1).rsqrt() * (degree > 0)
    found: Partitioned = einsum("N[m,k] = R[m] * A[m,k] * R[k]", A=A, R=root)
    return found
