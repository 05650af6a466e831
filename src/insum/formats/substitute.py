"""One statement rewritten: sparse accesses become value accesses, compressed variables what their
spellings say.
"""

from __future__ import annotations

from insum.errors import UnsupportedError
from insum.formats.layout import implicit_axes
from insum.formats.spell import Operand, Source, Spelling
from insum.formats.spelled import SpelledStatement
from insum.lang.expr import (
    Access,
    Affine,
    Atom,
    Expr,
    accesses,
    affine,
    fresh,
    index_of,
    product,
    rewrite,
    variables,
)

_NOTHING = product([])


class SpellingWriter:
    """Rewrites the accesses of one statement by the spellings that are in force in it."""

    def __init__(self, asked: SpelledStatement, spellings: list[Spelling]) -> None:
        self.asked, self.spellings = asked, spellings
        self.becomes = {v: forms for s in spellings for v, forms in s.becomes.items()}
        self.blocks = {v: size for s in spellings for v, size in s.blocks.items()}
        self.sources: dict[object, Source] = {
            name: source for s in spellings for name, source in s.sources.items()
        }
        self.spelled = set(self.sources)
        self.padded: list[str] = [name for s in spellings for name in s.padded]

    def term(self, value: Expr, target: Access) -> Expr:
        new = rewrite(value, self.factor)
        factors = [] if isinstance(value, Access) and new == _NOTHING else [new]
        for spelling in self.spellings:
            factors += self.completing(spelling, product(factors) if factors else None, target)
            factors += self.edges(spelling, value)
        return product(factors)

    def factor(self, access: Access) -> Expr:
        if not self.asked.is_sparse(access.tensor):
            return self.access(access)[0]
        operand = self.asked.operands[access.tensor]
        if operand.is_pattern and operand.is_even:
            return _NOTHING
        spelling = self.asked.spellings[self.asked.key_of(access)]
        return self.value_access(operand, spelling, self.asked.names_of(access))

    def value_access(
        self, operand: Operand, spelling: Spelling, names: tuple[str, ...], field: str = "values"
    ) -> Access:
        """The values at the spelling's positions, block axes in the operand's own order of
        dimensions.
        """
        source = self.named(f"{operand.name}V", operand.name, field=field)
        lead = len(operand.layout.axes)
        axes = self.axes_of(operand, names, spelling)
        inner = (
            [spelling.positions[lead + spelling.variables.index(n)] for n in names]
            if operand.block_shape
            else []
        )
        return Access(source.name, tuple(self.index(i) for i in (*axes, *inner)))

    def axes_of(self, operand: Operand, names: tuple[str, ...], spelling: Spelling) -> list[Affine]:
        """The position axes; those that are dimensions come in the operand's own order."""
        implicit = {axis: names[dim] for dim, axis in implicit_axes(operand.layout).items()}
        return [
            index_of(implicit[a]) if a in implicit else spelling.positions[a]
            for a in range(len(operand.layout.axes))
        ]

    def completing(self, spelling: Spelling, so_far: Expr | None, target: Access) -> list[Expr]:
        """What a term still lacks: ones where positions would not be summed over, a read of the
        padding where it would not be seen.
        """
        lacking: list[Expr] = []
        wanted = {v for i in spelling.positions for v in variables(self.index(i))}
        seen = {*variables(target), *(variables(so_far) if so_far is not None else ())}
        if not wanted <= seen or so_far is None or not any(True for _ in accesses(so_far)):
            lacking.append(
                self.value_access(spelling.operand, spelling, spelling.variables, "ones")
            )
        reads = {a.tensor for e in (so_far, *target.indices) if e is not None for a in accesses(e)}
        if spelling.padded and not reads & set(spelling.padded):
            dim = next(d for d, c in enumerate(spelling.operand.layout.coordinates) if c.padded)
            unit = self.named(
                f"{spelling.operand.name}One", spelling.operand.name, field="unit", number=dim
            )
            lacking.append(
                Access(unit.name, (self.index(spelling.becomes[spelling.variables[dim]][0]),))
            )
        return lacking

    def edges(self, spelling: Spelling, value: Expr) -> list[Expr]:
        """Where blocks reach over the edge and a function of what lies there need not be 0: a read
        that makes padding of it.
        """
        if spelling.operand.is_even:
            return []
        ranged = self.asked.ranges_of_functions(value)
        return [self.edge(spelling, dim) for dim, v in enumerate(spelling.variables) if v in ranged]

    def edge(self, spelling: Spelling, dim: int) -> Access:
        operand = spelling.operand.name
        unit = self.named(f"{operand}One", operand, field="unit", number=dim)
        edge = self.named(f"{operand}Edge", operand, field="edge", number=dim, is_index=True)
        if edge.name not in self.padded:
            self.padded.append(edge.name)
        blocks = tuple(self.index(i) for i in spelling.becomes[spelling.variables[dim]])
        return Access(unit.name, (affine([(1, Access(edge.name, blocks))], 0),))

    def access(
        self, access: Access, *, is_index: bool = False
    ) -> tuple[Access, tuple[tuple[int, int], ...]]:
        """A dense access with every index rewritten; dimensions that a block format indexes are
        split in two.
        """
        indices: list[Affine] = []
        splits: list[tuple[int, int]] = []
        for dim, index in enumerate(access.indices):
            variable = index.var
            if variable is not None and variable in self.blocks:
                splits.append((dim, self.blocks[variable]))
                indices += self.becomes[variable]
            else:
                indices.append(self.index(index))
        name = access.tensor
        if access is not self.asked.target:
            name = self.named(name, name, splits=tuple(splits), is_index=is_index).name
            if is_index and splits:
                self.padded.append(name)
        return Access(name, tuple(indices)), tuple(splits)

    def index(self, index: Affine) -> Affine:
        """An index expression with every compressed variable replaced, to any depth."""
        terms: list[tuple[int, Atom]] = []
        for by, atom in index.terms:
            if isinstance(atom, Access):
                terms.append((by, self.index_access(atom)))
            elif atom.name in self.blocks:
                fact = f"{atom.name!r} runs over blocks and cannot be combined in the index {index}"
                self.asked.fail(
                    UnsupportedError, fact, span=index.span, remedy='to_format("GroupCOO")'
                )
            elif atom.name in self.becomes:
                terms += [(by * c, a) for c, a in self.index(self.becomes[atom.name][0]).terms]
            else:
                terms.append((by, atom))
        return affine(terms, index.offset, index.span)

    def index_access(self, access: Access) -> Access:
        if access.tensor in self.spelled:
            return Access(access.tensor, tuple(self.index(i) for i in access.indices))
        return self.access(access, is_index=True)[0]

    def named(
        self,
        wanted: str,
        operand: str,
        *,
        field: str = "",
        number: int = 0,
        splits: tuple[tuple[int, int], ...] = (),
        is_index: bool = False,
    ) -> Source:
        """The argument that is made in this way; the first that is made of a dense operand keeps
        its name.
        """
        key = operand, field, number, splits, bool(splits) and is_index
        known = self.asked.sources.get(key)
        if known is None:
            first = not field and all(s.operand != operand for s in self.asked.sources.values())
            name = wanted if first else fresh(wanted, self.asked.taken)
            known = self.asked.sources[key] = Source(name, operand, field, number, splits, is_index)
        self.sources[key] = known
        return known
