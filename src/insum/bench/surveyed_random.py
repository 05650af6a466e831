"""``insum bench survey --random SEED``: statements that nobody wrote: products of up to three
factors over up to five variables, read and written in any order and through indices, of extents
that nobody chose. Each beside ``torch.einsum`` on what was gathered, and beside the product of all
points, compiled.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from insum.bench.data import RandomTensors
from insum.bench.gallery import Exhibit

#: Statements of one seed, and points of one.
COUNT, MOST_POINTS = 160, 2**27
#: Extents of variables, and lengths of dimensions that indices lead into.
EXTENTS = (2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 24, 31, 32, 33, 48, 64, 65, 96, 100, 128, 200, 256, 500)
LONG_EXTENTS = (1000, 3000, 20_000, 100_000)
LENGTHS = (16, 100, 1000, 20_000)
#: How often a factor has a variable, the result has it, one of them is out of order, is read or
#: written through an index.
READ, WRITTEN, TURNED, GATHERED, SCATTERED = 0.65, 0.72, 0.2, 0.45, 0.25

#: One dimension of a factor: a variable, or an index tensor's name and the variables that it is
#: read by.
Dimension = tuple[str, ...]


@dataclass(frozen=True)
class DrawnStatement:
    """A statement with its sizes.

    Attributes:
        factors: dimensions of each.
        written: variables of the result; the ``scattered`` one leads through an index.
        lengths: of the dimensions that indices lead into, by index tensor.
    """

    extents: Mapping[str, int]
    factors: tuple[tuple[Dimension, ...], ...]
    written: tuple[str, ...]
    scattered: str = ""
    lengths: Mapping[str, int] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """
        >>> factors = ((("a",), ("I", "b")), (("b",),))
        >>> DrawnStatement({"a": 2, "b": 3}, factors, ("a", "b"), "a", {"I": 4, "T": 5}).text
        'y[T[a],b] += F0[a,I[b]] * F1[b]'
        """
        read = [
            f"F{k}[{','.join(one[0] if len(one) == 1 else _index(*one) for one in dims)}]"
            for k, dims in enumerate(self.factors)
        ]
        left = (f"T[{v}]" if v == self.scattered else v for v in self.written)
        return f"y[{','.join(left)}] {'+=' if self.scattered else '='} {' * '.join(read)}"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(
            self.lengths["T"] if v == self.scattered else self.extents[v] for v in self.written
        )

    def shape_of(self, dims: Sequence[Dimension]) -> list[int]:
        return [self.lengths[d[0]] if len(d) > 1 else self.extents[d[0]] for d in dims]

    def tensors(self, draw: RandomTensors) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}

        def index(name: str, *names: str) -> Tensor:
            size = [self.extents[v] for v in names]
            return (draw.chance(*size) * self.lengths[name]).long()

        for k, dims in enumerate(self.factors):
            found[f"F{k}"] = draw.normal(*self.shape_of(dims))
            found |= {d[0]: index(*d) for d in dims if len(d) > 1}
        return found | ({"T": index("T", self.scattered)} if self.scattered else {})

    # --- what a rival computes ---

    def by_einsum(self, **values: Tensor) -> Tensor:
        parts, names = zip(*self.gathered(values), strict=True)
        inputs = ",".join(map("".join, names))
        return self.put(torch.einsum(f"{inputs}->{''.join(self.written)}", *parts), values)

    def by_points(self, **values: Tensor) -> Tensor:
        """The product of all points, summed: what a compiler makes one kernel of."""
        every, total = tuple(self.extents), None
        for part, names in self.gathered(values):
            part = part.permute([names.index(v) for v in every if v in names])
            for dim, v in enumerate(every):
                part = part if v in names else part.unsqueeze(dim)
            total = part if total is None else total * part
        assert total is not None
        summed = [dim for dim, v in enumerate(every) if v not in self.written]
        total = total.sum(summed) if summed else total
        left = [v for v in every if v in self.written]
        return self.put(total.permute([left.index(v) for v in self.written]), values)

    def gathered(self, values: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, list[str]]]:
        """Of each factor what it has at the variables that it is read by, and these."""
        for k, dims in enumerate(self.factors):
            part, names = values[f"F{k}"], list[str]()
            for one in dims:
                if len(one) == 1:
                    names.append(one[0])
                    continue
                index = values[one[0]]
                part = part.index_select(len(names), index.flatten())
                part = part.reshape(
                    *part.shape[: len(names)], *index.shape, *part.shape[len(names) + 1 :]
                )
                names += one[1:]
            yield part, names

    def put(self, result: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        if not self.scattered:
            return result
        zeros = result.new_zeros(self.shape)
        return zeros.index_add(self.written.index(self.scattered), values["T"], result)


def _index(name: str, *names: str) -> str:
    return f"{name}[{','.join(names)}]"


def exhibits(draw: RandomTensors, seed: int, points: int) -> Iterator[Exhibit]:
    """The statements of a seed, of at most so many points."""
    for number in range(COUNT):
        one = drawn(random.Random(1000 * seed + number), points)
        options = {"out_shape": one.shape} if one.scattered else {}
        yield Exhibit(
            f"{number}. {one.text} of {dict(one.extents)}",
            one.text,
            one.tensors(draw),
            one.by_einsum,
            rivals={"torch.compile": torch.compile(one.by_points)},
            leaves=tuple(f"F{k}" for k in range(len(one.factors))),
            options=options,
        )


def drawn(rng: random.Random, points: int) -> DrawnStatement:
    """One that is neither too little nor too much."""
    while True:
        found = _drawn(rng, points)
        if found is not None:
            return found


def _drawn(rng: random.Random, most: int) -> DrawnStatement | None:
    names = "abcde"[: rng.choice((2, 3, 3, 4, 4, 5))]
    sizes = [n for n in (*EXTENTS, *LONG_EXTENTS) if n <= most]
    extents = {v: rng.choice(sizes) for v in names}
    factors = [_factor(rng, names) for _ in range(rng.choice((1, 2, 2, 2, 3)))]
    if {v for dims in factors for (v,) in dims} != {*names}:
        return None
    written = [v for v in names if rng.random() < WRITTEN]
    if rng.random() < TURNED:
        rng.shuffle(written)
    lengths: dict[str, int] = {}
    if rng.random() < GATHERED:
        dims = rng.choice(factors)
        at = rng.randrange(len(dims))
        others = [v for v in names if (v,) not in dims]
        also = [rng.choice(others)] if others and rng.random() < TURNED else []
        lengths["I"] = rng.choice((*LENGTHS, extents[dims[at][0]]))
        dims[at] = ("I", *dims[at], *also)
    scattered = rng.choice(written) if written and rng.random() < SCATTERED else ""
    if scattered:
        lengths["T"] = rng.choice((*LENGTHS, extents[scattered]))
    one = DrawnStatement(extents, tuple(map(tuple, factors)), tuple(written), scattered, lengths)
    whole, result = math.prod(extents.values()), math.prod(one.shape)
    largest = max(math.prod(one.shape_of(dims)) for dims in one.factors)
    fits = most // 512 <= whole <= most and max(largest, result) <= most // 4
    # of a tensor as it is, or turned, others have a view
    does = len(factors) > 1 or bool(lengths) or len(written) < len(names)
    return one if written and fits and does else None


def _factor(rng: random.Random, names: str) -> list[Dimension]:
    own = [v for v in names if rng.random() < READ] or [rng.choice(names)]
    if rng.random() < TURNED:
        rng.shuffle(own)
    return [(v,) for v in own]
