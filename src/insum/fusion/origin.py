"""Where an index tensor that a graph computes comes from: a pure function of integer tensors that are passed to the graph.

While those are the same and unchanged from call to call, so is the index tensor; what was found out about it once stays true.
"""

from __future__ import annotations

import hashlib
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

aten, prims = torch.ops.aten, torch.ops.prims

#: Operations whose result depends on nothing but their arguments, to the last bit and in its order (sorting, for one, may break ties either way).
_PURE = {
    *(aten.index.Tensor, aten.index_select.default, aten.select.int, aten.slice.Tensor, aten.unbind.int, operator.getitem, aten.nonzero.default),
    *(aten.cat.default, aten.stack.default, aten.arange.default, aten.arange.start, aten.arange.start_step, prims.iota.default, aten.full.default),
    *(aten.eq.Scalar, aten.eq.Tensor, aten.ne.Scalar, aten.ne.Tensor, aten.lt.Scalar, aten.lt.Tensor, aten.le.Scalar, aten.le.Tensor),
    *(aten.gt.Scalar, aten.gt.Tensor, aten.ge.Scalar, aten.ge.Tensor, aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_not.default),
    *(aten.logical_and.default, aten.logical_or.default, aten.logical_not.default, aten.where.self, aten.masked_select.default),
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar, aten.flip.default, aten.repeat.default),
    *(aten.view.default, aten.reshape.default, aten.expand.default, aten.permute.default, aten.unsqueeze.default, aten.squeeze.default),
    *(aten.squeeze.dim, aten.squeeze.dims, aten.clone.default, aten.alias.default, aten._to_copy.default, prims.convert_element_type.default),
    *(aten.sym_size.int, operator.add, operator.sub, operator.mul),
}
_MOST_SOURCES = 4
_MOST_NODES = 64


@dataclass(frozen=True, slots=True)
class Origin:
    """A function, by a digest of its text, and what it is applied to."""

    text: str
    sources: tuple[Node, ...]
    sizes: tuple[Node, ...]


def origin_of(node: Node) -> Origin | None:
    """The origin of a computed index tensor, or None where it depends on more than a few integer tensors and sizes."""
    sources: dict[Node, str] = {}
    sizes: dict[Node, str] = {}
    names: dict[Node, str] = {}
    lines: list[str] = []

    def told(one: Node) -> str | None:
        if one in names:
            return names[one]
        if one.op == "placeholder":
            return _placeholder(one, sources, sizes)
        if one.op != "call_function" or one.target not in _PURE or len(lines) >= _MOST_NODES:
            return None
        parts = [told(n) for n in one.all_input_nodes]
        if any(part is None for part in parts):
            return None
        known = dict(zip(one.all_input_nodes, parts))
        lines.append(f"{one.target}{_text(one.args, known)}{_text(dict(one.kwargs), known)}")
        names[one] = f"%{len(lines)}"
        return names[one]

    if node.op == "placeholder" or told(node) is None or not 0 < len(sources) <= _MOST_SOURCES:
        return None
    return Origin(hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16], tuple(sources), tuple(sizes))


def is_unknown(node: Node, captured: bool) -> bool:
    """Whether nothing can be known of an index tensor before it is used: it is computed anew, or will be there when a CUDA graph is replayed."""
    return captured or node.op != "placeholder" and origin_of(node) is None


def _placeholder(node: Node, sources: dict[Node, str], sizes: dict[Node, str]) -> str | None:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        is_integer = not (value.dtype.is_floating_point or value.dtype.is_complex)
        return sources.setdefault(node, f"source{len(sources)}") if is_integer else None
    return sizes.setdefault(node, f"size{len(sizes)}") if isinstance(value, int | torch.SymInt) else None


def _text(argument: Any, known: dict[Node, Any]) -> str:
    match argument:
        case Node():
            return str(known[argument])
        case list() | tuple():
            return f"({','.join(_text(a, known) for a in argument)})"
        case dict():
            return f"({','.join(f'{k}={_text(v, known)}' for k, v in argument.items())})"
    return repr(argument)
