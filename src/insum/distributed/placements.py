"""Which placements follow from a statement: on the ranks of one dimension of a mesh, each doing its
part without asking the others.

A variable is *sharded* where every tensor that has it is cut along it. What it stands for on the
left side decides the result: cut as well where the variable stands there by itself, else every rank
has the sum, maximum or minimum over its own part, and the result is `Partial`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from insum.lang.expand import ProductTerm, expand
from insum.lang.expr import (
    Access,
    Affine,
    Call,
    Expr,
    Statement,
    Var,
    accesses,
    fresh,
    names_of,
    rewrite,
    tensors_of,
    variables,
)
from insum.lang.parser import parse

#: How partial results of a statement come together, by its operator.
_REDUCTIONS = {"max=": "max", "min=": "min"}
#: Sets of partial factors of one statement that are looked at.
_MOST_SETS = 64


@dataclass(frozen=True, slots=True)
class GatheredRows:
    """Rows of ``tensor`` along ``dim``, of which each rank has some, and the index that picks
    them.
    """

    tensor: str
    dim: int
    index: Access


@dataclass(frozen=True, slots=True)
class SharedWork:
    """A way to run a statement on the ranks of one dimension of a mesh.

    Attributes:
        reason: what is split, in words.
        variable: the variable that is sharded, or ''.
        inputs: the placement of each tensor, by name.
        rows: gathered rows that each rank has a part of.
    """

    reason: str
    output: Placement
    inputs: dict[str, Placement]
    variable: str = ""
    rows: GatheredRows | None = None


@functools.lru_cache(maxsize=4096)
def ways(statement: str, names: tuple[str, ...]) -> tuple[SharedWork, ...]:
    """All ways for tensors of these names; the first is that every rank does everything.

    >>> for way in ways("C[AM[p],n] = AV[p] * B[AK[p],n]", ("AM", "AV", "B", "AK")):
    ...     print(f"{way.reason}: {way.output}")
    every rank does everything: R
    p is sharded: P(sum)
    n is sharded: S(1)
    AV is a partial sum: P(sum)
    B is a partial sum: P(sum)
    rows AK[p] of B are sharded: P(sum)
    """
    return tuple(_WayFinder(parse(statement), names).find())


class _WayFinder:
    def __init__(self, statement: Statement, names: tuple[str, ...]) -> None:
        self.statement, self.names = statement, names
        self.target = statement.target
        inner = [a for index in self.target.indices for a in accesses(index)]
        self.reads: list[Access] = [*inner, *accesses(statement.value)]
        self.terms = expand(statement)
        self.partial = Partial(_REDUCTIONS.get(statement.operator, "sum"))

    def find(self) -> Iterator[SharedWork]:
        yield SharedWork("every rank does everything", Replicate(), self.placed({}))
        every = dict.fromkeys(v for a in (self.target, *self.reads) for v in variables(a))
        for variable in every:
            yield from self.sharded(variable)
        yield from self.partial_factors()
        yield from self.gathered()

    def placed(self, chosen: dict[str, Placement]) -> dict[str, Placement]:
        return {name: chosen.get(name, Replicate()) for name in self.names}

    # --- variables ---

    def sharded(self, variable: str) -> Iterator[SharedWork]:
        spots = self.spots(variable)
        if spots is None or not any(name in spots for name in self.names):
            return
        cut: dict[str, Placement] = {name: Shard(dim) for name, dim in spots.items()}
        place, reason = _place(self.target, variable), f"{variable} is sharded"
        if place is not None:
            yield SharedWork(reason, Shard(place), self.placed(cut), variable)
        elif all(variable in term.variables for term in self.terms):
            # a term without it would be added once by every rank
            yield SharedWork(reason, self.partial, self.placed(cut), variable)

    def spots(self, variable: str) -> dict[str, int] | None:
        """Where each tensor has a variable; None where it cannot be cut along it: the variable
        stands there twice, beside others (``i + r``), or not at every read of a tensor.
        """
        if not all(_stands_well(a, variable) for a in (self.target, *self.reads)):
            return None
        found: dict[str, int | None] = {}
        for access in self.reads:
            place = _place(access, variable)
            if found.setdefault(access.tensor, place) != place:
                return None
        return {name: place for name, place in found.items() if place is not None}

    # --- partial factors ---

    def partial_factors(self) -> Iterator[SharedWork]:
        """Sums pass through where every term is linear in one partial factor, and extrema where
        the right side is nothing else.
        """
        if self.statement.operator in _REDUCTIONS:
            value = self.statement.value
            if isinstance(value, Access) and self.may_be_partial(value.tensor):
                yield self.of_partial((value.tensor,))
            return
        choices = [self.linear_factors(term) for term in self.terms]
        seen = set()
        for chosen in itertools.islice(itertools.product(*choices), _MOST_SETS):
            names = tuple(dict.fromkeys(chosen))
            if names not in seen and all(_count(term, names) == 1 for term in self.terms):
                seen.add(names)
                yield self.of_partial(names)

    def linear_factors(self, term: ProductTerm) -> list[str]:
        factors = [name for f in term.factors if (name := _linear(f))]
        return [n for n in factors if self.may_be_partial(n) and _count(term, (n,)) == 1]

    def may_be_partial(self, name: str) -> bool:
        """Whether a tensor is only read as a value."""
        indices = [i for a in (self.target, *self.reads) for i in a.indices]
        return name in self.names and name not in {a.tensor for i in indices for a in accesses(i)}

    def of_partial(self, names: tuple[str, ...]) -> SharedWork:
        kind = {"sum": "sum", "max": "maximum", "min": "minimum"}[self.partial.reduce_op]
        one, many = f"{names[0]} is a partial {kind}", f"{', '.join(names)} are partial {kind}s"
        inputs = self.placed(dict.fromkeys(names, self.partial))
        return SharedWork(one if len(names) == 1 else many, self.partial, inputs)

    # --- gathered rows ---

    def gathered(self) -> Iterator[SharedWork]:
        """Rows that an index picks, of which each rank has its own: what others have is absent, as
        padding is, and every term has to be absent with it.
        """
        for name in dict.fromkeys(a.tensor for a in accesses(self.statement.value, nested=False)):
            if not self.may_be_partial(name) or not all(_count(t, (name,)) for t in self.terms):
                continue
            own = [a for a in self.reads if a.tensor == name]
            for dim, index in enumerate(own[0].indices):
                picked = index.atom
                same = all(a.indices[dim] == index for a in own)
                if same and isinstance(picked, Access) and picked.tensor in self.names:
                    yield SharedWork(
                        f"rows {picked} of {name} are sharded",
                        self.partial,
                        self.placed({name: Shard(dim)}),
                        rows=GatheredRows(name, dim, picked),
                    )


def _place(access: Access, variable: str) -> int | None:
    """The dimension of an access that is a variable."""
    return next((d for d, index in enumerate(access.indices) if index.var == variable), None)


def _stands_well(access: Access, variable: str) -> bool:
    """Whether a variable is one dimension of an access, or none."""
    alone = sum(index.var == variable for index in access.indices)
    atoms = [atom for index in access.indices for _, atom in index.terms]
    return sum(isinstance(atom, Var) and atom.name == variable for atom in atoms) == alone <= 1


def _linear(factor: Expr) -> str:
    """The tensor that a factor is, or the conjugate of; '' for others."""
    match factor:
        case Access(tensor) | Call("conj", (Access(tensor),)):
            return tensor
    return ""


def _count(term: ProductTerm, names: tuple[str, ...]) -> int:
    """How often a term reads one of the tensors."""
    return sum(a.tensor in names for f in term.factors for a in accesses(f))


def local_statement(
    statement: str, gathered: tuple[GatheredRows, ...]
) -> tuple[str, tuple[str, ...]]:
    """The statement that a rank runs, with an index of its own for each of the gathered rows; and
    the names of these. A target that is read has another name: what is read may be cut otherwise.

    >>> rows = GatheredRows("B", 0, parse("y[p] = AK[p]").value)
    >>> local_statement("C[p,n] = B[AK[p],n]", (rows,))
    ('C[p,n] = B[AK_of_B[p],n]', ('AK_of_B',))
    """
    parsed = parse(statement)
    taken, target, value = names_of(parsed), parsed.target, parsed.value
    names = tuple(fresh(f"{rows.index.tensor}_of_{rows.tensor}", taken) for rows in gathered)
    for rows, name in zip(gathered, names):
        value = rewrite(value, functools.partial(_exchanged, rows, name))
    if target.tensor in tensors_of(parsed):
        target = Access(fresh(f"{target.tensor}_new", taken), target.indices)
    if not names and target is parsed.target:
        return statement, names
    return str(Statement(target, parsed.operator, value)), names


def _exchanged(rows: GatheredRows, name: str, access: Access) -> Access:
    if access.tensor != rows.tensor:
        return access
    indices = list(access.indices)
    indices[rows.dim] = Affine(((1, Access(name, rows.index.indices)),))
    return Access(access.tensor, tuple(indices))
