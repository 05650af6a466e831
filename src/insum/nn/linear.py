"""`SparseLinear` and `BlockSparseLinear`: ``Y[i,o] = W[o,k] * X[i,k]`` with a sparse ``W`` that is
trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from insum.accepted import ELEMENTS, HELD_FLOATS, TENSOR, VALUES, Accepted, takes
from insum.errors import BindingError, FormatError
from insum.formats import BlockGroupCOO, GroupCOO, SparseFormat, SparseParameter
from insum.formats.base import UNBROKEN
from insum.formats.entries import grid_of
from insum.formats.module import linear
from insum.formats.validate import block_shape as checked_block
from insum.nn.checks import last_size, layer_takes, one_device
from insum.nn.prune import block_mask, in_blocks, magnitude_mask, over_blocks

if TYPE_CHECKING:
    from typing_extensions import Self


WEIGHTS = Accepted(
    "a tensor of weights that insum computes with", lambda v: VALUES.fits(v) and ELEMENTS.fits(v)
)
LINEAR = Accepted(
    "an nn.Linear that holds one", lambda v: isinstance(v, nn.Linear) and WEIGHTS.fits(v.weight)
)


class SparseLinear(nn.Module):
    """A linear layer with a sparse weight in any format: ``insum.einsum("Y[i,o] = W[o,k] * X[i,k]",
    W=W, X=X) + bias``.

    The stored values are trained, the pattern stays. ``x`` may have any leading dimensions. The
    state dict holds tensors only: values, index arrays, bias, and what the format is, in bytes. A
    state with more or fewer entries can be loaded. Under autocast the result has the dtype that
    `torch.nn.Linear` gives.

    Args:
        weight: A matrix (out_features, in_features) in one of `insum.formats`.
        bias: A tensor (out_features,), or ``None``.

    Raises:
        FormatError: The weight is no sparse matrix with values.
        BindingError: The bias has another shape.

    Examples:
        >>> import torch
        >>> layer = SparseLinear.from_dense(nn.Linear(64, 32), density=0.1)
        >>> layer(torch.randn(2, 5, 64)).shape
        torch.Size([2, 5, 32])
        >>> layer.weight().nnz
        205
        >>> list(layer.state_dict())
        ['bias', 'weight.values', 'weight.group_indices_0', 'weight.slot_indices_0',
        'weight.encoding']
    """

    @takes(weight=UNBROKEN, bias=HELD_FLOATS.optional)
    def __init__(self, weight: SparseFormat, bias: Tensor | None = None) -> None:
        super().__init__()
        if not isinstance(weight, SparseFormat) or weight.ndim != 2 or weight.values is None:
            got = repr(weight) if isinstance(weight, SparseFormat) else type(weight).__name__
            expected = "a sparse matrix (out_features, in_features) with values"
            raise FormatError(
                f"weight is {got}", expected=expected, remedy="SparseLinear.from_dense(layer, mask)"
            )
        self.out_features, self.in_features = weight.shape
        if bias is not None and tuple(bias.shape) != (self.out_features,):
            raise BindingError(
                f"bias has shape {tuple(bias.shape)}", expected=f"({self.out_features},)"
            )
        one_device(weight=weight, bias=bias)
        self.weight = SparseParameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())

    @classmethod
    @takes(layer=WEIGHTS | LINEAR, mask=TENSOR.optional)
    def from_dense(
        cls,
        layer: nn.Linear | Tensor,
        mask: Tensor | None = None,
        *,
        density: float | None = None,
        **options: Any,
    ) -> Self:
        """From a linear layer (or its weight), keeping what ``mask`` says, or the largest weights
        up to ``density``; of a layer that is pruned already, all weights that are not zero.

        Args:
            layer: A `torch.nn.Linear`, or its weight.
            mask: True where a weight is kept. It is stored and trained even where it is zero.
            density: The share of weights that is kept, the largest ones.
            options: Those of `GroupCOO`.

        Raises:
            FormatError: Both of mask and density are given; or neither, and nothing is pruned.

        Examples:
            >>> import torch
            >>> dense = nn.Linear(3, 2, bias=False)
            >>> mask = torch.tensor([[True, False, True], [False, False, True]])
            >>> sparse, x = SparseLinear.from_dense(dense, mask), torch.randn(4, 3)
            >>> torch.allclose(sparse(x), x @ (dense.weight * mask).T)
            True
            >>> from torch.nn.utils import prune
            >>> pruned = prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.75)
            >>> SparseLinear.from_dense(pruned).weight().nnz
            16
        """
        weight, bias = parts_of_linear(layer)
        chosen = _chosen(
            mask,
            density,
            lambda share: magnitude_mask(weight, share),
            weight,
            tuple(weight.shape),
            pruned=weight != 0,
        )
        kept = chosen.nonzero(as_tuple=True)
        return cls(GroupCOO.from_entries(kept, weight[kept], tuple(weight.shape), **options), bias)

    def to_dense(self) -> nn.Linear:
        """The same map as a dense layer, zeros where nothing is stored."""
        dense = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        dense.weight = nn.Parameter(self.weight().to_dense().detach())
        if self.bias is not None:
            dense.bias = nn.Parameter(self.bias.detach().clone())
        return dense

    @layer_takes(x=TENSOR)
    def forward(self, x: Tensor) -> Tensor:
        last_size("x", x, self.in_features, "in_features")
        return linear(x, self.weight(), self.bias)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}"
        )


class BlockSparseLinear(SparseLinear):
    """A linear layer whose weight is made of dense blocks, which Tensor Cores multiply:
    ``Y[i,WO[p],bo] = WV[p,q,bo,bk] * X[i,WK[p,q],bk]``.

    Args:
        weight: A matrix (out_features, in_features) in a block format.
        bias: A tensor (out_features,), or ``None``.

    Examples:
        >>> import torch
        >>> dense = nn.Linear(128, 64)
        >>> layer = BlockSparseLinear.from_dense(dense, density=0.25, block_shape=(32, 32))
        >>> layer(torch.randn(8, 128)).shape
        torch.Size([8, 64])
        >>> layer.weight().block_shape, layer.weight().nnz
        ((32, 32), 2048)
    """

    @classmethod
    @takes(layer=WEIGHTS | LINEAR, mask=TENSOR.optional)
    def from_dense(
        cls,
        layer: nn.Linear | Tensor,
        mask: Tensor | None = None,
        *,
        density: float | None = None,
        block_shape: int | tuple[int, ...] = (32, 32),
        **options: Any,
    ) -> Self:
        """From a linear layer (or its weight), keeping the blocks that ``mask`` says, or those of
        largest norm up to ``density``; of a layer that is pruned already, all blocks that are not
        zero.

        Args:
            layer: A `torch.nn.Linear`, or its weight.
            mask: One element for each block. A mask of the weight's own shape is taken as well and
                keeps every block in which it keeps anything; weights outside it start at zero.
            density: The share of blocks that is kept, those of largest norm.
            block_shape: Rows and columns of a block, or one number for both.
            options: Those of `BlockGroupCOO`.

        Raises:
            FormatError: Both of mask and density are given; or neither, and no block is zero.

        Examples:
            >>> import torch
            >>> dense, mask = nn.Linear(4, 4), torch.tensor([[True, False], [False, True]])
            >>> sparse = BlockSparseLinear.from_dense(dense, mask, block_shape=2)
            >>> masked = dense.weight * torch.block_diag(torch.ones(2, 2), torch.ones(2, 2))
            >>> x = torch.randn(3, 4)
            >>> torch.allclose(sparse(x), nn.functional.linear(x, masked, dense.bias))
            True
        """
        weight, bias = parts_of_linear(layer)
        shape, block = tuple(weight.shape), checked_block(block_shape, 2)
        if mask is not None and tuple(mask.shape) == shape != grid_of(shape, block):
            one_device(weight=weight, mask=mask)
            kept = mask != 0
            weight, mask = weight.where(kept, 0), in_blocks(kept, block).any(3).any(1)
        chosen = _chosen(
            mask,
            density,
            lambda share: block_mask(weight, block, share),
            weight,
            grid_of(shape, block),
            pruned=in_blocks(weight != 0, block).any(3).any(1),
        )
        places = over_blocks(chosen, block, shape).nonzero(as_tuple=True)
        return cls(
            BlockGroupCOO.from_entries(places, weight[places], shape, block_shape=block, **options),
            bias,
        )


def parts_of_linear(layer: nn.Linear | Tensor) -> tuple[Tensor, Tensor | None]:
    weight, bias = (layer, None) if isinstance(layer, Tensor) else (layer.weight, layer.bias)
    if weight.dim() != 2:
        raise BindingError(
            f"the weight has shape {tuple(weight.shape)}",
            expected="a matrix (out_features, in_features)",
        )
    return weight.detach(), bias


def _chosen(
    mask: Tensor | None,
    density: float | None,
    rule: Callable[[float], Tensor],
    weight: Tensor,
    shape: tuple[int, ...],
    *,
    pruned: Tensor,
) -> Tensor:
    """The mask that was passed, the one that the pruning rule gives, or what is not zero."""
    if mask is not None and density is not None:
        raise FormatError("both of mask and density given", expected="one of them")
    if density is not None:
        return rule(density)
    if mask is None:
        if pruned.numel() and bool(pruned.all()):
            raise FormatError(
                "neither of mask and density given, and nothing in the weight is pruned",
                expected="a mask, a density, or a weight with zeros",
                remedy="density=0.1",
            )
        return pruned
    one_device(weight=weight, mask=mask)
    if tuple(mask.shape) != shape:
        also = (
            ""
            if shape == tuple(weight.shape)
            else f", one for each block, or {tuple(weight.shape)}"
        )
        raise FormatError(
            f"the mask has shape {tuple(mask.shape)}, but the weight {tuple(weight.shape)}",
            expected=f"{shape}{also}",
        )
    return mask != 0
