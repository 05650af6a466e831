"""Views: the node below, and where it is read. They only change indices, and so does a conversion
that loses nothing, or that rounds what was computed on the way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from insum.fusion.shapes import Stop, broadcast, shape_of, through_view, value_of
from insum.lang.expr import Affine, accesses, affine

aten, prims = torch.ops.aten, torch.ops.prims
Indices: TypeAlias = tuple[Affine, ...]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INDICES = (torch.int64, torch.int32, torch.int16, torch.int8)


def _identity(node: Node, at: Indices) -> tuple[Node, Indices]:
    return input_of(node), at


def input_of(node: Node, place: int = 0) -> Node:
    found = node.args[place]
    if not isinstance(found, Node):
        raise Stop(f"{node.name} has an argument that is no tensor")
    return found


def reshaped(node: Node, at: Indices) -> tuple[Node, Indices]:
    source = input_of(node)
    return source, through_view(at, shape_of(source), shape_of(node))


def _expand(node: Node, at: Indices) -> tuple[Node, Indices]:
    source = input_of(node)
    return source, broadcast(at, shape_of(source))


def _permute(node: Node, at: Indices) -> tuple[Node, Indices]:
    source = input_of(node)
    order = [int(d) % len(at) for d in node.args[1]]  # type: ignore[union-attr, arg-type]
    return source, tuple(at[order.index(d)] for d in range(len(at)))


def _transpose(node: Node, at: Indices) -> tuple[Node, Indices]:
    a, b = (int(d) % len(at) for d in node.args[1:3])  # type: ignore[arg-type]
    moved = list(at)
    moved[a], moved[b] = at[b], at[a]
    return input_of(node), tuple(moved)


def _matrix_transpose(node: Node, at: Indices) -> tuple[Node, Indices]:
    return input_of(node), at[::-1]


def _select(node: Node, at: Indices) -> tuple[Node, Indices]:
    return _selected(input_of(node), node.args[1], node.args[2], at)


def _unbound(node: Node, at: Indices) -> tuple[Node, Indices]:
    """One of the parts of ``unbind``."""
    parts = input_of(node)
    if parts.op != "call_function" or parts.target is not aten.unbind.int:
        raise Stop(f"{node.name} is one of several results")
    return _selected(input_of(parts), parts.args[1] if len(parts.args) > 1 else 0, node.args[1], at)


def _selected(source: Node, dim: Any, place: Any, at: Indices) -> tuple[Node, Indices]:
    shape = shape_of(source)
    if not isinstance(dim, int) or not isinstance(place, int):
        raise Stop("it selects at a place that is not a number")
    dim %= len(shape)
    size = shape[dim]
    if place < 0:
        if not isinstance(size, int):
            raise Stop("it selects from the end of a dimension whose size is not a number")
        place += size
    return source, (*at[:dim], Affine((), place), *at[dim:])


def _slice(node: Node, at: Indices) -> tuple[Node, Indices]:
    source = input_of(node)
    dim, start, _, step = (*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :])[:4]
    if not isinstance(dim, int) or not isinstance(start, int | None) or not isinstance(step, int):
        raise Stop("it is a slice by sizes that are not numbers")
    dim %= len(at)
    size = shape_of(source)[dim]
    start = start or 0
    if start < 0 or isinstance(size, int) and start > size or start and not isinstance(size, int):
        raise Stop("it is a slice whose start is not known")
    index = at[dim]
    if any(accesses(index)):
        raise Stop("it is a slice that is gathered from")
    moved = affine([(step * c, a) for c, a in index.terms], start + step * index.offset)
    return source, (*at[:dim], moved, *at[dim + 1 :])


def is_half(node: Node) -> bool:
    dtype = value_of(node).dtype
    return dtype.is_floating_point and dtype.itemsize == 2


def rounds(node: Node) -> bool:
    """Whether a node rounds what was computed in float32, as programs in half precision do after
    each function. Who fuses leaves that out, and so does Inductor.
    """
    return (
        VIEWS.get(node.target) is _converted
        and is_half(node)
        and value_of(input_of(node)).dtype == torch.float32
    )


def _converted(node: Node, at: Indices) -> tuple[Node, Indices]:
    """A conversion that loses nothing, or rounds what was computed; a condition is 0 or 1."""
    source = input_of(node)
    before, after = value_of(source).dtype, value_of(node).dtype
    if before == torch.bool and after in FLOATS:
        return source, at
    kinds = FLOATS if before in FLOATS else INDICES
    loses = before not in kinds or after not in kinds or torch.promote_types(before, after) != after
    if loses and not rounds(node):
        raise Stop(f"it converts {before} to {after}".replace("torch.", ""))
    if value_of(source).device != value_of(node).device:
        raise Stop("it moves to another device")
    return source, at


View: TypeAlias = Callable[[Node, Indices], tuple[Node, Indices]]
VIEWS: dict[Any, View] = {
    aten.alias.default: _identity,
    aten.clone.default: _identity,
    aten.detach.default: _identity,
    aten.contiguous.default: _identity,
    aten.view.default: reshaped,
    aten.reshape.default: reshaped,
    aten._unsafe_view.default: reshaped,
    aten.unsqueeze.default: reshaped,
    aten.squeeze.default: reshaped,
    aten.squeeze.dim: reshaped,
    aten.squeeze.dims: reshaped,
    aten.expand.default: _expand,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _matrix_transpose,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    operator.getitem: _unbound,
    aten._to_copy.default: _converted,
    prims.convert_element_type.default: _converted,
}
