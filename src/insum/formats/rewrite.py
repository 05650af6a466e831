"""A statement over sparse operands -> indirect statements over dense arrays. Pure text and names:
no tensor is touched here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from insum.errors import BindingError, UnsupportedError
from insum.formats.layout import memoised
from insum.formats.spell import Operand, Source, Spelling, spell
from insum.formats.spelled import SpelledStatement
from insum.formats.substitute import SpellingWriter
from insum.lang.expand import expand
from insum.lang.expr import (
    Access,
    Expr,
    Statement,
    accesses,
    tensors_of,
    total,
    variables,
)
from insum.lang.parser import parse


@dataclass(frozen=True, slots=True)
class RewrittenStatement:
    """One statement, the arguments it is called with, which of them hold padding, and how the
    output's dimensions are split.
    """

    statement: str
    sources: tuple[Source, ...]
    padded: tuple[str, ...]
    splits: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Rewrite:
    """What a call of `einsum` has to do. ``places`` are the operands' dimensions at which an index
    variable stands alone.
    """

    text: str
    target: str
    operator: str
    dims: tuple[str | None, ...]
    pieces: tuple[RewrittenStatement, ...]
    places: tuple[tuple[str, tuple[tuple[str, int], ...]], ...]
    result_like: str = ""
    permutation: tuple[int, ...] = ()


@memoised
def rewrite(text: str, operands: tuple[tuple[object, ...], ...], dense_output: bool) -> Rewrite:
    """The rewritten form of a statement for operands of these kinds; made once for each
    combination. Of a format the name, its signature and whether it is a pattern; of others name and
    rank.
    """
    known = [_operand(*one) for one in operands]
    return Rewriter(parse(text), {one.name: one for one in known}, dense_output).run()


def _operand(name: Any, signature: Any, is_pattern: Any = False) -> Operand:
    if isinstance(signature, int):
        return Operand(name, signature)
    rank, kind, dims, block, arrays, is_even = signature
    return Operand(name, rank, kind, dims, block, arrays, is_pattern, is_even)


class Rewriter:
    def __init__(
        self, statement: Statement, operands: dict[str, Operand], dense_output: bool
    ) -> None:
        self.asked, self.dense_output = SpelledStatement(statement, operands), dense_output

    def run(self) -> Rewrite:
        asked = self.asked
        self.check_operands()
        self.check_accesses()
        like = self.pattern_of_output()
        groups: dict[tuple[object, ...], list[Expr]] = {}
        for term in expand(asked.statement):
            groups.setdefault(self.patterns_in(term.value), []).append(term.value)
        pieces = tuple(self.piece(keys, values, like) for keys, values in groups.items())
        dims = tuple(index.var for index in asked.target.indices)
        made = Rewrite(
            asked.text,
            asked.target.tensor,
            asked.statement.operator,
            dims,
            pieces,
            self.places(),
        )
        if like is None:
            return made
        access = self.output_access(like)
        order = [index.var for index in access.indices]
        return replace(
            made, result_like=access.tensor, permutation=tuple(order.index(v) for v in dims)
        )

    # --- checks ---

    def check_operands(self) -> None:
        asked = self.asked
        reads = tensors_of(asked.statement)
        allowed = {*reads, asked.target.tensor} if asked.statement.operator != "=" else set(reads)
        for name in reads:
            if name not in asked.operands:
                span = next((a.span for a in self.every_access() if a.tensor == name), None)
                asked.fail(
                    BindingError,
                    f"{name} stands in the statement but was not passed",
                    span=span,
                    remedy=f"{name}=...",
                )
        for name in asked.operands:
            if name not in allowed:
                what = (
                    f"{name} is the output of '=', which makes a new tensor"
                    if name == asked.target.tensor
                    else f"{name} was passed but does not stand in the statement"
                )
                asked.fail(
                    BindingError,
                    what,
                    remedy=f"+= to accumulate into {name}" if name == asked.target.tensor else "",
                )

    def check_accesses(self) -> None:
        asked = self.asked
        for access in self.every_access():
            operand = asked.operands.get(access.tensor)
            if operand is not None and len(access.indices) != operand.rank:
                fact = (
                    f"{access.tensor} has {operand.rank} dimension(s) but {access} has "
                    f"{len(access.indices)} index(es)"
                )
                asked.fail(
                    BindingError, fact, span=access.span, remedy="write one index per dimension"
                )
            for index in access.indices:
                inner = next(
                    (a for a in accesses(index, nested=False) if asked.is_sparse(a.tensor)),
                    None,
                )
                if inner is not None:
                    asked.fail(
                        UnsupportedError,
                        f"{inner.tensor} is sparse and stands in an index",
                        span=inner.span,
                        remedy=f"{inner.tensor}.to_dense()",
                    )
        for access in (asked.target, *accesses(asked.statement.value)):
            if asked.is_sparse(access.tensor):
                self.check_sparse(access)

    def check_sparse(self, access: Access) -> None:
        asked = self.asked
        names = [index.var for index in access.indices]
        odd = next((i for i, n in zip(access.indices, names) if n is None), None)
        if odd is not None:
            asked.fail(
                UnsupportedError,
                f"{access.tensor} is sparse and indexed by {odd}",
                span=odd.span,
                expected="a plain index variable in every dimension",
                remedy=f"{access.tensor}.to_dense()",
            )
        twice = next((n for n in names if names.count(n) > 1), None)
        if twice is not None:
            asked.fail(
                UnsupportedError,
                f"{access.tensor} is sparse and {twice!r} indexes it twice",
                span=access.span,
                expected="different variables",
                remedy=f"{access.tensor}.to_dense()",
            )
        if (
            asked.statement.operator not in ("=", "+=")
            and asked.operands[access.tensor].block_shape
        ):
            remedy = f'{access.tensor}.to_format("GroupCOO")'
            asked.fail(
                UnsupportedError,
                f"{asked.statement.operator} over a block format would see the zeros inside blocks",
                span=access.span,
                remedy=remedy,
            )

    def every_access(self) -> Iterator[Access]:
        asked = self.asked
        yield asked.target
        for index in asked.target.indices:
            yield from accesses(index)
        yield from accesses(asked.statement.value)

    def places(self) -> tuple[tuple[str, tuple[tuple[str, int], ...]], ...]:
        found: dict[str, dict[tuple[str, int], None]] = {}
        for access in self.every_access():
            for dim, index in enumerate(access.indices):
                if index.var is not None and access.tensor in self.asked.operands:
                    found.setdefault(index.var, {})[access.tensor, dim] = None
        return tuple((var, tuple(where)) for var, where in found.items())

    # --- patterns ---

    def patterns_in(self, term: Expr) -> tuple[object, ...]:
        """The patterns of the sparse accesses of a term, spelled; what is absent in one of them
        must not count.
        """
        asked = self.asked
        keys: dict[object, Access] = {}
        for access in accesses(term, nested=False):
            if asked.is_sparse(access.tensor):
                keys.setdefault(asked.key_of(access), access)
        for key, access in keys.items():
            if key not in asked.spellings:
                asked.spellings[key] = spell(
                    asked.operands[access.tensor],
                    asked.names_of(access),
                    asked.taken,
                )
            if asked.statement.operator in ("=", "+=") and not asked.vanishes(term, key):
                fact = f"the right side is not zero where {access.tensor} has no entry"
                asked.fail(
                    UnsupportedError,
                    fact,
                    span=access.span,
                    expected="a product with the sparse operand, or a function of it that is 0 "
                    "at 0",
                    remedy=f"{access.tensor}.to_dense()",
                )
        self.check_meetings(
            [asked.spellings[k] for k in keys],
            {asked.spellings[k].operand.name: a for k, a in keys.items()},
        )
        return tuple(keys)

    def check_meetings(self, spellings: list[Spelling], where: dict[str, Access]) -> None:
        """Two patterns may not both say where an index variable has entries: that would be an
        intersection.
        """
        owner: dict[str, Spelling] = {}
        for spelling in spellings:
            for variable in spelling.variables:
                other = owner.get(variable)
                both = (
                    other is not None
                    and variable in other.compressed
                    and variable in spelling.compressed
                )
                blocks = other is not None and (other.blocks or spelling.blocks)
                if other is not None and (both or blocks):
                    self.refuse_intersection(
                        other.operand.name, spelling.operand.name, variable, where
                    )
                if other is None or variable in spelling.compressed:
                    owner[variable] = spelling
        self.check_cycles(spellings, where)

    def refuse_intersection(
        self, one: str, two: str, variable: str, where: dict[str, Access]
    ) -> NoReturn:
        self.asked.fail(
            UnsupportedError,
            f"{one} and {two} are both sparse and meet in index {variable!r}: their entries "
            "would have to be intersected",
            span=where[two].span,
            expected="operands that share one pattern (the same index arrays, as with_values "
            "gives), or one that stores the shared dimension densely",
            remedy=f"{two}.to_dense(), or bring both to one pattern first; "
            f"{two}.to_format('ELL') where the shared index is its row",
        )

    def check_cycles(self, spellings: list[Spelling], where: dict[str, Access]) -> None:
        becomes = {v: forms for s in spellings for v, forms in s.becomes.items()}
        for start in becomes:
            seen, front = set(), {start}
            while front:
                seen |= front
                front = {
                    v for name in front for form in becomes.get(name, ()) for v in variables(form)
                } & set(becomes)
                if start in front:
                    names = list(where)
                    self.refuse_intersection(names[0], names[-1], start, where)
                front -= seen

    def pattern_of_output(self) -> object | None:
        """The pattern that the output has: that of a sparse operand with exactly its indices in
        every term; or none, for a dense output.
        """
        asked = self.asked
        passed = asked.operands.get(asked.target.tensor)
        like = (
            None
            if self.dense_output or passed is not None and not passed.kind
            else self.common_pattern()
        )
        if (
            passed is not None
            and passed.kind
            and (like is None or asked.key_of(asked.target) != like)
        ):
            fact = (
                f"the output {asked.target.tensor} is sparse, but the right side does not "
                "keep to its pattern"
            )
            remedy = (
                f"pass {asked.target.tensor} as a dense tensor, or multiply by an operand "
                f"with {asked.target.tensor}'s own index arrays"
            )
            asked.fail(UnsupportedError, fact, span=asked.target.span, remedy=remedy)
        return like

    def common_pattern(self) -> object | None:
        asked = self.asked
        names = [index.var for index in asked.target.indices]
        wanted = {n for n in names if n is not None}
        if len(wanted) < len(names):
            return None
        patterns = [
            [
                asked.key_of(a)
                for a in accesses(term.value, nested=False)
                if asked.is_sparse(a.tensor) and set(asked.names_of(a)) == wanted
            ]
            for term in expand(asked.statement)
        ]
        return next((key for key in patterns[0] if all(key in p for p in patterns)), None)

    def output_access(self, key: object) -> Access:
        asked = self.asked
        return next(
            a
            for a in accesses(asked.statement.value, nested=False)
            if asked.is_sparse(a.tensor) and asked.key_of(a) == key
        )

    # --- one statement ---

    def piece(
        self, keys: tuple[object, ...], values: list[Expr], like: object | None
    ) -> RewrittenStatement:
        asked = self.asked
        spellings = [asked.spellings[k] for k in keys]
        writer = SpellingWriter(asked, spellings)
        if like is None:
            target, splits = writer.access(asked.target)
        else:
            target, splits = (
                Access(
                    asked.target.tensor,
                    tuple(writer.index(i) for i in asked.spellings[like].positions),
                ),
                (),
            )
        terms = [writer.term(value, target) for value in values]
        statement = Statement(target, asked.statement.operator, total(terms))
        used = {target.tensor, *tensors_of(statement)}
        sources = tuple(s for s in writer.sources.values() if s.name in used)
        return RewrittenStatement(
            str(statement), sources, tuple(n for n in writer.padded if n in used), splits
        )
