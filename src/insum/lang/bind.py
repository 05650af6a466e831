"""Statement + tensors -> Problem: names, ranks, extents, dtypes, devices and output sizes, all
checked before anything runs.

Values inside index tensors are not looked at here (that needs the data); everything that shapes and
dtypes tell is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from insum.lang.expand import expand
from insum.lang.expr import Statement
from insum.lang.extents import Extents
from insum.lang.problem import Kind, Problem, Size, Value, kind_of

__all__ = ["Kind", "Problem", "Size", "Value", "bind", "kind_of"]


def bind(
    statement: Statement,
    values: Mapping[str, Value],
    *,
    sizes: Mapping[str | int, Size | Sequence[Size]] | None = None,
    padded: Sequence[str] = (),
) -> Problem:
    """Check the arguments against the statement and work out extents, output shape, dtype and
    device.

    >>> import torch
    >>> from insum.lang.parser import parse
    >>> problem = bind(parse("y[i] = A[i,j] * x[j]"), {"A": torch.ones(2, 3), "x": torch.ones(3)})
    >>> dict(problem.extents), problem.shape, problem.dtype
    ({'i': 2, 'j': 3}, (2,), torch.float32)
    """
    return _Binder(statement, values, sizes or {}, padded).problem()


class _Binder(Extents):
    """The order in which things are found out."""

    def problem(self) -> Problem:
        self.check_names()
        for access in self.every_access():
            self.check_rank(access)
        self.check_index_dtypes()
        self.check_value_dtypes()
        device = self.device()
        terms = expand(self.statement)
        self.read_sizes()
        for access in self.every_access():
            if access is not self.target or self.target.tensor in self.kinds:
                self.read_extents(access, self.kinds[access.tensor].shape)
        shape = self.output_shape()
        extents = self.extents()
        self.check_affine_ranges(shape, extents)
        dtype = self.result_dtype()
        self.check_output_size(shape, dtype)
        self.check_output()
        return Problem(
            self.statement,
            terms,
            self.kinds,
            extents,
            shape,
            dtype,
            device,
            self.padded,
        )
