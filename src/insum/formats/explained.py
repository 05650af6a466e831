"""What `insum.einsum` makes of a call: its operands by name, the rewritten statements, and where
their arguments come from.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from torch import SymFloat, SymInt, Tensor

from insum import api
from insum.accepted import TENSOR, require
from insum.call.request import given_sizes, request_of
from insum.errors import BindingError, InsumError, StatementError
from insum.explanation import Explanation, parts_of
from insum.formats.base import SparseFormat, refuse_broken
from insum.formats.notation import Single, torch_notation, with_dimensions
from insum.formats.operands import StatementOwner, taken
from insum.formats.rewrite import RewrittenStatement
from insum.formats.run import FormatCall, FormatOrValue, rewritten
from insum.formats.spell import Source
from insum.lang.bind import Size
from insum.lang.parser import parse
from insum.plan.path import Optimize
from insum.runtime import inspection


@dataclass(frozen=True, repr=False)
class EinsumExplanation:
    """What `einsum` makes of a statement: the rewritten statements, where their arguments come
    from, and what each would do.

    >>> import torch
    >>> from insum.formats import ELL
    >>> explain_einsum("mk,k->m", ELL.from_dense(torch.eye(3)), torch.ones(3)).statements
    ('Out[m] = AV[m,q] * B[AK[m,q]]',)
    """

    statement: str
    statements: tuple[str, ...]
    rewriting: str
    parts: tuple[Explanation, ...]

    def __str__(self) -> str:
        return "\n\n".join([self.rewriting, *map(str, self.parts)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def explain_einsum(
    statement: str,
    /,
    *operands: FormatOrValue,
    dense_output: bool = False,
    out_shape: Sequence[Size] | None = None,
    sizes: Mapping[str | int, Size | Sequence[Size]] | None = None,
    optimize: Optimize = True,
    gpu: str = "",
    **named: FormatOrValue,
) -> EinsumExplanation:
    """The rewritten form of a call of `einsum` and what it would do; ``gpu`` as in `insum.explain`.
    Nothing is computed.

    >>> import torch
    >>> from insum.formats import GroupCOO
    >>> A = GroupCOO.from_dense(torch.eye(4), group_size=1)
    >>> print(explain_einsum("C[m,n] = A[m,k] * B[k,n]", A=A, B=torch.ones(4, 2)).rewriting)
    C[m,n] = A[m,k] * B[k,n]
      A: GroupCOO(shape=(4, 4), float32, nnz=4, groups=4, group_size=1, group_dims=(0,),
         padding=0.0%, 48 bytes, cpu)
    becomes
      C[AM[p],n] = AV[p,q] * B[AK[p,q],n]
        AM: A.group_indices[0]
        AK: A.slot_indices[0], -1 is padding
        AV: A.values
    """
    text, given = named_operands(statement, operands, named)
    given_sizes(text, out_shape, sizes)
    try:
        return _explained(text, given, dense_output, out_shape, sizes, optimize, gpu)
    except InsumError:
        raise
    except Exception:
        refuse_broken(given)
        raise


def predicted(statement: str, **named: FormatOrValue) -> float:
    """Microseconds that the cost model predicts for a call on the GPU that is there, or on an H200;
    NaN where there is no kernel. Nothing is computed.

    >>> import torch
    >>> from insum.formats import GroupCOO
    >>> A = GroupCOO.from_dense(torch.eye(64))
    >>> predicted("C[m,n] = A[m,k] * B[k,n]", A=A, B=torch.ones(64, 32)) > 0
    True
    """
    call = FormatCall(rewritten(statement, named, False), named)
    shape, total = call.shape(call.extents()), 0.0
    for piece in call.plan.pieces:
        told = call.options(piece, shape)
        request = request_of(piece.statement, told["out_shape"], told["sizes"], told["padded"])
        for part in parts_of(request, call.arguments(piece)):
            total += inspection.predicted(part.problem, part.values)
    return total


def _explained(
    text: str,
    given: dict[str, FormatOrValue],
    dense_output: bool,
    out_shape: Sequence[Size] | None,
    sizes: Mapping[str | int, Size | Sequence[Size]] | None,
    optimize: Optimize,
    gpu: str,
) -> EinsumExplanation:
    sparse = {name: x for name, x in given.items() if isinstance(x, SparseFormat)}
    if not sparse:
        return EinsumExplanation(
            text,
            (text,),
            text,
            (
                api.explain_dense(
                    text,
                    given,  # type: ignore[arg-type]
                    out_shape=out_shape,
                    sizes=sizes,
                    optimize=optimize,
                    gpu=gpu,
                ),
            ),
        )
    call = FormatCall(rewritten(text, given, dense_output), given, out_shape, sizes, optimize)
    lines = [text, *(f"  {name}: {x!r}" for name, x in sparse.items()), "becomes"]
    for piece in call.plan.pieces:
        lines += [
            f"  {piece.statement}",
            *(
                f"    {source.name}: {_origin(source, piece)}"
                for source in piece.sources
                if source.field or source.splits
            ),
        ]
    if call.plan.result_like:
        lines.append(f"  with the pattern of {call.plan.result_like}")
    return EinsumExplanation(
        text,
        tuple(piece.statement for piece in call.plan.pieces),
        "\n".join(lines),
        tuple(call.explained(gpu)),
    )


def _origin(source: Source, piece: RewrittenStatement) -> str:
    """In words, where an argument comes from."""
    match source.field:
        case "":
            return f"{source.operand} with " + ", ".join(
                f"dimension {dim} cut into blocks of {size}" for dim, size in source.splits
            )
        case "values" | "table":
            text = f"{source.operand}.{source.field}"
        case "ones":
            text = f"ones at the positions of {source.operand}"
        case "unit":
            text = (
                f"ones along dimension {source.number} of {source.operand}, read so that "
                "padding is seen"
            )
        case "edge":
            text = f"0 at the places of blocks inside of dimension {source.number}"
        case _:
            text = f"{source.operand}.{source.field}[{source.number}]"
    return text + (", -1 is padding" if source.name in piece.padded else "")


# --- operands ---


def named_operands(
    statement: str, operands: tuple[Any, ...], named: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """The statement in insum's notation and its operands by name."""
    if not isinstance(statement, str):
        parse(statement)  # which says what a statement is
    if "[" in statement or "=" in statement:
        if operands:
            raise BindingError(
                f"{len(operands)} operand(s) were passed by position",
                statement=statement,
                expected="operands by name, A=A",
                remedy='"mk,kn->mn" takes them by position',
            )
        given = taken(statement, named)
        _check_kinds(statement, given)
        if "..." in statement:
            statement = with_dimensions(statement, tuple((n, _single(x)) for n, x in given.items()))
        return statement, given
    if named:
        raise BindingError(
            f"{next(iter(named))} was passed by name",
            statement=statement,
            expected="operands by position in torch.einsum's notation",
            remedy='"C[m,n] = A[m,k] * B[k,n]" takes them by name',
        )
    if not operands:
        raise StatementError(
            "the statement has no operands",
            statement=statement,
            remedy='einsum("C[m,n] = A[m,k] * B[k,n]", A=A, B=B) or einsum("mk,kn->mn", A, B)',
        )
    numbered = {f"operand {k}": x for k, x in enumerate(operands)}
    given = taken("Out[] = 0", numbered)
    _check_kinds(statement, dict(zip(ascii_uppercase, given.values())))
    of = _single if "..." in statement else _rank
    text, names = torch_notation(statement, tuple(map(of, given.values())))
    return text, dict(zip(names, given.values()))


#: What an operand may be besides a tensor.
_TAKEN = (SparseFormat, StatementOwner, bool, int, float, complex, SymInt, SymFloat)


_SHAPED = (Tensor, SparseFormat, StatementOwner)


def _check_kinds(statement: str, given: Mapping[str, object]) -> None:
    for name, x in given.items():
        if isinstance(x, Tensor):
            require(name, x, TENSOR)
        elif not isinstance(x, _TAKEN):
            raise BindingError(
                f"{name} is a {type(x).__name__}",
                statement=statement,
                expected="a format, a tensor, an array or a number",
                remedy=f"torch.as_tensor({name})",
            )


def _rank(x: FormatOrValue) -> Single:
    """The same where nothing is left out, so that only the rank matters."""
    return (False,) * len(x.shape) if isinstance(x, _SHAPED) else ()


def _single(x: FormatOrValue) -> Single:
    """Which dimensions have the extent 1. A symbol never has: tracers tell it from 1. Sparse
    operands are not read at a place, so that theirs count as any other.
    """
    match x:
        case SparseFormat() | StatementOwner():
            return (False,) * len(x.shape)
        case Tensor():
            return tuple(isinstance(size, int) and size == 1 for size in x.shape)
        case _:
            return ()
