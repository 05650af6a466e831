"""Channels of irreps mixed by matrices that every row has of its own:

    Z[b,w,i] = X[b,u,i] * M[b,u,w]    with    M[b,u,w] = Y[b,v] * W[u,v,w]

Matrices of all paths are one matrix product of ``Y``, and they lie in one row, as terms of ``X``
and ``Z`` do. ``X * M * Z`` is linear in each: of any two the third follows, as a result or as a
gradient of any order, by one product of a library for each path, which reads and writes where the
terms lie.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from insum.call import prepared
from insum.compat.autograd import plain_apply, wanted_gradients
from insum.compat.calls import is_plain_call
from insum.compat.many import any_batched, over_items
from insum.compat.tensors import empty
from insum.nn.mixing import Columns

#: Numbers of all matrices, up to which they are made at once: beyond it, to write and read them
#: takes longer than the calls that are saved.
MOST_NUMBERS = 2**26
#: What is linear in each of them: rows, their matrices, and the result.
NAMES = ("X", "M", "Z")
#: Columns of two terms and of the matrix between them, (b, u, i), (b, w, i) and (b, u, w).
Views: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True)
class MatrixPath:
    """A matrix for each row between two terms: where it begins in the weights, and in a row of all
    matrices, and what it is multiplied with.
    """

    source: Columns
    target: Columns
    weights: int
    start: int
    scale: float

    @property
    def size(self) -> int:
        return self.source.channels * self.target.channels

    def columns(self) -> dict[str, Columns]:
        """Where it reads and writes, by name; rows of matrices are channels of the source."""
        channels = self.source.channels, self.target.channels
        matrix = Columns(self.start, *channels, self.target.channels, 1)
        return {"X": self.source, "M": matrix, "Z": self.target}


@dataclass(frozen=True)
class PathProduct:
    """What is done for one path: where it reads and writes, and whether something was written
    there.
    """

    columns: Mapping[str, Columns]
    scale: float
    beta: float


@dataclass(frozen=True)
class RowMatrices:
    """All paths of a layer.

    Attributes:
        factors: columns of ``Y``.
        widths: of rows of ``X``, ``M`` and ``Z``.
    """

    paths: tuple[MatrixPath, ...]
    factors: int
    widths: Mapping[str, int]
    #: By what is wanted: whether there are columns that no path leads to, and what is done.
    gaps: Mapping[str, bool] = field(init=False, compare=False, repr=False)
    products: Mapping[str, list[PathProduct]] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        gaps, products = {}, {}
        for name, width in self.widths.items():
            written = set[Columns]()
            products[name] = own = list[PathProduct]()
            for path in self.paths:
                every = path.columns()
                own.append(PathProduct(every, path.scale, float(every[name] in written)))
                written.add(every[name])
            gaps[name] = sum(one.channels * one.components for one in written) != width
        self.__dict__.update(gaps=gaps, products=products)

    def suits(self, x: Tensor, y: Tensor, weight: Tensor) -> bool:
        """Whether it is calls that take time: on a GPU, where nothing looks at them."""
        return (
            prepared.kernels_look_on(x.device)
            and is_plain_call((x, y, weight))
            and x.dtype is y.dtype is weight.dtype
            and 0 < x.shape[0] * self.widths["M"] <= MOST_NUMBERS
        )

    def __call__(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """(rows, columns of the result), of rows, (rows, factors) and the vector of weights."""
        matrices = y @ _by_factor((self, False), weight)
        found: Tensor = _third((self, "X", "M", "Z"), x, matrices)
        return found

    # --- the weights, by factors and the other way around ---

    def weights_by_factor(self, given: Tensor, back: bool) -> Tensor:
        """From the vector of weights to (factors, widths of all matrices), or ``back``."""
        if not is_plain_call((given,)):
            return _library_by_factor(self, given, back)
        width, v = self.widths["M"], self.factors
        given = given.contiguous()
        shape = (width * v,) if back else (v, width)
        found = empty(shape, given.dtype, given.device)
        vector, table = (found, given) if back else (given, found)
        for path in self.paths:
            u, w = path.source.channels, path.target.channels
            # both as (u, v, w)
            one = vector.as_strided((u, v, w), (v * w, w, 1), path.weights)
            other = table.as_strided((u, v, w), (w, width, 1), path.start)
            (one if back else other).copy_(other if back else one)
        return found

    # --- the third of rows, matrices and results ---

    def third(self, given: Mapping[str, Tensor], wanted: str) -> Tensor:
        """What makes ``X * M * Z`` linear in ``wanted``, of the other two."""
        tensors = list(given.values())
        if not is_plain_call(tensors):
            return _library_third(self, given, wanted)
        like = tensors[0]
        found = empty((like.shape[0], self.widths[wanted]), like.dtype, like.device)
        if self.gaps[wanted]:
            found.zero_()
        (one, first), (two, second) = [(name, _rows(tensor)) for name, tensor in given.items()]
        for product in self.products[wanted]:
            places = product.columns
            views = {one: _view(first, places[one]), two: _view(second, places[two])}
            _view(found, places[wanted]).baddbmm_(
                *_factors(views, wanted), beta=product.beta, alpha=product.scale
            )
        return found


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _view(rows: Tensor, one: Columns) -> Tensor:
    """(b, channels, components)."""
    return rows.as_strided(
        (rows.shape[0], one.channels, one.components),
        (rows.stride(0), one.channel_stride, one.component_stride),
        rows.storage_offset() + one.start,
    )


def _factors(views: Views, wanted: str) -> tuple[Tensor, Tensor]:
    match wanted:
        case "Z":
            return views["M"].mT, views["X"]
        case "X":
            return views["M"], views["Z"]
        case _:
            return views["X"], views["Z"].mT


# --- as parts of a graph of autograd --------------------------------------------------------------

#: What is multiplied, the names of the two that are given and of the third.
GivenTwo: TypeAlias = tuple[RowMatrices, str, str, str]


class _ThirdOfThree(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: GivenTwo, first: Tensor, second: Tensor) -> Tensor:
        ctx.given = given
        ctx.save_for_backward(first, second)
        return given[0].third({given[1]: first, given[2]: second}, given[3])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if any_batched((gradient,)):
            return over_items(functools.partial(_ThirdOfThree.backward, ctx), (gradient,))
        matrices, *names = ctx.given
        tensors = dict(zip(names, (*ctx.saved_tensors, gradient)))
        recorded = torch.is_grad_enabled() and is_plain_call(list(tensors.values()))
        found: list[Tensor | None] = []
        for name, wants in zip(names, wanted_gradients(ctx)[1:]):
            others = [one for one in names if one != name]
            if not wants:
                found.append(None)
            elif recorded:
                pair = tensors[others[0]], tensors[others[1]]
                found.append(_third((matrices, *others, name), *pair))
            else:
                found.append(matrices.third({one: tensors[one] for one in others}, name))
        return (None, *found)


class _ByFactor(torch.autograd.Function):
    """``given``: whose weights they are, and whether they go back."""

    @staticmethod
    def forward(ctx: Any, given: tuple[RowMatrices, bool], weights: Tensor) -> Tensor:
        ctx.given = given
        return given[0].weights_by_factor(weights, given[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if any_batched((gradient,)):
            return over_items(functools.partial(_ByFactor.backward, ctx), (gradient,))
        matrices, back = ctx.given
        if torch.is_grad_enabled() and is_plain_call((gradient,)):
            return None, _by_factor((matrices, not back), gradient)
        return None, matrices.weights_by_factor(gradient, not back)


_third, _by_factor = plain_apply(_ThirdOfThree), plain_apply(_ByFactor)


# --- by operations that others can look at --------------------------------------------------------


def _places(one: Columns, like: Tensor) -> Tensor:
    """(channels * components)."""
    u = torch.arange(one.channels, device=like.device)[:, None] * one.channel_stride
    i = torch.arange(one.components, device=like.device) * one.component_stride
    return (one.start + u + i).flatten()


def _library_third(matrices: RowMatrices, given: Mapping[str, Tensor], wanted: str) -> Tensor:
    like = next(iter(given.values()))
    out = like.new_zeros(like.shape[0], matrices.widths[wanted])
    for path in matrices.paths:
        every = path.columns()
        views = {
            name: one[:, _places(every[name], one)].reshape(
                -1, every[name].channels, every[name].components
            )
            for name, one in given.items()
        }
        first, second = _factors(views, wanted)
        part = torch.bmm(first, second).flatten(1) * path.scale
        out = out.index_add(1, _places(every[wanted], out), part)
    return out


def _library_by_factor(matrices: RowMatrices, given: Tensor, back: bool) -> Tensor:
    paths, v = matrices.paths, matrices.factors
    if not back:
        parts = []
        for path in sorted(paths, key=lambda one: one.start):
            own = given.narrow(0, path.weights, path.size * v)
            own = own.reshape(path.source.channels, v, path.target.channels)
            parts.append(own.transpose(0, 1).reshape(v, path.size))
        return torch.cat(parts, 1)
    parts = []
    for path in sorted(paths, key=lambda one: one.weights):
        own = given.narrow(1, path.start, path.size)
        own = own.reshape(v, path.source.channels, path.target.channels)
        parts.append(own.transpose(0, 1).flatten())
    return torch.cat(parts)


def matrix_paths(
    ends: Sequence[tuple[Columns, Columns, int, float]],
) -> tuple[MatrixPath, ...]:
    """Paths whose matrices follow each other in a row; of each its source, its target, where its
    weights begin, and its scale.
    """
    sizes = [source.channels * target.channels for source, target, *_ in ends]
    starts = itertools.accumulate(sizes, initial=0)
    return tuple(
        MatrixPath(source, target, weights, start, scale)
        for (source, target, weights, scale), start in zip(ends, starts)
    )
