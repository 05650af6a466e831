"""Buffers that several statements on the same tensors share."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from insum.lang.bind import Value


@dataclass(frozen=True, slots=True, eq=False)
class FilledBuffer:
    """A buffer, and what it was filled from: tensors by weak references, for those that were not
    kept are gone, and others may be where they were.
    """

    buffer: Tensor
    sources: tuple[Any, ...]

    def is_from(self, values: Iterable[Value]) -> bool:
        found = (one() if isinstance(one, weakref.ref) else one for one in self.sources)
        return all(one is value for one, value in zip(found, values, strict=True))


#: Buffers of several statements on the same tensors, by what fills them, and from which tensors.
FilledBuffers: TypeAlias = dict[tuple[object, ...], FilledBuffer]
