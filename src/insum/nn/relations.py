"""Edges of several relations: their shares, and on GPUs groups of each relation, kept with them."""

from __future__ import annotations

import torch
from torch import Tensor

from insum.api import insum
from insum.compat.calls import is_eager_call
from insum.errors import BindingError, InsumError
from insum.memory import remembered
from insum.nn.checks import integers
from insum.nn.edges import check_range, endpoints, plain
from insum.nn.shares import counted_in
from insum.plan.sizes import power_of_two
from insum.runtime.handwritten import grouping
from insum.runtime.record import out_of_range


def listed(
    edge_index: Tensor, edge_type: Tensor, nodes: int, count: int, *, mean: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Sources, targets and shares of the edges as they come; shares are kept with them, but for
    tracers and transforms.
    """
    src, dst = endpoints(edge_index, nodes, nodes)

    def make() -> Tensor:
        return _shares(dst, edge_type, nodes, count, mean, dtype)

    if not is_eager_call((edge_index, edge_type)):
        return src, dst, make()
    check_range("edge_type", edge_type, (count,), "relations")
    key = "shares", nodes, count, mean, dtype
    return src, dst, remembered(edge_type, key, make, edge_index)


def check_relations(edge_index: Tensor, edge_type: Tensor) -> None:
    if tuple(edge_type.shape) != (edge_index.shape[1],):
        raise BindingError(
            f"edge_type has shape {tuple(edge_type.shape)}",
            expected=f"({edge_index.shape[1]},), one relation for each edge",
        )
    integers("edge_type", edge_type)


#: Edges in a group on a GPU: the rows of one matrix product.
GROUP = 64


def groups(
    edge_index: Tensor, edge_type: Tensor, nodes: int, count: int, *, mean: bool, dtype: torch.dtype
) -> grouping.Grouped:
    """The same on a GPU: grouped without waiting, and kept with the edges."""

    def explain(offence: int, edge: int, value: int) -> InsumError:
        if offence == grouping.RELATION:
            return out_of_range(f"edge_type[{edge}]", value, count, "relations")
        return out_of_range(f"edge_index[{offence}, {edge}]", value, nodes, "nodes")

    def make() -> grouping.Grouped:
        edges, relation = plain(edge_index), plain(edge_type)
        counts = grouping.counted(edges, relation, nodes, count, explain)
        src, dst = endpoints(edge_index, nodes, nodes)
        shares = _shares(dst, relation, nodes, count, mean, dtype)
        size = min(GROUP, power_of_two(src.shape[0] // max(1, count)))
        return grouping.grouped(edges, relation, shares, counts, nodes, size)

    return remembered(edge_type, ("groups", nodes, count, mean, dtype), make, edge_index)


def _shares(
    dst: Tensor, edge_type: Tensor, nodes: int, count: int, mean: bool, dtype: torch.dtype
) -> Tensor:
    """1, or 1 over the number of edges with the same target and relation."""
    if not mean:
        return torch.ones(dst.shape[0], dtype=dtype, device=dst.device)
    one = torch.ones(dst.shape[0], dtype=counted_in(dtype), device=dst.device)
    total = insum(
        "D[dst[e],rel[e]] = one[e]", dst=dst, rel=edge_type, one=one, out_shape=(nodes, count)
    )
    shares = insum("S[e] = reciprocal(D[dst[e],rel[e]])", D=total, dst=dst, rel=edge_type)
    return shares.to(dtype)
