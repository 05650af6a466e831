"""Blocks of other packages' models whose layers have been replaced, with less between them.

What a block does around its layers is little work in many calls, and each has gradients: slices of
everything, of which each is filled with zeros and copied on the way back, and factors, which layers
can take in.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from insum.compat.calls import is_plain_call

#: By name in NequIP's data.
FEATURES, ATTRIBUTES, POSITIONS, KINDS = "node_features", "node_attrs", "pos", "atom_types"
EDGES, EDGE_ATTRIBUTES, EDGE_EMBEDDING = "edge_index", "edge_attrs", "edge_embedding"
LAMMPS = "lmp_mliap_data"
#: What a block of NequIP has inside, and what its ``forward`` speaks of: another than this one
#: computes something else.
PARTS = {"linear_1", "avg_num_neighbors_norm", "ghost_exchange", "tp_scatter", "edge_mlp"}
PARTS |= {"linear_2", "sc"}
SPOKEN_OF = PARTS | {"AtomicDataDict", "LMP_MLIAP_DATA_KEY", "_get_mliap_num_local", "num_nodes"}
SPOKEN_OF |= {"NODE_FEATURES_KEY", "NODE_ATTRS_KEY", "EDGE_ATTRS_KEY", "EDGE_EMBEDDING_KEY"}
SPOKEN_OF |= {"EDGE_INDEX_KEY", "is_first_layer"}


def is_nequip_block(block: nn.Module) -> bool:
    """Whether a block is NequIP's, as it is known here, and nothing more."""
    kind = type(block)
    if kind.__name__ != "InteractionBlock" or not kind.__module__.startswith("nequip."):
        return False
    code = getattr(kind.forward, "__code__", None)
    inside = {name for name, _ in block.named_children()}
    return code is not None and {*code.co_names} == SPOKEN_OF and PARTS - {"sc"} <= inside <= PARTS


class Interaction(nn.Module):
    """NequIP's ``InteractionBlock`` with the same layers by the same names. Rows are cut off only
    where there are more than wanted, and one factor for all neighbours is one of edges' weights.
    """

    linear_1: nn.Module
    linear_2: nn.Module
    tp_scatter: nn.Module
    edge_mlp: Any
    avg_num_neighbors_norm: Any
    ghost_exchange: nn.Module

    def __init__(self, old: Any) -> None:
        super().__init__()
        for name, part in old.named_children():
            self.add_module(name, part)
        if old.sc is None:
            self.sc = None
        self.use_sc, self.is_first_layer = old.use_sc, old.is_first_layer
        self.irreps_in, self.irreps_out = old.irreps_in, old.irreps_out
        self._read: tuple[Any, int, float] = None, 0, 1.0
        self.train(old.training)

    def forward(self, data: dict[str, Any]) -> dict[str, Any]:
        nodes = data[LAMMPS].nlocal if LAMMPS in data else _count(data)
        x = data[FEATURES] if self.is_first_layer else first_rows(data[FEATURES], nodes)
        skipped = None
        if self.sc is not None:
            given = data[ATTRIBUTES]
            skipped = self.sc(x, given if self.is_first_layer else first_rows(given, nodes))
        data[FEATURES] = self.linear_1(x)
        weights = self._weights(data)
        if not self.is_first_layer:
            data = self.ghost_exchange(data, ghost_included=False)
        ends = data[EDGES]
        found = self.tp_scatter(
            x=data[FEATURES],
            edge_attr=data[EDGE_ATTRIBUTES],
            edge_weight=weights,
            edge_dst=ends[0],
            edge_src=ends[1],
        )
        x = self.linear_2(first_rows(found, nodes))
        data[FEATURES] = x if skipped is None else x + skipped
        return data

    def _weights(self, data: dict[str, Any]) -> Tensor:
        """Of edges. What features are multiplied with is in them, or in the features."""
        norm, embedding = self.avg_num_neighbors_norm, data[EDGE_EMBEDDING]
        held: Any = norm.norm_const
        if is_plain_call((held, data[FEATURES])):
            rows, there = data[FEATURES].shape[0], data.get(norm.norm_key)
            if there is not None and there.shape[0] == rows:  # of a block before
                held = there._base
            elif norm.norm_shortcut:
                data[norm.norm_key] = held.expand(rows, -1)  # where others find it
            if held is not None and held.numel() == 1 and not held.requires_grad:
                return self.edge_mlp.times(embedding, self._number(held))  # type: ignore[no-any-return]
        norm(data)
        return self.edge_mlp(embedding)  # type: ignore[no-any-return]

    def _number(self, held: Tensor) -> float:
        """It is read again where it has changed."""
        before, version, number = self._read
        if before is not held or version != held._version:
            number = float(held)
            self._read = held, held._version, number
        return number


def _count(data: dict[str, Any]) -> int:
    rows: Tensor = data[POSITIONS] if POSITIONS in data else data[KINDS]
    return rows.shape[0]


def first_rows(x: Tensor, count: int) -> Tensor:
    """``x[:count]``, and the tensor itself where that is all of it."""
    return x if x.shape[0] <= count else x[:count]
