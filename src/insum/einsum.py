"""`einsum`: one statement over sparse and dense operands, rewritten by the formats' own rules into indirect statements."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from torch import SymFloat, SymInt, Tensor, strided

from insum import api
from insum.errors import BindingError, StatementError, UnsupportedError
from insum.explain import Explanation
from insum.formats.convert import SparseFormat
from insum.formats.notation import torch_notation
from insum.formats.rewrite import Piece
from insum.formats.run import Call, Operand, rewritten
from insum.formats.spell import Source
from insum.lang.bind import Size


def einsum(
    statement: str,
    *operands: Operand,
    dense_output: bool = False,
    out_shape: Sequence[Size] | None = None,
    sizes: Mapping[str | int, Size | Sequence[Size]] | None = None,
    **named: Operand,
) -> Any:
    """Run one statement whose operands may be sparse.

    The statement is written as if every operand were dense, in insum's notation with named operands or in `torch.einsum`'s with
    positional ones. Any number of operands may be dense; several may be sparse if they share one pattern or never meet in a
    compressed dimension.

    The result is dense, with one exception: where the left side has exactly the indices of a sparse operand that stands in every
    term, nothing outside its pattern can be nonzero, and the result has that operand's format (``dense_output=True`` for a tensor).

    >>> import torch
    >>> from insum.formats import GroupCOO
    >>> A = GroupCOO.from_dense(torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]), group_size=2)
    >>> B = torch.arange(6.0).reshape(3, 2)
    >>> einsum("C[m,n] = A[m,k] * B[k,n]", A=A, B=B)
    tensor([[ 8., 11.],
            [ 6.,  9.]])
    >>> einsum("mk,kn->mn", A, B).equal(A @ B)
    True
    >>> einsum("S[m,n] = A[m,n] * X[m,k] * Y[n,k]", A=A, X=torch.ones(2, 4), Y=torch.ones(3, 4))
    GroupCOO(shape=(2, 3), float32, nnz=3, groups=2, group_size=2, group_dims=(0,), padding=25.0%, 40 bytes, cpu)
    """
    text, given = _named(statement, operands, named)
    if not any(isinstance(x, SparseFormat) for x in given.values()):
        return api.insum(text, out_shape=out_shape, sizes=sizes, **given)  # type: ignore[arg-type]
    plan = rewritten(text, given, dense_output)
    return Call(plan, given, out_shape, sizes).run()


@dataclass(frozen=True, repr=False)
class EinsumExplanation:
    """What `einsum` makes of a statement: the rewritten statements, where their arguments come from, and what each would do."""

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
    *operands: Operand,
    dense_output: bool = False,
    out_shape: Sequence[Size] | None = None,
    sizes: Mapping[str | int, Size | Sequence[Size]] | None = None,
    **named: Operand,
) -> EinsumExplanation:
    """The rewritten form of a call of `einsum` and what it would do. Nothing is computed.

    >>> import torch
    >>> from insum.formats import GroupCOO
    >>> A = GroupCOO.from_dense(torch.eye(4), group_size=1)
    >>> print(explain_einsum("C[m,n] = A[m,k] * B[k,n]", A=A, B=torch.ones(4, 2)).rewriting)
    C[m,n] = A[m,k] * B[k,n]
      A: GroupCOO(shape=(4, 4), float32, nnz=4, groups=4, group_size=1, group_dims=(0,), padding=0.0%, 48 bytes, cpu)
    becomes
      C[AM[p],n] = AV[p,q] * B[AK[p,q],n]
        AM: A.group_indices[0]
        AK: A.slot_indices[0], -1 is padding
        AV: A.values
    """
    text, given = _named(statement, operands, named)
    sparse = {name: x for name, x in given.items() if isinstance(x, SparseFormat)}
    if not sparse:
        return EinsumExplanation(text, (text,), text, (api.explain(text, out_shape=out_shape, sizes=sizes, **given),))  # type: ignore[arg-type]
    call = Call(rewritten(text, given, dense_output), given, out_shape, sizes)
    lines = [text, *(f"  {name}: {x!r}" for name, x in sparse.items()), "becomes"]
    for piece in call.plan.pieces:
        lines += [f"  {piece.statement}", *(f"    {source.name}: {_origin(source, piece)}" for source in piece.sources if source.field or source.splits)]
    if call.plan.result_like:
        lines.append(f"  with the pattern of {call.plan.result_like}")
    return EinsumExplanation(text, tuple(piece.statement for piece in call.plan.pieces), "\n".join(lines), tuple(call.explained()))


def _origin(source: Source, piece: Piece) -> str:
    """In words, where an argument comes from."""
    match source.field:
        case "":
            return f"{source.operand} with " + ", ".join(f"dimension {dim} cut into blocks of {size}" for dim, size in source.splits)
        case "values" | "table":
            text = f"{source.operand}.{source.field}"
        case "ones":
            text = f"ones at the positions of {source.operand}"
        case "unit":
            text = f"ones along dimension {source.number} of {source.operand}, read so that padding is seen"
        case _:
            text = f"{source.operand}.{source.field}[{source.number}]"
    return text + (", -1 is padding" if source.name in piece.padded else "")


# --- operands ---


def _named(statement: str, operands: tuple[Operand, ...], named: dict[str, Operand]) -> tuple[str, dict[str, Operand]]:
    """The statement in insum's notation and its operands by name."""
    if "[" in statement or "=" in statement:
        if operands:
            raise BindingError(
                f"{len(operands)} operand(s) were passed by position",
                statement=statement,
                expected="operands by name, A=A",
                remedy='"mk,kn->mn" takes them by position',
            )
        _check_kinds(statement, named)
        return statement, named
    if named:
        raise BindingError(
            f"{next(iter(named))} was passed by name",
            statement=statement,
            expected="operands by position in torch.einsum's notation",
            remedy='"C[m,n] = A[m,k] * B[k,n]" takes them by name',
        )
    if not operands:
        raise StatementError(
            "the statement has no operands", statement=statement, remedy='einsum("C[m,n] = A[m,k] * B[k,n]", A=A, B=B) or einsum("mk,kn->mn", A, B)'
        )
    _check_kinds(statement, dict(zip(ascii_uppercase, operands)))
    text, names = torch_notation(statement, tuple(_rank(x) for x in operands))
    return text, dict(zip(names, operands))


def _check_kinds(statement: str, given: Mapping[str, object]) -> None:
    for name, x in given.items():
        if isinstance(x, Tensor) and x.layout != strided:
            fact = f"{name} is a torch.sparse tensor of layout {x.layout}"
            raise UnsupportedError(fact, statement=statement, expected="a format or a dense tensor", remedy=f"insum.formats.GroupCOO.from_torch({name})")
        if not isinstance(x, SparseFormat | Tensor | bool | int | float | complex | SymInt | SymFloat):
            remedy = f"GroupCOO.from_scipy({name})" if hasattr(x, "tocoo") else f"torch.as_tensor({name})"
            raise BindingError(f"{name} is a {type(x).__name__}", statement=statement, expected="a format, a tensor or a number", remedy=remedy)


def _rank(x: Operand) -> int:
    return x.ndim if isinstance(x, SparseFormat | Tensor) else 0
