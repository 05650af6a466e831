"""`SemiStructuredLinear`: a linear layer with two of every four weights, which sparse tensor cores
multiply where torch has them.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from insum.accepted import (
    ELEMENTS,
    FLAG,
    HELD_FLOATS,
    NARROW_FLOATS,
    SIZE,
    TENSOR,
    Accepted,
    explains,
    takes,
)
from insum.api import insum
from insum.compat.calls import is_plain_call
from insum.errors import BindingError, FormatError, InsumError
from insum.lang.types import promoted, widened
from insum.memory import remembered
from insum.nn.checks import last_size, one_device, one_dtype
from insum.nn.linear import LINEAR, parts_of_linear
from insum.nn.prune import WEIGHTS

if TYPE_CHECKING:
    from typing_extensions import Self

#: Of how many neighbours in a row how many are kept.
GROUP, KEPT = 4, 2
#: What torch multiplies on sparse tensor cores: rows and columns of a weight, dtypes, and the first
#: and last generation that its kernels were written for.
ROWS, COLUMNS, DTYPES, MAJORS = 32, 64, (torch.float16, torch.bfloat16), (8, 9)


TRAINED = Accepted(HELD_FLOATS.expected, lambda v: HELD_FLOATS.fits(v) and ELEMENTS.fits(v))


@takes(weight=WEIGHTS)
def semi_structured_mask(weight: Tensor) -> Tensor:
    """True at the two largest of every four neighbouring weights in a row.

    Args:
        weight: A matrix whose rows are multiples of four long.

    Returns:
        A mask of the same shape, half of it True.

    Raises:
        BindingError: It is no matrix, or its rows are no multiples of four.

    Examples:
        >>> semi_structured_mask(torch.tensor([[1.0, -4.0, 3.0, 0.5]]))
        tensor([[False,  True,  True, False]])
    """
    return _largest(weight)


def _largest(weight: Tensor) -> Tensor:
    groups = _grouped(weight.detach().to(widened(weight.dtype))).abs()
    mask = torch.zeros_like(groups, dtype=torch.bool)
    return mask.scatter(2, groups.topk(KEPT, dim=2).indices, True).reshape(weight.shape)


def _refused(layer: SemiStructuredLinear, x: Tensor) -> None:
    """What torch refuses, the product as a statement refuses in words of ours."""
    one_dtype(layer, x)
    insum("Y[i,o] = X[i,k] * W[o,k]", X=x.reshape(-1, layer.in_features), W=layer.weight)


class SemiStructuredLinear(nn.Module):
    """A linear layer that keeps two of every four neighbouring weights in a row, the 2:4 pattern of
    sparse tensor cores.

    What is kept is held in five eighths of the memory of a dense layer in half precision. Where no
    gradient is asked for, on a GPU with sparse tensor cores and in half precision, torch multiplies
    with them; the packed weight is made at the first such call, and anew when values have changed.
    Products of some thousand rows gain by it, on an H200 1.3 to 1.4 times; of few rows they lose.
    Else the weight is written out, ``W[o,C[o,q]] = V[o,q]``, and the product is a dense one: no
    kernel gains on it with half of all weights. The values are trained, the pattern stays.

    Args:
        in_features: How long a row of the input is, a multiple of four.
        out_features: How long a row of the result is.
        bias: Whether there is a bias.

    Raises:
        BindingError: ``in_features`` is no multiple of four.

    Examples:
        >>> layer = SemiStructuredLinear.from_dense(nn.Linear(64, 32))
        >>> layer(torch.randn(5, 64)).shape
        torch.Size([5, 32])
        >>> int((layer.weight != 0).sum())
        1024
        >>> {name: tuple(held.shape) for name, held in layer.state_dict().items()}
        {'values': (32, 32), 'bias': (32,), 'places': (32, 16)}
    """

    places: Tensor

    @takes(in_features=SIZE, out_features=SIZE, bias=FLAG)
    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        drawn = nn.Linear(in_features, out_features, bias=bias)
        # a weight on the meta device has no numbers yet: the pattern is loaded with them
        self._take(drawn.weight.detach(), drawn.bias, _largest(drawn.weight))

    @classmethod
    @takes(layer=TRAINED | LINEAR, mask=ELEMENTS.optional)
    def from_dense(cls, layer: nn.Linear | Tensor, mask: Tensor | None = None) -> Self:
        """From a linear layer (or its weight), keeping what ``mask`` says, or the two largest of
        every four weights.

        Args:
            layer: A `torch.nn.Linear`, or its weight.
            mask: True at no more than two of every four neighbours in a row.

        Returns:
            The layer.

        Raises:
            FormatError: The mask keeps more, or has another shape.

        Examples:
            >>> dense = nn.Linear(8, 4)
            >>> sparse, x = SemiStructuredLinear.from_dense(dense), torch.randn(3, 8)
            >>> masked = dense.weight * semi_structured_mask(dense.weight)
            >>> torch.allclose(sparse(x), nn.functional.linear(x, masked, dense.bias))
            True
        """
        weight, bias = parts_of_linear(layer)
        one_device(weight=weight, mask=mask)
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._take(weight, bias, _checked(weight, mask))
        return made

    def _take(self, weight: Tensor, bias: Tensor | None, mask: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        # those that are kept come first, in their order; where there is one or none, zeros fill up
        order = _grouped(mask).to(torch.int8).argsort(dim=2, descending=True, stable=True)
        place = order[..., :KEPT].sort(2).values
        wide = weight.to(widened(weight.dtype))
        kept = _grouped(torch.where(mask, wide, 0)).gather(2, place)
        self.values = nn.Parameter(kept.flatten(1).to(weight.dtype))
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())
        self.register_buffer("places", (place[..., 0] + GROUP * place[..., 1]).to(torch.uint8))
        self._packed: tuple[object, Tensor | None] | None = None
        self.register_load_state_dict_pre_hook(_look_at_places)  # type: ignore[no-untyped-call]

    @property
    def weight(self) -> Tensor:
        """The weight written out, (out_features, in_features), with the gradient of the values;
        in float32 where they have 8 bits.
        """
        columns = remembered(self.places, "columns", lambda: _columns(self.places))
        return insum(
            "W[o,C[o,q]] = V[o,q]",
            C=columns,
            V=self.values,
            out_shape=(self.out_features, self.in_features),
        )

    def to_dense(self) -> nn.Linear:
        """The same map as a dense layer, zeros where nothing is kept."""
        dense = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        dense.weight = nn.Parameter(self.weight.detach())
        if self.bias is not None:
            dense.bias = nn.Parameter(self.bias.detach().clone().to(dense.weight.dtype))
        return dense

    @explains(also=_refused, x=TENSOR)
    def forward(self, x: Tensor) -> Tensor:
        last_size("x", x, self.in_features, "in_features")
        one_device(x=x, values=self.values)
        packed = self.packed() if self._fits(x) else None
        weight = self.weight if packed is None else packed
        if not NARROW_FLOATS & {x.dtype, self.values.dtype}:
            return nn.functional.linear(x, weight, self.bias)
        common = widened(promoted(x.dtype, self.values.dtype))  # torch multiplies them with none
        bias = None if self.bias is None else self.bias.to(common)
        return nn.functional.linear(x.to(common), weight.to(common), bias)

    def _fits(self, x: Tensor) -> bool:
        """Whether a call can run on sparse tensor cores."""
        asks = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *self.parameters()))
        return (
            x.is_cuda
            and not asks
            and x.dtype == self.values.dtype
            and x.dtype in DTYPES
            and not (self.out_features % ROWS or self.in_features % COLUMNS)
            and is_plain_call((x, self.values))
        )

    def packed(self) -> Tensor | None:
        """The weight as torch's sparse tensor cores take it; None where torch has none here."""
        values = self.values
        if values.is_inference():
            return None
        key = values._version, self.places._version, values.data_ptr(), values.dtype, values.device
        if self._packed is None or self._packed[0] != key:
            self._packed = key, _pack(self.weight.detach())
        return self._packed[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}"
        )


def _grouped(weight: Tensor) -> Tensor:
    """(rows, groups, 4)."""
    if weight.dim() != 2 or weight.shape[1] % GROUP:
        raise BindingError(
            f"the weight has shape {tuple(weight.shape)}",
            expected=f"a matrix whose rows are multiples of {GROUP} long",
        )
    return weight.reshape(weight.shape[0], weight.shape[1] // GROUP, GROUP)


def _checked(weight: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return semi_structured_mask(weight)
    if mask.shape != weight.shape:
        raise FormatError(
            f"the mask has shape {tuple(mask.shape)}", expected=f"{tuple(weight.shape)}"
        )
    most = _grouped(mask != 0).sum(2)
    if most.numel() and int(most.max()) > KEPT:
        row, group = (most > KEPT).nonzero()[0].tolist()
        raise FormatError(
            f"the mask keeps {int(most[row, group])} of the four weights of row {row} from column "
            f"{GROUP * group} on",
            expected=f"at most {KEPT}",
            remedy="insum.nn.semi_structured_mask(weight)",
        )
    return mask != 0


def _columns(places: Tensor) -> Tensor:
    """The column of each value."""
    first = torch.arange(places.shape[1], dtype=torch.int32, device=places.device) * GROUP
    both = [first + places % GROUP, first + places // GROUP]
    return torch.stack(both, 2).flatten(1).to(torch.int32)


def _look_at_places(
    layer: SemiStructuredLinear, state: dict[str, Any], prefix: str, *more: object
) -> None:
    """What is loaded says two different places of each four weights."""
    given = state.get(f"{prefix}places")
    if given is None:
        return
    if (given.dtype, given.shape) != (torch.uint8, layer.places.shape):
        raise FormatError(
            f"the saved {prefix}places holds {given.dtype} of shape {tuple(given.shape)}",
            expected=f"torch.uint8 of shape {tuple(layer.places.shape)}",
        )
    if given.is_meta:
        return
    first, second = given % GROUP, given // GROUP
    if bool(((first >= second) | (second >= GROUP)).any()):
        raise FormatError(
            f"the saved {prefix}places holds what are no two places of four",
            expected="first + 4 * second, first < second < 4",
        )


def _pack(weight: Tensor) -> Tensor | None:
    """Where this device has no sparse tensor cores, or torch no kernels for them, nothing."""
    if torch.cuda.get_device_capability(weight.device)[0] not in range(MAJORS[0], MAJORS[1] + 1):
        return None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*prototype", UserWarning)
            return torch.sparse.to_sparse_semi_structured(weight)
    except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
        if isinstance(error, InsumError | torch.OutOfMemoryError):
            raise
        return None
