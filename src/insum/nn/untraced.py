"""What depends on the values of coordinates, called in the middle of a graph that torch.compile
records: the graph ends before it and another one begins behind it. Where there has to be one graph,
torch's error has the reason that stands here.

Imported while torch traces, and not before: the decorator loads the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

_MAP = (
    "a layer builds the kernel map of voxels when it first meets them, and its size depends on "
    "their coordinates. Call the layer once on this SparseTensor before it is compiled with "
    "fullgraph=True, or compile without fullgraph"
)
_VOXELS = (
    "the coordinates of a SparseTensor are looked at when it is made. Make it outside of the "
    "function that is compiled with fullgraph=True or exported, and pass features to its "
    "with_features; or compile without fullgraph"
)


@torch.compiler.disable(reason=_MAP)  # type: ignore[untyped-decorator,no-untyped-call]
def built(make: Callable[..., T], *arguments: object) -> T:
    """A kernel map."""
    return make(*arguments)


@torch.compiler.disable(reason=_VOXELS)  # type: ignore[untyped-decorator,no-untyped-call]
def looked_at(make: Callable[..., T], *arguments: object) -> T:
    """A set of voxels."""
    return make(*arguments)
