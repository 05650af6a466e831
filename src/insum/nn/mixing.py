"""Channels of irreps, mixed by matrices: one launch for all irreps, forward and for each gradient.

Between a term of the input and one of the output a path is the product

    Z[b,w,i] = X[b,u,i] * W[u,w]

or, where rows have factors, ``X[b,u,i] * Y[b,v] * W[u,v,w]``. A layer is the sum of paths: ``X``
and ``Z`` are columns of one tensor each, ``W`` is a part of one vector of weights. It is linear in
both, and its gradients are products of the same kind.

Where there is little to multiply, what takes time is to call a library for each path, with the
copies and sums around it. Beyond `MOST_WORK` multiplications its products are quicker.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from insum.call import prepared
from insum.compat.autograd import plain_apply, wanted_gradients
from insum.compat.calls import is_plain_call
from insum.compat.contexts import device_of, untracked
from insum.compat.many import any_batched, over_items
from insum.compat.streams import is_recorded
from insum.nn.irreps import Irreps
from insum.plan.sizes import power_of_two
from insum.runtime.handwritten import mixing as kernels
from insum.runtime.handwritten.kernel import on_device
from insum.runtime.handwritten.mixing import (
    BLOCK_FIELDS,
    PATH_FIELDS,
    TILE_FIELDS,
    ProductTables,
    WeightTables,
)
from insum.runtime.shelf import precision_on

#: Multiplications that one launch is for: about what a GPU does while a host makes the calls to a
#: library that it replaces.
MOST_WORK = 2**30
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Columns:
    """Where a term lies in a row: channels and components, and how far each are apart."""

    start: int
    channels: int
    components: int
    channel_stride: int
    component_stride: int


def columns_of(irreps: Irreps, layout: str = "mul_ir") -> tuple[Columns, ...]:
    """Where the terms of irreps lie in a row.

    >>> columns_of(Irreps.of("4x0e + 2x1o"))[1]
    Columns(start=4, channels=2, components=3, channel_stride=3, component_stride=1)
    """
    starts = itertools.accumulate(irreps.widths, initial=0)
    by_channel = layout == "mul_ir"
    return tuple(
        Columns(start, mul, ir.dim, *((ir.dim, 1) if by_channel else (1, mul)))
        for start, (mul, ir) in zip(starts, irreps)
    )


@dataclass(frozen=True)
class MixingPath:
    """A matrix between two terms: where it begins in the weights, how far its rows and columns are
    apart there, what it is multiplied with, and which column of factors.
    """

    source: int
    target: int
    start: int
    strides: tuple[int, int]
    scale: float
    factor: int = 0


@dataclass(frozen=True)
class ChannelMixing:
    """All paths of a layer; ``factored``: every row has factors, of which each path has one.

    Attributes:
        weights: how many there are in all.
        work: multiplications for each row.
        width: columns of the result.
    """

    sources: tuple[Columns, ...]
    targets: tuple[Columns, ...]
    paths: tuple[MixingPath, ...]
    weights: int
    factored: bool = False
    work: int = field(init=False, compare=False)
    width: int = field(init=False, compare=False)
    #: By device and whether of float64, made when they are asked for; and the way back.
    _tables: dict[Any, tuple[ProductTables, WeightTables]] = field(
        default_factory=dict, compare=False, repr=False
    )
    _back: list[ChannelMixing] = field(default_factory=list, compare=False, repr=False)

    def __post_init__(self) -> None:
        work = sum(a.channels * b.channels * b.components for _, a, b in self.ends())
        width = sum(one.channels * one.components for one in self.targets)
        self.__dict__.update(work=work, width=width)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": {}, "_back": []}  # devices are another process's

    @property
    def transposed(self) -> ChannelMixing:
        """From the result to what it is made of, with the same weights."""
        if not self._back:
            paths = [
                replace(p, source=p.target, target=p.source, strides=p.strides[::-1])
                for p in self.paths
            ]
            back = replace(
                self,
                sources=self.targets,
                targets=self.sources,
                paths=tuple(paths),
                _tables={},
                _back=[self],
            )
            self._back.append(back)
        return self._back[0]

    def ends(self) -> Iterator[tuple[MixingPath, Columns, Columns]]:
        """Every path, with where it begins and where it leads."""
        for path in self.paths:
            yield path, self.sources[path.source], self.targets[path.target]

    # --- a call ---

    def suits(self, x: Tensor, weight: Tensor, factors: Tensor | None = None) -> bool:
        """Whether one launch is the way to go: for kernels on this device, plain tensors of one
        dtype, and few multiplications.
        """
        dtype = x.dtype
        return (
            prepared.kernels_look_on(x.device)
            and is_plain_call((x, weight, factors))
            and dtype is weight.dtype
            and dtype in _DTYPES
            and 0 < x.shape[0] * self.work <= MOST_WORK
            and (factors is None or factors.dtype is dtype and not factors.requires_grad)
            and on_device(x)
            and (self._key(x) in self._tables or not is_recorded(x.device))
        )

    def __call__(self, x: Tensor, weight: Tensor, factors: Tensor | None = None) -> Tensor:
        """(rows, columns of the output), of rows, the vector of weights, and (rows, factors)."""
        # which nobody differentiates by: they may be others than were given
        return self.recorded(None if factors is None else _rows(factors), (x, weight))

    # --- the products that it and its gradients are, each linear in both of a pair ---

    def product(self, factors: Tensor | None, *pairs: tuple[Tensor, Tensor]) -> Tensor:
        """The sum of what several pairs of rows and weights give."""
        x = pairs[0][0]
        if not is_plain_call([tensor for pair in pairs for tensor in pair]):
            found = [_library_product(self, one, weight, factors) for one, weight in pairs]
            return found[0] if len(found) == 1 else found[0] + found[1]
        rows = [(_rows(one), _rows(weight)) for one, weight in pairs]
        with device_of(x):
            tables, precision = self.tables(x)[0], precision_on(x.device)
            return kernels.mixed(tables, rows, factors, self.width, precision)

    def between(self, factors: Tensor | None, x: Tensor, gradient: Tensor) -> Tensor:
        """The gradient by weights."""
        if not is_plain_call((x, gradient)):
            return _library_weights(self, x, gradient, factors)
        x, gradient = _rows(x), _rows(gradient)
        with device_of(x):
            tables, precision = self.tables(x)[1], precision_on(x.device)
            return kernels.weights_between(tables, x, gradient, factors, self.weights, precision)

    # the same as parts of a graph of autograd, for gradients of every order

    def recorded(self, factors: Tensor | None, *pairs: tuple[Tensor, Tensor]) -> Tensor:
        found: list[Tensor] = [_apply((self, factors), x, weight) for x, weight in pairs]
        return found[0] if len(found) == 1 else found[0] + found[1]

    def recorded_between(self, factors: Tensor | None, x: Tensor, gradient: Tensor) -> Tensor:
        found: Tensor = _apply_between((self, factors), x, gradient)
        return found

    def _key(self, x: Tensor) -> Any:
        return x.device, x.dtype == torch.float64

    def tables(self, x: Tensor) -> tuple[ProductTables, WeightTables]:
        """Of the product, and of its gradient by weights."""
        key = self._key(x)
        found = self._tables.get(key)
        if found is None:
            tiles = kernels.tiles_of(x.dtype)
            with untracked():
                found = self._tables[key] = (
                    _product_tables(self, tiles.columns, x.device),
                    _weight_tables(self, tiles.side, x.device),
                )
        return found


def _rows(x: Tensor) -> Tensor:
    """As kernels read them: with columns side by side, rows may be apart, and numbers as they are
    in memory.
    """
    return x if x.stride(-1) == 1 and not x.is_neg() else x.resolve_neg().contiguous()


#: A mixing, and the factors of rows.
Given: TypeAlias = tuple[ChannelMixing, Tensor | None]


class _Mixed(torch.autograd.Function):
    """``given``: the mixing, and factors."""

    @staticmethod
    def forward(ctx: Any, given: Given, x: Tensor, weight: Tensor) -> Tensor:
        ctx.mixing = given[0]
        ctx.save_for_backward(x, weight, given[1])
        return given[0].product(given[1], (x, weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if any_batched((gradient,)):
            return over_items(functools.partial(_Mixed.backward, ctx), (gradient,))
        x, weight, factors = ctx.saved_tensors
        wanted = wanted_gradients(ctx)[1:]
        given = ctx.mixing, factors
        recorded = torch.is_grad_enabled() and is_plain_call((gradient, x, weight))
        found = _apply_gradients if recorded else _gradients
        return None, *found(given, wanted, gradient, x, weight)


def _gradients(
    given: Given, wanted: Sequence[bool], gradient: Tensor, x: Tensor, weight: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    mixing, factors = given
    by_x = mixing.transposed.product(factors, (gradient, weight)) if wanted[0] else None
    return by_x, mixing.between(factors, x, gradient) if wanted[1] else None


class _MixedGradients(torch.autograd.Function):
    """The gradients by rows and by weights. Their own, along ``x_`` and ``w_``, are put together:
    what both send to the gradient of the result is one launch.
    """

    @staticmethod
    def forward(
        ctx: Any, given: Given, wanted: Sequence[bool], gradient: Tensor, x: Tensor, weight: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        ctx.mixing = given[0]
        ctx.save_for_backward(gradient, x, weight, given[1])
        ctx.set_materialize_grads(False)
        return _gradients(given, wanted, gradient, x, weight)

    @staticmethod
    def backward(ctx: Any, x_: Tensor | None, w_: Tensor | None) -> tuple[Any, ...]:
        if any_batched((x_, w_)):
            return over_items(functools.partial(_MixedGradients.backward, ctx), (x_, w_))
        gradient, x, weight, factors = ctx.saved_tensors
        mixing = ctx.mixing
        wanted = wanted_gradients(ctx)[2:]
        pairs = [p for p in ((x_, weight), (x, w_)) if p[0] is not None and p[1] is not None]
        along = [one for one in (x_, w_) if one is not None]
        product, back, between = mixing.product, mixing.transposed.product, mixing.between
        if torch.is_grad_enabled() and is_plain_call([gradient, *along]):
            product, back = mixing.recorded, mixing.transposed.recorded
            between = mixing.recorded_between
        return (
            None,
            None,
            product(factors, *pairs) if wanted[0] and pairs else None,
            back(factors, (gradient, w_)) if wanted[1] and w_ is not None else None,
            between(factors, x_, gradient) if wanted[2] and x_ is not None else None,
        )


class _Between(torch.autograd.Function):
    """A gradient by weights, by itself."""

    @staticmethod
    def forward(ctx: Any, given: Given, x: Tensor, gradient: Tensor) -> Tensor:
        ctx.mixing = given[0]
        ctx.save_for_backward(x, gradient, given[1])
        return given[0].between(given[1], x, gradient)

    @staticmethod
    def backward(ctx: Any, w_: Tensor) -> tuple[Any, ...]:
        if any_batched((w_,)):
            return over_items(functools.partial(_Between.backward, ctx), (w_,))
        x, gradient, factors = ctx.saved_tensors
        wanted = wanted_gradients(ctx)[1:]
        mixing = ctx.mixing
        product, back = mixing.product, mixing.transposed.product
        if torch.is_grad_enabled() and is_plain_call((x, gradient, w_)):
            product, back = mixing.recorded, mixing.transposed.recorded
        by_x = back(factors, (gradient, w_)) if wanted[0] else None
        return None, by_x, product(factors, (x, w_)) if wanted[1] else None


_apply, _apply_gradients = plain_apply(_Mixed), plain_apply(_MixedGradients)
_apply_between = plain_apply(_Between)


# --- tables ---------------------------------------------------------------------------------------


def _product_tables(mixing: ChannelMixing, most: int, device: torch.device) -> ProductTables:
    """Paths are numbered by their targets, so that each has its own behind each other."""
    widest = max((one.channels for one in mixing.targets), default=1)
    columns = min(most, max(16, power_of_two(widest)))
    rows: list[list[int]] = []
    paths: list[MixingPath] = []
    for number, target in enumerate(mixing.targets):
        own = [path for path in mixing.paths if path.target == number]
        span = [len(paths), len(paths) + len(own)]
        paths += own
        step = target.channel_stride
        for first in range(0, target.channels, columns):
            for component in range(target.components):
                at = target.start + component * target.component_stride + first * step
                rows.append(
                    [at, step, min(columns, target.channels - first), *span, component, first]
                )
    return ProductTables(
        _table(rows, BLOCK_FIELDS, device),
        _table([_read_by(mixing, path) for path in paths], PATH_FIELDS, device),
        _scales(paths, device),
        columns,
    )


def _read_by(mixing: ChannelMixing, path: MixingPath) -> list[int]:
    source = mixing.sources[path.source]
    at = [source.start, source.component_stride, source.channel_stride, source.channels]
    return [*at, path.start, *path.strides, path.factor]


def _weight_tables(mixing: ChannelMixing, most: int, device: torch.device) -> WeightTables:
    widest = max((max(a.channels, b.channels) for _, a, b in mixing.ends()), default=1)
    side = min(most, max(16, power_of_two(widest)))
    rows = []
    for number, (path, source, target) in enumerate(mixing.ends()):
        for u in range(0, source.channels, side):
            for w in range(0, target.channels, side):
                at = path.start + u * path.strides[0] + w * path.strides[1]
                left, right = _side(source, u, side), _side(target, w, side)
                own = [source.components, at, *path.strides, path.factor, number]
                rows.append([*left, *right, *own])
    return WeightTables(_table(rows, TILE_FIELDS, device), _scales(mixing.paths, device), side)


def _side(columns: Columns, first: int, side: int) -> list[int]:
    at = columns.start + first * columns.channel_stride
    count = min(side, columns.channels - first)
    return [at, columns.component_stride, columns.channel_stride, count]


def _table(rows: Sequence[Sequence[int]], fields: int, device: torch.device) -> Tensor:
    padded = [[*row, *[0] * (fields - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.int32, device="cpu").reshape(-1, fields).to(device)


def _scales(paths: Iterable[MixingPath], device: torch.device) -> Tensor:
    return torch.tensor([path.scale for path in paths], dtype=torch.float64, device=device)


# --- by a library, where something looks at every operation ---------------------------------------


def _places(start: int, sizes: tuple[int, int], strides: tuple[int, int], like: Tensor) -> Tensor:
    one, two = (torch.arange(size, device=like.device) for size in sizes)
    return start + strides[0] * one[:, None] + strides[1] * two


def _columns(one: Columns, like: Tensor) -> Tensor:
    """(components, channels)."""
    strides = one.component_stride, one.channel_stride
    return _places(one.start, (one.components, one.channels), strides, like)


def _library_product(
    mixing: ChannelMixing, x: Tensor, weight: Tensor, factors: Tensor | None
) -> Tensor:
    out = x.new_zeros(x.shape[0], mixing.width)
    for path, source, target in mixing.ends():
        matrix = weight[_places(path.start, (source.channels, target.channels), path.strides, x)]
        found = x[:, _columns(source, x)] @ matrix * path.scale
        found = found if factors is None else found * factors[:, path.factor, None, None]
        out = out.index_add(1, _columns(target, x).flatten(), found.reshape(x.shape[0], -1))
    return out


def _library_weights(
    mixing: ChannelMixing, x: Tensor, gradient: Tensor, factors: Tensor | None
) -> Tensor:
    out = x.new_zeros(mixing.weights)
    for path, source, target in mixing.ends():
        places = _places(path.start, (source.channels, target.channels), path.strides, x)
        left = x[:, _columns(source, x)] * path.scale
        left = left if factors is None else left * factors[:, path.factor, None, None]
        right = gradient[:, _columns(target, x)]
        found = (left.transpose(1, 2) @ right).sum(0)
        out = out.index_add(0, places.flatten(), found.reshape(-1))
    return out
