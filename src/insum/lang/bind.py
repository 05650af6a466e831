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
from insum.lang.signature import Binding

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
    binding = Binding(statement, values, sizes or {}, padded)
    binding.check_names()
    for access in binding.every_access():
        binding.check_rank(access)
    binding.check_index_dtypes()
    binding.check_value_dtypes()
    device, terms = binding.device(), expand(statement)
    found = Extents(binding)
    found.read_sizes()
    for access in binding.every_access():
        if access is not binding.target or binding.target.tensor in binding.kinds:
            found.read_extents(access, binding.kinds[access.tensor].shape)
    shape = found.output_shape()
    extents = found.extents()
    found.check_affine_ranges(shape, extents)
    dtype = binding.result_dtype()
    found.check_output_size(shape, dtype)
    binding.check_output()
    return Problem(
        *(statement, terms, binding.kinds, extents, shape, dtype, device, binding.padded)
    )
