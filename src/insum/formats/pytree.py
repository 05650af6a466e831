"""Formats as pytree nodes: what makes torch.compile, export, tree_map and DDP see through them to
their dense tensors.

The only file that uses `torch.utils._pytree`, whose registration functions are what torch documents
for this purpose.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

import torch.utils._pytree as pytree

if TYPE_CHECKING:
    from insum.formats.base import SparseFormat

F = TypeVar("F", bound="type[SparseFormat]")


def register(cls: F) -> F:
    """Class decorator: the tensors are children, everything else is context. Unflattening never
    validates.
    """

    def flatten(x: SparseFormat) -> tuple[list[Any], tuple[Any, ...]]:
        names = cls._arrays[x.values is None :]  # a pattern has no values, not a leaf that is None
        return [getattr(x, name) for name in names], (
            names,
            *(getattr(x, name) for name in cls._static),
        )

    def flatten_with_keys(x: SparseFormat) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        children, context = flatten(x)
        return [
            (pytree.GetAttrKey(name), child) for name, child in zip(context[0], children)
        ], context

    def unflatten(children: Any, context: tuple[Any, ...]) -> SparseFormat:
        names, *static = context
        return cls._make(
            **{"values": None, **dict(zip(names, children)), **dict(zip(cls._static, static))}
        )

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=_stored_name(cls),
        to_dumpable_context=json.dumps,
        from_dumpable_context=lambda text: tuple(_as_tuples(json.loads(text))),
        flatten_with_keys_fn=flatten_with_keys,
    )
    return cls


def _stored_name(cls: type[SparseFormat]) -> str:
    """What exported programs call a class: formats of ours by a name that outlives moves."""
    ours = cls.__module__.startswith("insum.formats.")
    return f"{'insum.formats' if ours else cls.__module__}.{cls.__qualname__}"


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(v) for v in value) if isinstance(value, list) else value
