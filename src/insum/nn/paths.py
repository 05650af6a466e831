"""Paths of a tensor product, put together into as few statements as possible.

A path couples one irrep of each input into one of the output, in one of e3nn's modes. The letters
of a mode are the multiplicities of the first input, the second and the output; the weights of a
path have one dimension for each letter:

    uvw    Z[b,I[p,q],w] = V[p,q] * X[b,J[p,q],u] * Y[b,K[p,q],v] * W[b,L[p],u,v,w]
    uvu    Z[b,I[p,q],u] = V[p,q] * X[b,J[p,q],u] * Y[b,K[p,q],v] * W[b,L[p],u,v]
    uuu    Z[b,I[p,q],u] = V[p,q] * X[b,J[p,q],u] * Y[b,K[p,q],u] * W[b,L[p],u]

and so on for ``uvv``, ``uuw`` and ``uvuv``. ``V`` are the Clebsch-Gordan coefficients of all paths
with the same mode and multiplicities, grouped by path ``L[p]``; ``I``, ``J`` and ``K`` are
components. Multiplicities of 1 in the second input have no index. The pairs of ``uvu<v`` and
``u<vw`` are walked through two index tensors:

    u<vw   Z[b,I[p,q],w] = V[p,q] * X[b,J[p,q],A[r]] * Y[b,K[p,q],B[r]] * W[b,L[p],r,w]

Along the edges of a graph the same products are summed at their targets, over the coefficients in
one list (`Group.along_edges`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from insum.accepted import VALUES, require
from insum.errors import DtypeError
from insum.formats import GroupCOO
from insum.lang.types import promoted, widened
from insum.nn.irreps import Irreps
from insum.nn.multilinear import Multilinear
from insum.nn.wigner import wigner_3j


def _list(*indices: str) -> str:
    return ",".join([i for i in indices if i])


@dataclass(frozen=True)
class Letters:
    """How a mode is spelt: what indexes the multiplicities of the first input, the second and the
    output, and the weights; ``weighs``: weights are what makes the output's letter.
    """

    first: str
    second: str
    out: tuple[str, ...]
    weight: tuple[str, ...]
    weighs: bool = False

    @property
    def pairs(self) -> bool:
        """Whether pairs ``u < v`` of one multiplicity are walked."""
        return "r" in self.weight

    @property
    def weight_without_second(self) -> tuple[str, ...]:
        """Those of weights where the second input's multiplicity is 1 and has no index."""
        return tuple([letter for letter in self.weight if letter != "v"])

    def over_edges(self, single: bool, has_weight: bool) -> Multilinear:
        """A product along edges; ``single``: the second input's multiplicity has no index."""
        second = "" if single else self.second
        at = {"V": "p", "X": f"src[e],J[p],{self.first}", "Y": _list("e", "K[p]", second)}
        if has_weight:
            weight = self.weight_without_second if single else self.weight
            at["W"] = _list("e", "L[p]", *weight)
        leaves = tuple([name for name in at if name != "V"])
        return Multilinear("Z", {**at, "Z": f"dst[e],I[p],{_list(*self.out)}"}, leaves)


MODES = {
    "uvw": Letters("u", "v", ("w",), ("u", "v", "w"), weighs=True),
    "uvu": Letters("u", "v", ("u",), ("u", "v")),
    "uvv": Letters("u", "v", ("v",), ("u", "v")),
    "uuw": Letters("u", "u", ("w",), ("u", "w")),
    "uuu": Letters("u", "u", ("u",), ("u",)),
    "uvuv": Letters("u", "v", ("u", "v"), ("u", "v")),
    "uvu<v": Letters("A[r]", "B[r]", ("r",), ("r",)),
    "u<vw": Letters("A[r]", "B[r]", ("w",), ("r", "w"), weighs=True),
}
_OVER_EDGES = {
    (mode, single, has_weight): letters.over_edges(single, has_weight)
    for mode, letters in MODES.items()
    for single in (False, True)
    for has_weight in (False, True)
}


@dataclass(frozen=True)
class Instruction:
    """One instruction: numbers of the irreps, mode, whether it has weights, its coefficient, the
    shape of its weights.
    """

    i_in1: int
    i_in2: int
    i_out: int
    mode: str
    has_weight: bool
    coefficient: float
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape) if self.has_weight else 0

    # as e3nn calls them

    @property
    def connection_mode(self) -> str:
        return self.mode

    @property
    def path_weight(self) -> float:
        return self.coefficient

    @property
    def path_shape(self) -> tuple[int, ...]:
        return self.shape


@dataclass(frozen=True)
class Group:
    """All paths with one mode and one set of multiplicities: one statement."""

    mode: str
    muls: tuple[int, int, int]
    has_weight: bool
    paths: tuple[Instruction, ...]
    offsets: tuple[int, ...]  # where each path's weights begin
    #: What follows from these, asked for at every call of a layer: whether the second input's
    #: multiplicity is 1 and needs no index, the extents of the weights' and the output's letters,
    #: and whether the weights of all paths follow each other.
    single: bool = field(init=False, compare=False, repr=False)
    weight_shape: tuple[int, ...] = field(init=False, compare=False, repr=False)
    out_shape: tuple[int, ...] = field(init=False, compare=False, repr=False)
    in_a_row: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.__setstate__(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        held = self.__dict__
        held.update({n: state[n] for n in ("mode", "muls", "has_weight", "paths", "offsets")})
        letters = self.letters
        single = self.muls[1] == 1 and letters.second == "v" and "v" not in letters.out
        held["single"] = single
        held["out_shape"] = self.muls[:2] if self.mode == "uvuv" else self.muls[2:]
        sizes = dict(zip(letters.weight, self.paths[0].shape)) if self.paths else {}
        held["weight_shape"] = tuple(sizes[n] for n in self._weight_letters if n in sizes)
        size, first = (self.paths[0].numel, self.offsets[0]) if self.paths else (0, 0)
        ends = tuple(range(first, first + size * len(self.paths), size)) if size else ()
        held["in_a_row"] = self.offsets == ends

    def statement(self, shared: bool) -> str:
        """The statement of this group, for weights that all items share or each has its own.

        >>> Group("uvw", (16, 1, 16), True, (), ()).statement(shared=False)
        'Z[b,I[p,q],w] = V[p,q] * X[b,J[p,q],u] * Y[b,K[p,q]] * W[b,L[p],u,w]'
        """
        weight = self._weights("" if shared else "b") if self.has_weight else ""
        return (
            f"Z[b,I[p,q],{_list(*self.letters.out)}] = {self._factors('b', 'b', '[p,q]')}{weight}"
        )

    def along_edges(self, shared: bool) -> tuple[str, ...]:
        """The statements of this group over the edges of a graph: one; two where edges share their
        weights, which then meet sums at nodes and not every edge.

        >>> group = Group("uvu", (16, 1, 16), True, (), ())
        >>> group.along_edges(shared=False)
        ('Z[dst[e],I[p],u] = V[p] * X[src[e],J[p],u] * Y[e,K[p]] * W[e,L[p],u]',)
        >>> for statement in group.along_edges(shared=True):
        ...     print(statement)
        T[dst[e],H[p],u] = V[p] * X[src[e],J[p],u] * Y[e,K[p]]
        Z[n,I[h],u] = T[n,h,u] * W[L[h],u]
        """
        if not self.mixes(shared):
            return (self.over_edges().statement(),)
        factors, out = self._factors("src[e]", "e", "[p]"), _list(*self.letters.out)
        summed = _list(*self._summed_letters)
        mixed = f"Z[n,I[h],{out}] = T[n,h,{summed}]{self._weights('').replace('[p]', '[h]')}"
        return f"T[dst[e],H[p],{summed}] = {factors}", mixed

    def over_edges(self) -> Multilinear:
        """The product along edges, with weights of each edge's own where it has any."""
        return _OVER_EDGES[self.mode, self.single, self.has_weight]

    def mixes(self, shared: bool) -> bool:
        """Whether weights are multiplied with what reached the nodes."""
        return self.has_weight and shared

    def _factors(self, x: str, y: str, at: str) -> str:
        second = "" if self.single else self.letters.second
        return f"V{at} * X[{x},J{at},{self.letters.first}] * Y[{_list(y, f'K{at}', second)}]"

    def _weights(self, first: str) -> str:
        return f" * W[{_list(first, 'L[p]', *self._weight_letters)}]"

    @property
    def letters(self) -> Letters:
        return MODES[self.mode]

    @property
    def _weight_letters(self) -> tuple[str, ...]:
        return self.letters.weight_without_second if self.single else self.letters.weight

    @property
    def _summed_letters(self) -> tuple[str, ...]:
        """What is left of the multiplicities before there are weights."""
        return tuple(n for n in self._weight_letters if n != "w")

    @property
    def summed_shape(self) -> tuple[int, ...]:
        sizes = dict(zip(self._weight_letters, self.weight_shape))
        return tuple(sizes[letter] for letter in self._summed_letters)

    def pairs(self) -> dict[str, Tensor]:
        """``A[r]`` and ``B[r]``, where the mode walks pairs."""
        if not self.letters.pairs:
            return {}
        first, second = torch.triu_indices(self.muls[0], self.muls[0], 1, dtype=torch.int32)
        return {"A": first, "B": second}

    def weights_in(self, weight: Tensor) -> Tensor:
        """([b,] paths, u, v, w): a view where the paths of the group follow each other."""
        size, first = self.paths[0].numel, self.offsets[0]
        if self.in_a_row:
            # a narrower view has a gradient that is filled and copied
            whole = size * len(self.paths) == weight.shape[-1]
            flat = weight if whole else weight.narrow(-1, first, size * len(self.paths))
        else:
            flat = torch.cat([weight.narrow(-1, offset, size) for offset in self.offsets], -1)
        return flat.reshape(*weight.shape[:-1], len(self.paths), *self.weight_shape)

    def coefficients(self, in1: Irreps, in2: Irreps, out: Irreps) -> GroupCOO:
        """``CG[i,j,k,l]`` over components of irreps with this group's multiplicities, grouped by
        path ``l``.
        """
        shape = (
            *(
                irreps.extents.get(mul, 0)
                for irreps, mul in zip((out, in1, in2), (self.muls[2], *self.muls[:2]))
            ),
            len(self.paths),
        )
        return GroupCOO.from_entries(*self.entries(in1, in2, out), shape, group_dims=3)

    def entries(self, in1: Irreps, in2: Irreps, out: Irreps) -> tuple[Tensor, Tensor]:
        """The places ``i, j, k, l`` of all coefficients, path by path, and their values."""
        axes = [components(irreps, mul) for irreps, mul in zip((in1, in2, out), self.muls)]
        places, values = [], []
        for number, path in enumerate(self.paths):
            table = wigner_3j(in1[path.i_in1][1].l, in2[path.i_in2][1].l, out[path.i_out][1].l)
            j, k, i = (table != 0).nonzero(as_tuple=True)
            start = [axis[at] for axis, at in zip(axes, (path.i_in1, path.i_in2, path.i_out))]
            places.append(
                torch.stack([i + start[2], j + start[0], k + start[1], torch.full_like(i, number)])
            )
            values.append(path.coefficient * table[j, k, i])
        return torch.cat(places, 1), torch.cat(values)


def groups_of(
    paths: Sequence[Instruction],
    in1: Irreps,
    in2: Irreps,
    out: Irreps,
    most: int = 2**31,
    apart: Container[Instruction] = (),
) -> tuple[Group, ...]:
    """Paths by mode and multiplicities, with at most so many coefficients together; those that are
    computed ``apart`` are left out, and those without any element.
    """
    found: dict[tuple[object, ...], list[tuple[Instruction, int]]] = {}
    parts: dict[tuple[object, ...], tuple[int, int]] = {}  # the last group, and its coefficients
    offset = 0
    for path in paths:
        terms = in1[path.i_in1], in2[path.i_in2], out[path.i_out]
        muls = tuple(mul for mul, _ in terms)
        key = path.mode, muls, path.has_weight
        if 0 not in (*muls, *path.shape) and path.coefficient != 0 and path not in apart:
            points = int((wigner_3j(*(ir.l for _, ir in terms)) != 0).sum())
            part, held = parts.get(key, (0, 0))
            part, held = (part, held + points) if held + points <= most else (part + 1, points)
            parts[key] = part, held
            found.setdefault((*key, part), []).append((path, offset))
        offset += path.numel
    return tuple(Group(*key[:3], *zip(*members)) for key, members in found.items())  # type: ignore[arg-type]


def _alike(**factors: Tensor) -> list[Tensor]:
    """Factors in the dtype that a statement would compute their product in."""
    for name, factor in factors.items():
        require(name, factor, VALUES, DtypeError)
    dtypes = [factor.dtype for factor in factors.values()]
    common = widened(functools.reduce(promoted, dtypes))
    return [factor.to(common) for factor in factors.values()]


@dataclass(frozen=True)
class ScalarPath:
    """A path whose second input is scalars: nothing couples, so that it is a multiplication, in
    mode ``uuu``, or matrix products, in mode ``uvw``.

    Attributes:
        offset: where its weights begin.
        scale: the coefficient of every component.
    """

    path: Instruction
    offset: int
    scale: float

    def __call__(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """From (b, u, components), (b, v) and its weights to (b, w, components)."""
        # what has one byte may be a float, in which torch computes nothing
        if not x.dtype == y.dtype == weight.dtype or x.dtype.itemsize == 1:
            x, y, weight = _alike(x=x, y=y, weight=weight)
        y = y if abs(self.scale - 1) < 1e-12 else y * self.scale
        if self.path.mode == "uuu":
            return x * y.unsqueeze(-1)
        b, u, dim = x.shape
        v, w = self.path.shape[1:]
        own = weight.view(u, v, w)
        if dim * v <= w:  # what is made on the way is smaller, and so are the products
            both = x.transpose(1, 2).unsqueeze(-1) * y.view(b, 1, 1, v)
            mixed = both.reshape(b * dim, u * v) @ own.reshape(u * v, w)
            return mixed.view(b, dim, w).transpose(1, 2)
        matrices = (y @ own.transpose(0, 1).reshape(v, u * w)).view(b, u, w)
        return torch.bmm(matrices.transpose(1, 2), x)

    @property
    def statement(self) -> str:
        return "Z[b,u,i] = X[b,u,i] * Y[b,u]" if self.path.mode == "uuu" else _MIXED


_MIXED = "Z[b,w,i] = X[b,u,i] * Y[b,v] * W[u,v,w]"


def scalar_paths_of(
    paths: Sequence[Instruction], in1: Irreps, in2: Irreps, *, shared: bool
) -> tuple[ScalarPath, ...]:
    """Paths whose second input is scalars, of modes in which that is a matter of dense matrices:
    elementwise without weights, or with weights that all items share.
    """
    found, offset = [], 0
    for path in paths:
        (mul, ir), l = in2[path.i_in2], in1[path.i_in1][1].l
        dense = path.mode == "uuu" and not path.has_weight
        dense = dense or path.mode == "uvw" and shared and mul > 1
        if dense and not ir.l and 0 not in (in1[path.i_in1][0], *path.shape) and path.coefficient:
            scale = path.coefficient * float(wigner_3j(l, 0, l)[0, 0, 0])
            found.append(ScalarPath(path, offset, scale))
        offset += path.numel
    return tuple(found)


def components(irreps: Irreps, mul: int) -> dict[int, int]:
    """Terms with this multiplicity, and where each one's components begin when they are put side by
    side.
    """
    found, start = {}, 0
    for number, (m, ir) in enumerate(irreps):
        if m == mul:
            found[number] = start
            start += ir.dim
    return found
