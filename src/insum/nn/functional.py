"""Products with sparse matrices, and aggregation over the edges of a graph, as functions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from insum.accepted import (
    ANY_TENSOR,
    COUNT,
    ELEMENTS,
    TENSOR,
    TEXT,
    VALUES,
    explains,
    require,
    takes,
)
from insum.api import insum, sum_onto
from insum.errors import BindingError, FormatError, UnsupportedError
from insum.formats import COO, GroupCOO, SparseFormat
from insum.formats.base import FORMAT
from insum.formats.einsum import einsum
from insum.formats.operands import SPARSE_LAYOUTS, StatementOwner
from insum.nn.checks import EDGES, PAIR, one_device
from insum.nn.edges import (
    check_edges,
    check_range,
    degrees,
    edge_weights,
    endpoints,
    no_weight,
)
from insum.nn.shares import is_inexact, shares_of

#: Names of aggregations, PyG's and ours.
_REDUCTIONS = {"sum": "sum", "add": "sum", "mean": "mean", "max": "max", "min": "min"}

#: What reaches each node along weighted edges.
WEIGHED = "Out[dst[e],f] = W[e] * X[src[e],f]"


@explains(A=FORMAT | ANY_TENSOR, B=TENSOR)
def spmm(A: SparseFormat | Tensor, B: Tensor) -> Tensor:
    """Sparse times dense: ``insum.einsum("C[m,n] = A[m,k] * B[k,n]", A=A, B=B)``.

    ``A`` is a matrix in any format (a `torch.sparse` tensor is converted first, at every call);
    ``B`` is a vector, a matrix, or a matrix with leading batch dimensions.

    Args:
        A: A matrix in any format, or of `torch.sparse`.
        B: (columns,), or (..., columns, n).

    Returns:
        (rows,), or (..., rows, n).

    Examples:
        >>> A = GroupCOO.from_dense(torch.tensor([[0.0, 2.0], [1.0, 0.0]]))
        >>> spmm(A, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([[6., 8.],
                [1., 2.]])
    """
    A = _matrix(A)
    one_device(A=A, B=B)
    if B.dim() == 0 or B.shape[-2 if B.dim() > 1 else -1] != A.shape[1]:
        raise BindingError(
            f"A has shape {A.shape} but B {tuple(B.shape)}",
            expected=f"B of shape ({A.shape[1]},) or (..., {A.shape[1]}, columns)",
        )
    if B.dim() <= 2:
        return _tensor(
            einsum("C[m] = A[m,k] * B[k]" if B.dim() == 1 else "C[m,n] = A[m,k] * B[k,n]", A=A, B=B)
        )
    batch = B.reshape(math.prod(B.shape[:-2]), *B.shape[-2:])
    return _tensor(einsum("C[b,m,n] = A[m,k] * B[b,k,n]", A=A, B=batch)).reshape(
        *B.shape[:-2], A.shape[0], B.shape[-1]
    )


@explains(A=FORMAT | ANY_TENSOR, X=TENSOR, Y=TENSOR)
def sddmm(A: SparseFormat | Tensor, X: Tensor, Y: Tensor) -> SparseFormat:
    """Sampled dense times dense, ``A * (X @ Y)`` where ``A`` has entries: ``insum.einsum("S[m,n] =
    A[m,n] * X[m,k] * Y[k,n]", A=A, X=X, Y=Y)``.

    The result has the pattern of ``A``; ``sddmm(A.pattern(), X, Y)`` leaves the values of ``A``
    out.

    Args:
        A: A matrix in any format, or of `torch.sparse`.
        X: (rows, k).
        Y: (k, columns).

    Returns:
        A matrix in the format of ``A``.

    Examples:
        >>> A = GroupCOO.from_dense(torch.tensor([[0.0, 2.0], [1.0, 0.0]]))
        >>> sddmm(A, torch.eye(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]])).to_dense()
        tensor([[0., 4.],
                [3., 0.]])
    """
    A = _matrix(A)
    one_device(A=A, X=X, Y=Y)
    if (
        X.dim() != 2
        or Y.dim() != 2
        or (X.shape[0], X.shape[1], Y.shape[1]) != (A.shape[0], Y.shape[0], A.shape[1])
    ):
        fact = f"A has shape {A.shape}, X {tuple(X.shape)} and Y {tuple(Y.shape)}"
        raise BindingError(fact, expected=f"X of shape ({A.shape[0]}, k) and Y (k, {A.shape[1]})")
    result = einsum("S[m,n] = A[m,n] * X[m,k] * Y[k,n]", A=A, X=X, Y=Y)
    assert isinstance(result, SparseFormat)
    return result


@explains(
    edge_index=EDGES["edge_index"],
    edge_weight=EDGES["edge_weight"],
    x=TENSOR,
    aggr=TEXT,
    num_nodes=COUNT.optional,
)
def propagate(
    edge_index: Tensor | SparseFormat | StatementOwner,
    x: Tensor,
    edge_weight: Tensor | None = None,
    aggr: str = "sum",
    num_nodes: int | None = None,
) -> Tensor:
    """What reaches each node along its edges, ``insum.insum("Out[dst[e],f] = W[e] * X[src[e],f]",
    ...)``, as PyG's `propagate`.

    Args:
        edge_index: (2, edges), sources then targets; or the transposed adjacency matrix
            ``A[target, source]`` in any format, or as PyG's ``adj_t``, a sparse tensor of torch
            (which is converted at every call): its values are the weights. A matrix whose rows
            are on several ranks (`insum.distributed`) takes and gives this rank's rows.
        x: Features of the source nodes, one row for each.
        edge_weight: (edges,), or ``None`` for 1.
        aggr: ``"sum"`` (or ``"add"``), ``"mean"`` (the sum divided by the number of edges),
            ``"max"`` or ``"min"``; a node without edges gets 0.
        num_nodes: How many target nodes there are, where it is not the number of rows of ``x``.

    Returns:
        Features of the target nodes, one row for each.

    Examples:
        >>> edge_index = torch.tensor([[0, 1, 2], [1, 2, 2]])
        >>> x = torch.tensor([[1.0], [2.0], [3.0]])
        >>> propagate(edge_index, x)
        tensor([[0.],
                [1.],
                [5.]])
        >>> propagate(edge_index, x, edge_weight=torch.tensor([2.0, 1.0, 1.0]), aggr="max")
        tensor([[0.],
                [2.],
                [3.]])
    """
    return aggregated(edge_index, x, edge_weight, aggr, num_nodes)


def aggregated(
    edge_index: Tensor | SparseFormat | StatementOwner,
    x: Tensor,
    edge_weight: Tensor | None = None,
    aggr: str = "sum",
    num_nodes: int | None = None,
    base: Tensor | None = None,
) -> Tensor:
    """`propagate` for layers, which explain their arguments themselves; plus a ``base``."""
    if aggr not in _REDUCTIONS:
        raise UnsupportedError(
            f"there is no aggregation {aggr!r}",
            expected='"sum" (or "add"), "mean", "max" or "min"',
        )
    if x.dim() == 0:
        raise BindingError("x has no dimensions", expected="one row for each source node")
    rows = x if x.dim() == 2 else x.reshape(x.shape[0], math.prod(x.shape[1:]))
    if isinstance(edge_index, Tensor) and edge_index.layout in SPARSE_LAYOUTS:
        edge_index = COO.from_torch(edge_index)  # PyG's adj_t
    if isinstance(edge_index, Tensor):
        nodes = x.shape[0] if num_nodes is None else num_nodes
        own = base if x.dim() == 2 else None
        out = _over_edges(edge_index, rows, edge_weight, _REDUCTIONS[aggr], nodes, own)
        base = None if x.dim() == 2 else base
    elif isinstance(edge_index, SparseFormat):
        _targets_of(edge_index, num_nodes)
        out = _over_matrix(edge_index, rows, edge_weight, _REDUCTIONS[aggr])
    else:
        require("edge_index", edge_index, EDGES["edge_index"])
        out = _over_ranks(edge_index, rows, edge_weight, _REDUCTIONS[aggr])
    out = out if x.dim() == 2 else out.reshape(out.shape[0], *x.shape[1:])
    return out if base is None else out + base


@takes(edge_index=ELEMENTS, edge_weight=VALUES.optional, num_nodes=COUNT | PAIR)
def adjacency(
    edge_index: Tensor, edge_weight: Tensor | None = None, *, num_nodes: int | tuple[int, int]
) -> GroupCOO:
    """The matrix ``A[target, source]`` for `propagate` and the graph layers, sorted by target;
    edges listed twice count twice.

    Build it once: it has everything that a fast kernel wants to know of the graph, also under
    `torch.compile`.

    Args:
        edge_index: (2, edges), sources then targets.
        edge_weight: (edges,), or ``None`` for 1.
        num_nodes: The number of nodes, or (sources, targets) of a bipartite graph.

    Returns:
        A matrix (targets, sources).

    Examples:
        >>> adjacency(torch.tensor([[0, 1, 1], [1, 0, 2]]), num_nodes=3).to_dense()
        tensor([[0., 1., 0.],
                [1., 0., 0.],
                [0., 1., 0.]])
    """
    both = num_nodes if isinstance(num_nodes, tuple | list) else (num_nodes, num_nodes)
    sources, targets = map(int, both)
    one_device(edge_index=edge_index, edge_weight=edge_weight)
    check_edges(edge_index)
    check_range("edge_index", edge_index, (sources, targets), "nodes")
    src, dst = endpoints(edge_index, sources, targets)
    weight = (
        torch.ones(src.shape[0], device=src.device)
        if edge_weight is None
        else edge_weights(edge_weight, src.shape[0])
    )
    return GroupCOO.from_entries((dst, src), weight, (targets, sources), validate=False)


# --- one statement each ---


def _over_edges(
    edge_index: Tensor,
    x: Tensor,
    weight: Tensor | None,
    reduction: str,
    nodes: int,
    base: Tensor | None,
) -> Tensor:
    one_device(edge_index=edge_index, x=x, edge_weight=weight)
    src, dst = endpoints(edge_index, x.shape[0], nodes)
    if weight is not None and reduction == "sum":
        return over_ends(src, dst, edge_weights(weight, src.shape[0]), x, nodes, base)
    tensors: dict[str, Any] = {"dst": dst, "src": src, "X": x}
    message = "X[src[e],f]"
    if weight is not None:
        tensors["W"], message = edge_weights(weight, src.shape[0]), f"W[e] * {message}"
    if reduction in ("max", "min"):
        statement = f"Out[dst[e],f] {reduction}= {message}"
        extreme = insum(statement, out_shape=(nodes, x.shape[1]), **tensors)
        out = torch.where(degrees(edge_index, dst, nodes)[:, None] > 0, extreme, 0)
        return out if base is None else out + base
    operator = "mean=" if reduction == "mean" else "="
    statement = f"Out[dst[e],f] {operator} {message}"
    out_shape = nodes, x.shape[1]
    if base is None:
        return insum(statement, out_shape=out_shape, **tensors)
    return sum_onto(base, statement, out_shape=out_shape, **tensors)


def over_ends(
    src: Tensor,
    dst: Tensor,
    weight: Tensor,
    x: Tensor,
    nodes: int,
    base: Tensor | None = None,
) -> Tensor:
    """The weighted sum of what reaches each of so many nodes, along edges between these ends; plus
    a ``base``.
    """
    if x.dim() != 2:  # views are recorded for autograd, each for a pass through the host
        rows = x.reshape(x.shape[0], math.prod(x.shape[1:]))
        out = over_ends(src, dst, weight, rows, nodes).reshape(nodes, *x.shape[1:])
        return out if base is None else out + base
    tensors: dict[str, Any] = {"dst": dst, "src": src, "X": x, "W": weight}
    out_shape = nodes, x.shape[1]
    if base is None:
        return insum(WEIGHED, out_shape=out_shape, **tensors)
    return sum_onto(base, WEIGHED, out_shape=out_shape, **tensors)


def _over_ranks(A: StatementOwner, x: Tensor, weight: Tensor | None, reduction: str) -> Tensor:
    """Over a matrix that has the rows of this rank, and says which those are."""
    no_weight(weight)
    operator = f"{reduction}=" if reduction in ("max", "min") else "="
    out = _tensor(einsum(f"Out[i,f] {operator} A[i,j] * X[j,f]", A=A, X=x))
    if reduction == "sum":
        return out
    degree = A.degrees()[:, None]
    if reduction == "mean":
        return out * shares_of(degree, out.dtype)
    return torch.where(degree > 0, out, 0)


def _targets_of(A: SparseFormat, nodes: int | None) -> None:
    """A matrix has a row for each target, where it is known how many there are."""
    if nodes is not None and A.ndim == 2 and A.shape[0] != nodes:
        raise BindingError(
            f"the adjacency matrix has shape {A.shape}, but there are {nodes} targets",
            expected=f"({nodes}, sources)",
        )


def _over_matrix(A: SparseFormat, x: Tensor, weight: Tensor | None, reduction: str) -> Tensor:
    no_weight(weight)
    if A.ndim != 2 or A.shape[1] != x.shape[0]:
        raise BindingError(
            f"the adjacency matrix has shape {A.shape}, but x has {x.shape[0]} rows",
            expected=f"(targets, {x.shape[0]})",
        )
    one_device(A=A, x=x)
    if reduction == "sum":
        return _tensor(einsum("Out[i,f] = A[i,j] * X[j,f]", A=A, X=x))
    degree = _tensor(einsum("D[i] = P[i,j]", P=A.pattern()))
    if reduction == "mean":
        return _tensor(
            einsum(
                "Out[i,f] = R[i] * A[i,j] * X[j,f]",
                R=shares_of(degree, x.dtype if is_inexact(x.dtype) else A.dtype or x.dtype),
                A=A,
                X=x,
            )
        )
    extreme = _tensor(einsum(f"Out[i,f] {reduction}= A[i,j] * X[j,f]", A=A, X=x))
    return torch.where(degree[:, None] > 0, extreme, 0)


def _matrix(A: SparseFormat | Tensor) -> SparseFormat:
    made = A if isinstance(A, SparseFormat) else GroupCOO.from_torch(A)
    if made.ndim != 2:
        raise FormatError(
            f"A has {made.ndim} dimension(s)",
            expected="a matrix",
            remedy="insum.einsum takes sparse tensors of any rank",
        )
    return made


def _tensor(result: object) -> Tensor:
    assert isinstance(result, Tensor)
    return result
