"""Rewriting a product for a scatter strategy: variables merged, replaced by index arrays, or
replaced by output rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from insum.lang.expr import (
    Access,
    Affine,
    Call,
    Expr,
    Product,
    Statement,
    Sum,
    Var,
    accesses,
    affine,
    index_of,
    rewrite,
    variables,
)


def replace_atom(expr: Expr, old: Access, new: Var | Access) -> Expr:
    """Replace an access that stands in index position."""

    def in_index(index: Affine) -> Affine:
        return Affine(
            tuple((c, new if a == old else in_access(a)) for c, a in index.terms), index.offset
        )

    def in_access(atom: Var | Access) -> Var | Access:
        return (
            Access(atom.tensor, tuple(in_index(i) for i in atom.indices), atom.span)
            if isinstance(atom, Access)
            else atom
        )

    return rewrite(expr, lambda access: in_access(access))  # type: ignore[arg-type,return-value]


@dataclass(frozen=True, slots=True)
class Merge:
    """Adjacent variables that every access walks together become one; ``dims`` says where each
    tensor is flattened.
    """

    variables: tuple[str, ...]
    into: str
    dims: tuple[tuple[str, int], ...]

    def __call__(self, expr: Expr) -> Expr:
        match expr:
            case Access(tensor, indices, span):
                return Access(tensor, self._indices(indices), span)
            case Call(function, args, span):
                return Call(function, tuple(self(a) for a in args), span)
            case Product(factors, span):
                return Product(tuple(self(f) for f in factors), span)
            case Sum(terms, span):
                return Sum(tuple(self(t) for t in terms), span)
            case _:
                return expr

    def _indices(self, indices: tuple[Affine, ...]) -> tuple[Affine, ...]:
        at = position_of(indices, self.variables)
        out = [
            affine([(c, self(a) if isinstance(a, Access) else a) for c, a in i.terms], i.offset)  # type: ignore[misc]
            for i in indices
        ]
        if at is None:
            return tuple(out)
        return (*out[:at], index_of(self.into), *out[at + len(self.variables) :])


def position_of(indices: tuple[Affine, ...], together: tuple[str, ...]) -> int | None:
    """Where the variables stand side by side as plain indices."""
    plain = [i.var for i in indices]
    for at in range(len(plain) - len(together) + 1):
        if tuple(plain[at : at + len(together)]) == together:
            return at
    return None


def merge_of(exprs: tuple[Expr, ...], together: tuple[str, ...], into: str) -> Merge | None:
    """The merge of ``together`` if every access that mentions one of them mentions all, side by
    side and nowhere else.
    """
    dims: dict[str, int] = {}
    for expr in exprs:
        for access in accesses(expr):
            direct = [a.name for i in access.indices for _, a in i.terms if isinstance(a, Var)]
            if not set(direct) & set(together):
                continue
            at = position_of(access.indices, together)
            if (
                at is None
                or any(direct.count(v) != 1 for v in together)
                or dims.setdefault(access.tensor, at) != at
            ):
                return None
    return Merge(together, into, tuple(dims.items()))


@dataclass(frozen=True, slots=True)
class Scatter:
    """The one dimension of a target that is written through an index tensor: ``C[..., T[p,q],
    ...]``.
    """

    dim: int
    access: Access

    @property
    def variables(self) -> tuple[str, ...]:
        return variables(self.access)


def determined(indices: tuple[Affine, ...]) -> set[str]:
    """The variables of which a place tells the values: one dimension after the other that has a
    single variable beside those.

    >>> from insum.lang.parser import parse
    >>> [sorted(determined(parse(f"y[{to}] = x").target.indices)) for to in ("i,2*j-i", "i+j,k")]
    [['i', 'j'], ['k']]
    """
    plain = [i for i in indices if all(isinstance(atom, Var) for _, atom in i.terms)]
    found: set[str] = set()
    while True:
        left = [{*variables(index)} - found for index in plain]
        more = set().union(*(one for one in left if len(one) == 1))
        if not more:
            return found
        found |= more


def scatter_of(statement: Statement) -> Scatter | str:
    """``"direct"``, ``"injective"``, ``"general"``, or the single scattered dimension."""
    indices = statement.target.indices
    plain = [i.var for i in indices]
    if None not in plain and len(set(plain)) == len(plain):
        return "direct"
    if set(variables(statement.target)) <= determined(indices):
        return "injective"
    special = [d for d, i in enumerate(indices) if i.var is None]
    rest = [v for v in plain if v is not None]
    if len(special) != 1 or len(set(rest)) != len(rest):
        return "general"
    atom = indices[special[0]].atom
    if (
        not isinstance(atom, Access)
        or any(i.var is None for i in atom.indices)
        or set(variables(atom)) & set(rest)
    ):
        return "general"
    return (
        Scatter(special[0], atom) if len(set(variables(atom))) == len(atom.indices) else "general"
    )
