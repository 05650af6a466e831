"""What a library does best is left to it: a matrix product of dense tensors, without any
indirection.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from insum.lang.bind import Problem
from insum.lang.expr import Access, Expr, Number

#: Said where a statement is left to the library.
WHY = "a product of two dense tensors, without indices: cuBLAS runs it, through the graph"
HALVES = (torch.float16, torch.bfloat16)
_DTYPES = (*HALVES, torch.float32, torch.float64)
#: Side of a library's tile; so few of them leave most of a device without work, where each sums so
#: much. Of one product libraries cut the sum into pieces, of a batch they do not.
_TILE, _FEW_TILES, _LONG_SUM = 64, 64, 1024
#: Matrices of so few multiplications, with so short a side, as rotations are: a library takes some
#: nanoseconds for each of a batch.
_TINY_SIDE, _TINY = 4, 1024


def is_left_to_library(problem: Problem, *, accumulates: bool) -> bool:
    """Whether a matrix library runs a statement better than a kernel of ours at any size."""
    return may_be_left_to_library(problem, accumulates=accumulates) and not _sides(problem).batch


def is_batch_left_to_library(
    problem: Problem, extents: Mapping[str, int], *, accumulates: bool
) -> bool:
    """The same of a batch of products, for sizes like these."""
    if not may_be_left_to_library(problem, accumulates=accumulates):
        return False
    sides = _sides(problem)
    batch, rows, columns, summed = (math.prod(extents[v] for v in side) for side in sides)
    if min(rows, columns, summed) <= _TINY_SIDE and rows * columns * summed <= _TINY:
        return False
    tiles = batch * math.ceil(rows / _TILE) * math.ceil(columns / _TILE)
    few = tiles <= _FEW_TILES and summed >= _LONG_SUM and problem.dtype != torch.float64
    return bool(sides.batch) and not few


def may_be_left_to_library(problem: Problem, *, accumulates: bool) -> bool:
    """Whether a statement is a product that a library has, on a device where there is one. In
    deterministic mode a kernel runs it, because torch refuses cuBLAS there unless its environment
    was prepared.
    """
    return (
        problem.device.type == "cuda"
        and not torch.are_deterministic_algorithms_enabled()
        and is_matrix_product(problem, accumulates=accumulates)
    )


def is_matrix_product(problem: Problem, *, accumulates: bool) -> bool:
    """Whether a statement is one matrix product, perhaps a batch of them, that means the same done
    by a library. ``accumulates``: it is added to what is there.

    Half precision is rounded once, so that nothing may follow the product; and what a library
    would have to convert, sum or scale beforehand is better done on the way, by a kernel. So is a
    batch whose matrices do not lie one after the other in the result: it would be copied there.

    >>> from insum.lang.bind import bind
    >>> from insum.lang.parser import parse
    >>> values = {"A": torch.ones(2, 3), "B": torch.ones(3, 4), "s": torch.ones(3)}
    >>> def looked(text, *names):
    ...     problem = bind(parse(text), {name: values[name] for name in names})
    ...     return is_matrix_product(problem, accumulates=False)
    >>> looked("C[i,j] = A[i,k] * B[k,j]", "A", "B")
    True
    >>> looked("C[i,j] = A[i,k] * s[k] * B[k,j]", "A", "B", "s")
    False
    >>> values |= {"X": torch.ones(7, 2, 3), "W": torch.ones(2, 3, 4)}
    >>> looked("Y[n,b,j] = X[b,n,k] * W[n,k,j]", "X", "W")
    True
    >>> looked("Y[b,n,j] = X[b,n,k] * W[n,k,j]", "X", "W")
    False
    """
    if len(problem.terms) != 1 or problem.statement.operator not in ("=", "+="):
        return False
    (term,) = problem.terms
    factors = _multiplied(problem)
    if len(factors) != 2 or not _fits(problem, factors, accumulates or len(term.factors) > 2):
        return False
    return is_product_of_matrices(problem.statement.target, *factors)


def is_product_of_matrices(target: Access, first: Expr, second: Expr) -> bool:
    """Whether two factors are matrices, by variables alone, of which the target is the product, or
    that of each of a batch, one after the other.
    """
    kept, a, b = map(plain_variables, (target, first, second))
    if kept is None or a is None or b is None:
        return False
    sides = _ProductSides.of(kept, a, b)
    if not all(sides[1:]) or not sides.rows | sides.columns <= kept <= a | b:
        return False
    return sides.batch == {index.var for index in target.indices[: len(sides.batch)]}


class _ProductSides(NamedTuple):
    """The variables of a product of matrices."""

    batch: set[str]
    rows: set[str]
    columns: set[str]
    summed: set[str]

    @classmethod
    def of(cls, kept: set[str], first: set[str], second: set[str]) -> _ProductSides:
        both = first & second
        return cls(both & kept, first - second, second - first, both - kept)


def _sides(problem: Problem) -> _ProductSides:
    """Of a statement that is a product of matrices."""
    kept, *both = map(plain_variables, (problem.statement.target, *_multiplied(problem)))
    return _ProductSides.of(*(names or set() for names in (kept, *both)))


def _multiplied(problem: Problem) -> list[Expr]:
    return [f for f in problem.terms[0].factors if not isinstance(f, Number)]


def _fits(problem: Problem, factors: Sequence[Expr], more: bool) -> bool:
    """Whether everything has one dtype, that a library multiplies and rounds as we do; ``more``:
    something is done to the product.
    """
    if not all(isinstance(f, Access) for f in factors):
        return False
    dtypes = {problem.kinds[f.tensor].dtype for f in factors if isinstance(f, Access)}
    if dtypes != {problem.dtype} or problem.dtype not in _DTYPES:
        return False
    return problem.dtype not in HALVES or not more


def plain_variables(access: Expr) -> set[str] | None:
    """The variables of an access that has nothing else, and each once."""
    if not isinstance(access, Access):
        return None
    names = [index.var for index in access.indices]
    found = {name for name in names if name is not None}
    return found if len(found) == len(names) else None
