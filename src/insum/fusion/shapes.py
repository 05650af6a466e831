"""Shapes of graph nodes: what is known of them without a guess, and how a view maps indices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Node

from insum.compat.sizes import known_true, size_or
from insum.lang.bind import Size
from insum.lang.expr import Access, Affine, Atom, accesses, affine

aten = torch.ops.aten
ZERO = Affine()


class Stop(Exception):
    """A node cannot be part of a statement; the text says why."""


def value_of(node: Node) -> Tensor:
    """The fake tensor that tracing left at a node."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        raise Stop(f"{node.name} is not a tensor whose shape is known")
    return value


def shape_of(node: Node) -> tuple[Size, ...]:
    return tuple(value_of(node).shape)


def same(a: Size, b: Size) -> bool:
    """Whether two sizes are equal whatever the symbols in them stand for. Installs no guard."""
    return a == b if isinstance(a, int) and isinstance(b, int) else known_true(a == b)


def alike(*nodes: Node) -> bool:
    """Whether nodes are tensors of one dtype and one shape."""
    values = [value for node in nodes if isinstance(value := node.meta.get("val"), Tensor)]
    first = values[0] if len(values) == len(nodes) else None
    return first is not None and all(
        v.dtype == first.dtype and v.dim() == first.dim() and all(map(same, v.shape, first.shape))
        for v in values
    )


def is_one(size: Size) -> bool:
    return isinstance(size, int) and size == 1


def points(shape: Sequence[Size]) -> int:
    """About how many elements, by the sizes that tracing saw."""
    return math.prod(size_or(s) for s in shape)


def is_contiguous(value: Tensor) -> bool:
    expected: Size = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride())):
        if not is_one(size) and not same(stride, expected):
            return False
        expected = expected * size
    return True


def broadcast(at: Sequence[Affine], shape: Sequence[Size]) -> tuple[Affine, ...]:
    """Indices of a broadcast result as indices of one operand: dimensions are aligned at the end,
    and those of size 1 are read at 0.
    """
    tail = at[len(at) - len(shape) :]
    return tuple(ZERO if is_one(size) else index for index, size in zip(tail, shape, strict=True))


def through_view(
    at: Sequence[Affine], before: Sequence[Size], after: Sequence[Size]
) -> tuple[Affine, ...]:
    """Indices of a view as indices of what it views. Dimensions may be split and those of size 1
    come and go; merging would need a division.
    """
    found: list[Affine] = []
    j = 0
    for size in before:
        while j < len(after) and is_one(after[j]) and not is_one(size):
            j += 1
        if is_one(size):
            if j < len(after) and is_one(after[j]):
                j += 1
            found.append(ZERO)
        elif j < len(after) and same(size, after[j]):
            found.append(at[j])
            j += 1
        else:
            end = _split_end(size, after, j)
            found.append(_joined(at[j:end], after[j:end]))
            j = end
    if any(not is_one(s) for s in after[j:]):
        raise Stop("a view merges dimensions")
    return tuple(found)


def merged_dims(before: Sequence[Size], after: Sequence[Size]) -> list[tuple[int, tuple[int, ...]]]:
    """For a view that only merges dimensions: which dimensions each one was made of, those of size
    1 left out.
    """
    kept = [d for d, size in enumerate(before) if not is_one(size)]
    found: list[tuple[int, tuple[int, ...]]] = []
    for j, size in enumerate(after):
        if is_one(size):
            continue
        group: list[int] = []
        total: Size = 1
        while kept and (not group or not same(total, size)):
            group.append(kept.pop(0))
            total = total * before[group[-1]]
        if not same(total, size):
            raise Stop("a view merges dimensions and splits others")
        found.append((j, tuple(group)))
    if kept:
        raise Stop("a view merges dimensions and splits others")
    return found


def _split_end(size: Size, after: Sequence[Size], start: int) -> int:
    """Where the dimensions end that one dimension was split into."""
    total: Size = 1
    for end in range(start, len(after)):
        total = total * after[end]
        if same(total, size):
            return end + 1
    raise Stop("a view merges dimensions")


def _joined(at: Sequence[Affine], sizes: Sequence[Size]) -> Affine:
    """Several indices as one: ``i * size_j + j``."""
    terms: list[tuple[int, Atom]] = []
    offset, scale = 0, 1
    for index, size in zip(reversed(at), reversed(sizes)):
        if any(isinstance(a, Access) for a in accesses(index)):
            raise Stop("a view splits a gathered dimension")
        terms += [(scale * c, a) for c, a in index.terms]
        offset += scale * index.offset
        if size is not sizes[0] and not isinstance(size, int):
            raise Stop("a view splits a dimension by a size that is not a number")
        scale *= size if isinstance(size, int) else 1
    return affine(terms[::-1], offset)


def is_zero(node: Node) -> bool:
    """Whether a node is zeros by construction."""
    if node.op != "call_function":
        return False
    if node.target is aten.scalar_tensor.default:
        return bool(node.args[0] == 0)
    if node.target in (aten.full.default, aten.full_like.default, aten.new_full.default):
        return bool(node.args[-1] == 0)
    return node.target in (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
