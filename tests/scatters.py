"""Drawn contractions that scatter: what `insum.testing` draws seldom, and what kernels are for.

One index tensor writes one dimension of the output, with values that are sorted, unique, padded or
none of it; the product has up to three factors over few variables, large enough now and then for a
matrix instruction, with gathers in them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from insum.testing import Case
from insum.testing.fill import laid_out

#: Loop points of one case: the oracle visits them one by one.
MOST_POINTS = 4000
#: What matrix instructions take.
HALF_OR_SINGLE = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("contiguous", "contiguous", "permuted", "stepped", "offset")


@dataclass
class _Draft:
    choose: random.Random
    dtypes: tuple[torch.dtype, ...]
    extents: dict[str, int] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    padded: list[str] = field(default_factory=list)
    matrix: bool = False  # the product is one of matrices, for each point of the rest

    def chance(self, percent: int) -> bool:
        return self.choose.randrange(100) < percent

    def case(self) -> Case:
        self.matrix = self.chance(60)
        scattered = ("p", "q") if self.chance(30) else ("p",)
        kept = self.choose.choice(
            [("m", "n"), ("m", "n"), ("n",)] if self.matrix else [("m", "n"), ("n",), ()]
        )
        summed = self.choose.choice(
            [("k",), ("k", "j")] if self.matrix else [("k",), ("k", "j"), ()]
        )
        self.draw_extents((*scattered, *kept, *summed))
        rows = self.choose.randint(1, 9)
        anchor = self.anchor(scattered, rows)
        where = self.choose.randint(0, len(kept))
        order = list(kept)
        self.choose.shuffle(order)
        target = [*order[:where], anchor, *order[where:]]
        dtype = self.choose.choice(
            [d for d in self.dtypes if d in HALF_OR_SINGLE]
            if self.matrix and self.chance(80)
            else self.dtypes
        )
        factors = self.factors(scattered, kept, summed, dtype)
        shape = [rows if index == anchor else self.extents[index] for index in target]
        operator = self.choose.choice(
            ["=", "+=", "+="] if self.matrix or self.chance(60) else ["max=", "min="]
        )
        if operator != "=" and self.chance(40):
            self.values["C"] = self.numbers(shape, dtype)
        sizes: dict[str | int, Any] = {"C": tuple(shape)}
        value = " * ".join(self.function(f, dtype) for f in factors)
        if operator in ("=", "+=") and self.chance(15):
            value += self.second_term(scattered, kept, dtype)
        statement = f"C[{','.join(target)}] {operator} {value}"
        return Case(
            statement,
            self.values,
            sizes,
            tuple(name for name in self.padded if name in self.values),
        )

    def function(self, factor: str, dtype: torch.dtype) -> str:
        return (
            f"{self.choose.choice(['relu', 'abs'])}({factor})"
            if dtype.is_floating_point and self.chance(10)
            else factor
        )

    def second_term(
        self, scattered: tuple[str, ...], kept: tuple[str, ...], dtype: torch.dtype
    ) -> str:
        """Another product over some of the same variables."""
        access = self.access(
            "Y", [v for v in (*scattered, *kept) if self.chance(60)], scattered, dtype
        )
        return f" {self.choose.choice('+-')} {self.choose.choice(['', '2 * '])}{access}"

    def draw_extents(self, names: tuple[str, ...]) -> None:
        """Several of them long enough for a side of a matrix product, as far as the oracle's
        patience goes.
        """
        for name in names:
            few = {
                "p": self.choose.randint(1, 12),
                "q": self.choose.randint(1, 4),
                "j": self.choose.randint(1, 3),
            }
            self.extents[name] = few.get(
                name, self.choose.choice([3, 8, 9, 16, 17] if self.matrix else [1, 3, 8, 9])
            )
        while math.prod(self.extents.values()) > MOST_POINTS:
            longest = max(self.extents, key=lambda name: self.extents[name])
            self.extents[longest] = (self.extents[longest] + 1) // 2

    def anchor(self, scattered: tuple[str, ...], rows: int) -> str:
        count = math.prod(self.extents[v] for v in scattered)
        kind = self.choose.choice(
            ["any", "sorted", "sorted", "unique", "padded", "padded at the end"]
        )
        source = np.random.default_rng(self.choose.randrange(2**32))
        flat = source.integers(0, rows, count)
        if kind in ("sorted", "padded at the end"):
            flat = np.sort(flat)
        if kind == "unique" and count <= rows:
            flat = source.permutation(rows)[:count]
        if kind == "padded":
            flat = np.where(source.random(count) < 0.3, -1, flat)
        if kind == "padded at the end":
            flat[count - count // 3 :] = -1
        if "padded" in kind:
            self.padded.append("D")
        self.values["D"] = laid_out(
            self.index(flat.reshape([self.extents[v] for v in scattered])),
            self.choose.choice(LAYOUTS),
            source,
        )
        return f"D[{','.join(scattered)}]"

    def index(self, values: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(values.copy()).to(self.choose.choice([torch.int64, torch.int32]))

    def factors(
        self,
        scattered: tuple[str, ...],
        kept: tuple[str, ...],
        summed: tuple[str, ...],
        dtype: torch.dtype,
    ) -> list[str]:
        """Left and right side of a contraction, and perhaps a scale; every variable stands in one
        of them.
        """
        sides: list[list[str]] = [[], []]
        for v in scattered:
            tall = self.matrix and len(kept) == 1  # entries are one side of the product
            for side in sides[1:] if tall else self.choose.choice([sides[:1], sides[1:], sides]):
                side.append(v)
        for number, v in enumerate(kept):
            sides[number % 2].append(v)
        for v in summed:
            for side in (
                sides if self.matrix and v == "k" else self.choose.choice([sides, sides[:1]])
            ):
                side.append(v)
        if self.chance(30):
            sides.append([v for v in (*scattered, *kept) if self.chance(40)])
        return [
            self.access("ABW"[number], side, scattered, dtype)
            for number, side in enumerate(sides)
            if side or number < 2
        ]

    def access(
        self, name: str, variables: list[str], scattered: tuple[str, ...], dtype: torch.dtype
    ) -> str:
        self.choose.shuffle(variables)
        indices, shape = [], []
        gathered = self.chance(40) and set(scattered) <= set(variables)
        if gathered:
            indices.append(self.gather(name, scattered, shape))
        for v in variables:
            if not (gathered and v in scattered and self.chance(80)):
                indices.append(v)
                shape.append(self.extents[v])
        self.values[name] = self.numbers(shape, dtype)
        return f"{name}[{','.join(indices)}]" if indices else name

    def gather(self, name: str, scattered: tuple[str, ...], shape: list[int]) -> str:
        """Several factors may gather through tensors of their own; some of these are padded."""
        size = self.choose.randint(1, 6)
        shape.append(size)
        source = np.random.default_rng(self.choose.randrange(2**32))
        values = source.integers(0, size, [self.extents[v] for v in scattered])
        if self.chance(40):
            values = np.where(source.random(values.shape) < 0.3, -1, values)
            self.padded.append(f"E{name}")
        self.values[f"E{name}"] = laid_out(self.index(values), self.choose.choice(LAYOUTS), source)
        return f"E{name}[{','.join(scattered)}]"

    def numbers(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        source = np.random.default_rng(self.choose.randrange(2**32))
        high = 3 if not dtype.is_floating_point or self.chance(50) else 9
        exact = torch.from_numpy(np.asarray(source.integers(-high, high + 1, shape))) / (
            1 if not dtype.is_floating_point else 4
        )
        return laid_out(exact.to(dtype).reshape(shape), self.choose.choice(LAYOUTS), source)


def draw_scatters(
    count: int,
    seed: int = 0,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.float64, torch.int64),
) -> Iterator[Case]:
    """``count`` cases, the same ones for the same seed."""
    for number in range(count):
        yield _Draft(random.Random(f"{seed}/{number}"), dtypes).case()
