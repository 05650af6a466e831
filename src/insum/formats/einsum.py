"""`insum.einsum`: one statement over sparse and dense operands, rewritten by the formats' own rules
into indirect statements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from insum import api
from insum.accepted import FLAG, require
from insum.call.request import given_sizes
from insum.compat.calls import PLAIN
from insum.errors import UnsupportedError
from insum.formats.base import SparseFormat
from insum.formats.explained import named_operands
from insum.formats.operands import StatementOwner, has_format, owner_of
from insum.formats.run import FormatOrValue, run_formats
from insum.lang.bind import Size
from insum.plan.path import Optimize


def einsum(
    statement: str,
    /,
    *operands: FormatOrValue | StatementOwner,
    dense_output: bool = False,
    out_shape: Sequence[Size] | None = None,
    sizes: Mapping[str | int, Size | Sequence[Size]] | None = None,
    optimize: Optimize = True,
    **named: FormatOrValue | StatementOwner,
) -> Any:
    """Run one statement whose operands may be sparse.

    The statement is written as if every operand were dense, in insum's notation with named operands
    or in `torch.einsum`'s with positional ones; in both, ``...`` stands for dimensions that are not
    named, and broadcasts those of extent 1 of dense operands. Any number of operands may be dense;
    several may be sparse if they share one pattern or never meet in a compressed dimension. Arrays
    of NumPy, tensors of `torch.sparse` and arrays of SciPy are taken as they are, and converted at
    every call: convert those that stay.

    Three and more operands are multiplied in the order that ``optimize`` says, as in `insum`; a
    path counts the factors of the rewritten statement, which `explain` prints.

    The result is dense, with one exception: where the left side has exactly the indices of a sparse
    operand that stands in every term, nothing outside its pattern can be nonzero, and the result
    has that operand's format (``dense_output=True`` for a tensor).

    Args:
        statement: One statement of the language, or the notation of `torch.einsum`.
        operands: What is multiplied, where the notation is that of `torch.einsum`.
        dense_output: Always give a tensor.
        out_shape: The shape of the output, where the statement does not tell it.
        sizes: Single sizes, as in `insum`.
        optimize: The order of contraction, as in `insum`.
        named: What the statement names.

    Returns:
        A tensor, or a format with the pattern of one of the operands.

    Raises:
        UnsupportedError: Sparse operands of different patterns meet in a compressed dimension.
        BindingError: Operands and statement do not fit.

    Examples:
        >>> import torch
        >>> from insum.formats import GroupCOO
        >>> A = GroupCOO.from_dense(torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]), group_size=2)
        >>> B = torch.arange(6.0).reshape(3, 2)
        >>> einsum("C[m,n] = A[m,k] * B[k,n]", A=A, B=B)
        tensor([[ 8., 11.],
                [ 6.,  9.]])
        >>> einsum("mk,kn->mn", A, B).equal(A @ B)
        True
        >>> einsum("C[...,m] = A[m,k] * X[...,k]", A=A, X=torch.ones(4, 5, 3)).shape
        torch.Size([4, 5, 2])
        >>> einsum("S[m,n] = A[m,n] * X[m,k] * Y[n,k]", A=A, X=torch.ones(2, 4), Y=torch.ones(3, 4))
        GroupCOO(shape=(2, 3), float32, nnz=3, groups=2, group_size=2, group_dims=(0,),
        padding=25.0%, 40 bytes, cpu)
    """
    given: dict[str, Any] = named
    text, sparse = statement, False
    common = len(operands) == 0 and type(text) is str and "[" in text and "..." not in text
    for x in named.values():  # here: every function that is called is one more on the path
        if isinstance(x, SparseFormat):
            sparse = True
        else:
            dense = type(x) in PLAIN and x.layout is torch.strided  # type: ignore[union-attr]
            common = common and dense and not (x.is_nested or x.is_quantized)  # type: ignore[union-attr]
    if not common:
        text, given = named_operands(statement, operands, named)
        sparse = has_format(given)
        owner = owner_of(given)
        if owner is not None:
            return _run_by(owner, text, given, dense_output, out_shape, sizes, optimize)
    if not sparse:
        return api.insum(text, out_shape=out_shape, sizes=sizes, optimize=optimize, **given)
    if dense_output is not False:
        require("dense_output", dense_output, FLAG)
    if out_shape is not None or sizes is not None:
        given_sizes(text, out_shape, sizes)  # which says what is wrong with them
    return run_formats(text, given, dense_output, out_shape, sizes, optimize)


def _run_by(
    owner: StatementOwner,
    text: str,
    given: Mapping[str, object],
    dense_output: bool,
    out_shape: object,
    sizes: object,
    optimize: Optimize,
) -> Any:
    """Extents follow from an owner's own: nobody else can say them."""
    if out_shape is not None or sizes:
        raise UnsupportedError(
            f"sizes were passed beside a {type(owner).__name__}",
            statement=text,
            expected="sizes that operands tell",
        )
    return owner.run_statement(text, given, dense_output=dense_output, optimize=optimize)
