"""COO: one coordinate per dimension and entry."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from insum import facts
from insum.formats import entries as E
from insum.formats import layout
from insum.formats.base import SparseFormat

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, eq=False, repr=False)
class COO(SparseFormat):
    """``values[p]`` at ``indices[0][p], indices[1][p], ...``, sorted by dimension 0, then 1 and so
    on, every coordinate once.

    Spells ``A[m,k]`` as ``AV[p]`` at ``AM[p], AK[p]``. Takes no options.

    Args:
        values: One for each entry; ``None`` in a pattern.
        indices: For each dimension the coordinate of every entry.
        shape: The shape of the tensor.
        validate: Look at the arrays; what insum itself made needs no look.

    Examples:
        >>> import torch
        >>> a = COO.from_dense(torch.tensor([[0.0, 1.0], [2.0, 3.0]]))
        >>> a
        COO(shape=(2, 2), float32, nnz=3, padding=0.0%, 36 bytes, cpu)
        >>> a.indices[1]
        tensor([1, 0, 1], dtype=torch.int32)
    """

    values: Tensor | None
    indices: tuple[Tensor, ...]
    shape: tuple[int, ...]
    validate: InitVar[bool] = True
    _arrays: ClassVar[tuple[str, ...]] = ("values", "indices")
    _static: ClassVar[tuple[str, ...]] = ("shape",)

    @property
    def layout(self) -> layout.Layout:
        return layout.listed(self.ndim)

    @property
    def sorted_dims(self) -> tuple[int, ...]:
        return tuple(range(self.ndim))

    @classmethod
    def _build(cls, source: E.Entries, **options: Any) -> Self:
        source = E.ordered(E.to_elements(source), tuple(range(len(source.shape))))
        made = cls._trusted(
            padded=False, values=source.values, indices=source.coords, shape=source.shape
        )
        if source.pointers is not None:  # CSR came with them
            facts.keep_pointers(made.indices[0], source.shape[0], source.pointers)
        return made

    def _permuted(self, dims: tuple[int, ...]) -> Self:
        source = self.entries()
        turned = E.Entries(
            tuple(source.coords[d] for d in dims), source.values, tuple(self.shape[d] for d in dims)
        )
        return self._build(turned)
