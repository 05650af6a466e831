"""Small constant patterns: the entries of index tensors become constants of straight-line code."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from insum.lang.expr import (
    Access,
    Affine,
    Atom,
    Expr,
    Number,
    Statement,
    Var,
    accesses,
    rewrite,
    variables,
)
from insum.plan.draft import Draft, Planned, Subject, finish
from insum.plan.plan import Pattern, PatternPoint, Plan, Segment
from insum.plan.questions import AskCoefficients, AskExact, AskInside, AskValues
from insum.plan.recipes import OfShape, Segments
from insum.plan.roles import Contraction
from insum.plan.sizes import OUT
from insum.plan.strategies.segmenting import fits, to_rows
from insum.plan.strategies.sorting import to_sorted_rows
from insum.plan.substitution import Scatter, scatter_of
from insum.plan.tiling import LONG

#: Longer patterns than this are not unrolled: the code would outgrow the instruction cache and the
#: registers.
UNROLL_POINTS = 512
#: A pattern this short that keeps coming back is taken for a constant, promise or no promise.
PROMOTE_POINTS = 128
#: One tile holds the whole of a summed variable whose sum is taken at the end.
SUMMED_UP_TO = 256
#: A summed variable and a row together of at most so many places are read at once in long patterns
#: ...
AT_ONCE = 1024
#: ... and in all: a warp reads two of them.
FEW_AT_ONCE = 256
#: Of an index, what is multiplied by how much.
Terms: TypeAlias = tuple[tuple[int, Atom], ...]


@dataclass(frozen=True)
class Constants:
    """What becomes code: index tensors, the variables that they run over, coefficients at the
    places of these, and the product at every point.
    """

    names: tuple[str, ...]
    points: tuple[PatternPoint, ...]
    exact: Mapping[str, int]
    values: Mapping[str, Any]
    coefficients: Mapping[str, Any]

    @property
    def over(self) -> tuple[str, ...]:
        return tuple(self.exact)


def unrolled(subject: Subject, draft: Draft, scatter: Scatter) -> Planned | None:
    """Straight-line code for an output that is scattered by a pattern alone."""
    found = constants_of(subject, draft)
    if found is None or scatter.access.tensor not in found.names:
        return None
    planned = _straight_line(subject, draft, found, "unrolled")
    return planned and replace(planned, written=_written(found.points, scatter.dim))


def _written(points: Sequence[PatternPoint], dim: int) -> tuple[int, int]:
    """How many places of a dimension have a point: whether that is every one is known for each call
    alone.
    """
    return dim, len({target.indices[dim].offset for target, _ in points})


def nested(subject: Subject, draft: Draft) -> Planned | None:
    """A pattern inside of what is scattered by other index tensors, too. The points that one entry
    of those has are summed in registers; entries of one row are, where they can be walked in order,
    and else meet in atomics.
    """
    found = constants_of(subject, draft)
    if found is None:
        return None
    scatter = _other_scatter(found)
    if scatter is not None and _walks_rows(subject, scatter):
        return _in_rows(subject, draft, scatter, found)
    if subject.wishes.deterministic:
        return None
    return _straight_line(subject, draft, found, "atomic")


def _other_scatter(found: Constants) -> Scatter | None:
    """The one dimension that is scattered by something else than the pattern, over a variable of
    its own.
    """
    target, _ = found.points[0]
    dims = [d for d, index in enumerate(target.indices) if index.terms]
    rest = Access(target.tensor, tuple(target.indices[d] for d in dims))
    scatter = scatter_of(Statement(rest, "=", Number(0)))
    if not isinstance(scatter, Scatter) or len(scatter.variables) != 1:
        return None
    return Scatter(dims[scatter.dim], scatter.access)


def _walks_rows(subject: Subject, scatter: Scatter) -> bool:
    """As for other scatters: tensors that come back are worth an order, and deterministic mode
    needs one.
    """
    wished = subject.wishes.deterministic or subject.known(scatter.access.tensor) is not None
    return wished and not subject.may_wrap(scatter.access.tensor)


def _in_rows(subject: Subject, draft: Draft, scatter: Scatter, found: Constants) -> Planned | None:
    name = scatter.access.tensor
    if fits(subject, draft, scatter):
        draft = draft.because(f"{name} is sorted")
        base = Segments(name, OfShape(scatter.dim))
        draft = to_rows(subject, draft, scatter, base, scatter.variables[0])
    else:
        draft = to_sorted_rows(subject, draft, scatter)
    points = tuple(_points(draft, found.exact, found.values, found.coefficients))
    kept = tuple(v for i in draft.target.indices for v in variables(i) if v not in found.over)
    columns = tuple(v for v in kept if v != draft.row)
    if not columns or len(set(draft.summed()) - {*found.over, draft.segment}):
        return None
    roles = Contraction((), columns[-1:], (draft.segment,), (), (), columns[:-1], False)
    draft = draft.because(f"{', '.join(found.names)} are constants of the code")
    planned = finish(subject, draft, "segment", fill=True, roles=roles)
    segment = Segment(draft.row, draft.segment, tiled=False)
    pattern = Pattern(found.over, points)
    plan = replace(planned.plan, pattern=pattern, segment=segment, home=None, padded=frozenset())
    fixed = [
        dim for dim, index in enumerate(draft.target.indices) if not points[0][0].indices[dim].terms
    ]
    written = _written(points, fixed[0]) if len(fixed) == 1 else None
    return replace(planned, plan=_with_exact_strides(subject, plan), written=written)


def constants_of(subject: Subject, draft: Draft) -> Constants | None:
    """The product at every point of index tensors that may become code, if there are any."""
    exact = unrolled_variables(subject, draft)
    names = tuple(n for n in index_names(subject) if _may_be_code(subject, n))
    values = {n: subject.ask(AskValues(n)) for n in names} if exact else {}
    if not exact or any(v is None for v in values.values()):
        return None
    coefficients = _coefficients(subject, draft, tuple(exact))
    points = tuple(_points(draft, exact, values, coefficients))
    return Constants(names, points, exact, values, coefficients) if points else None


def unrolled_variables(subject: Subject, draft: Draft) -> dict[str, int]:
    """The variables that index tensors of a product run over which may become code, and how many
    values each has; empty where none may.
    """
    wished = subject.wishes.settings.scatter
    if subject.reduce != "sum" or wished not in ("auto", "unrolled") or subject.sizes.general:
        return {}
    names = tuple(n for n in index_names(subject) if _may_be_code(subject, n))
    reads = _index_reads(subject)
    over = tuple(dict.fromkeys(v for a in reads if a.tensor in names for v in variables(a)))
    beside = {v for a in reads if a.tensor not in names for v in variables(a)}
    if not names or set(over) & beside or draft.padded - set(names):
        return {}
    if set(over) & {i.var for i in draft.target.indices if i.var}:
        return {}
    exact = {v: int(subject.ask(AskExact(v))) for v in over}
    if math.prod(exact.values()) > UNROLL_POINTS or not _are_places(subject, names):
        return {}
    return exact


def _coefficients(subject: Subject, draft: Draft, over: tuple[str, ...]) -> dict[str, Any]:
    """Values of tensors at the places of the pattern, where they were promised not to change."""
    found = {}
    for factor in draft.factors:
        if not isinstance(factor, Access) or not factor.indices:
            continue
        name, at = factor.tensor, [i.var for i in factor.indices]
        small = subject.is_tensor(name) and subject.sizes.numel[name] <= 2 * UNROLL_POINTS
        if small and set(at) <= set(over) and subject.problem.kinds[name].strength == 2:
            values = subject.ask(AskCoefficients(name))
            if values is not None:
                found[name] = values
    return found


def _are_places(subject: Subject, names: tuple[str, ...]) -> bool:
    """Whether the values of constants are in range, so that they can be looked up in each other."""
    return all(
        subject.ask(AskInside(number))
        for number, use in enumerate(subject.uses)
        if all(a.tensor in names for a in accesses(use.index))
    )


def _may_be_code(subject: Subject, name: str) -> bool:
    if not subject.is_tensor(name) or subject.may_wrap(name):
        return False  # a Python number is not known when code is written
    if subject.sizes.numel[name] > 2 * UNROLL_POINTS:
        return False
    known, wished = subject.known(name), subject.wishes.settings.scatter
    return wished == "unrolled" or known is not None and known.constant


def _straight_line(
    subject: Subject, draft: Draft, found: Constants, strategy: str
) -> Planned | None:
    in_order = dict.fromkeys(v for i in draft.target.indices for v in variables(i))
    kept = tuple(v for v in in_order if v not in found.over)
    if not kept:
        return None
    summed = tuple(v for v in draft.summed() if v not in found.over)
    others = [a for a in _index_reads(subject) if a.tensor not in found.names]
    if {v for a in others for v in variables(a)} & set(summed):
        return None  # sums are taken before anything else, without looking up places
    roles = _axes(subject, draft, kept, summed, long=len(found.points) > LONG)
    forced = subject.wishes.settings.scatter == "unrolled"
    whole = roles.n[0] not in kept and subject.sizes.extents[roles.n[0]].most > SUMMED_UP_TO
    if not forced and whole:
        return None
    draft = draft.because(f"{', '.join(found.names)} are constants of the code")
    planned = finish(subject, draft, strategy, fill=True, roles=roles)
    pattern = Pattern(found.over, found.points)
    plan = replace(planned.plan, pattern=pattern, padded=frozenset())
    return replace(planned, plan=_with_exact_strides(subject, plan))


def _with_exact_strides(subject: Subject, plan: Plan) -> Plan:
    """The plan with strides as numbers where rows of columns follow each other: straight-line code
    reads many of them, and the offset of each would take a register all along.
    """
    columns = {
        OUT if a is plan.target else a.tensor: a.indices[-1].var
        for a in (plan.target, *(f for f in plan.factors if isinstance(f, Access)))
        if len(a.indices) > 1 and a.indices[-1].var is not None and a.tensor not in dict(plan.views)
    }
    known = dict(plan.strides)
    for name, column in columns.items():
        strides = known.get(name)
        if strides is not None and strides.units[-1] == 1 and strides.joins[-1]:
            width = int(subject.ask(AskExact(str(column))))
            units = (*strides.units[:-2], width, 1)
            known[name] = replace(strides, units=units)
    return replace(plan, strides=tuple(sorted(known.items())))


def index_names(subject: Subject) -> tuple[str, ...]:
    """The index tensors of a product."""
    return tuple(dict.fromkeys(a.tensor for a in _index_reads(subject)))


def _index_reads(subject: Subject) -> tuple[Access, ...]:
    """Every access of a term, the target's included, that stands in an index."""
    exprs = (subject.problem.statement.target, *subject.term.factors)
    return tuple(
        a
        for e in exprs
        for access in accesses(e)
        for i in access.indices
        for _, a in i.terms
        if isinstance(a, Access)
    )


def _axes(
    subject: Subject, draft: Draft, kept: tuple[str, ...], summed: tuple[str, ...], *, long: bool
) -> Contraction:
    """The axes of straight-line code: rows of the largest factor are read whole, also where they
    lie along a summed variable.

    A ``long`` pattern holds much in registers, so that few programs run at once: each reads as much
    as it can in one go.
    """
    rows = next((v for v in summed if v in _along_leader(subject, draft)), "")
    loops = tuple(v for v in summed if v != rows)
    few = AT_ONCE if long else FEW_AT_ONCE
    if not rows and len(loops) == 1 and draft.extents[loops[0]] * draft.extents[kept[-1]] <= few:
        return Contraction(kept[:-1][-1:], kept[-1:], loops, (), (), kept[:-2], False)
    if not rows:
        return Contraction(kept[:-1][-1:], kept[-1:], (), loops, (), kept[:-2], False)
    if loops:  # the others are summed first; what remains is one row, and summed at the end
        return Contraction(kept[-1:], (rows,), (), loops, (), kept[:-1], False)
    return Contraction(kept[:-1][-1:], kept[-1:], (rows,), (), (), kept[:-2], False)


def _along_leader(subject: Subject, draft: Draft) -> set[str]:
    """Variables along the unit stride of the factor that has the most elements."""
    reads = [
        a
        for f in draft.factors
        for a in accesses(f, nested=False)
        if a.tensor in subject.sizes.strides and a.indices
    ]
    if not reads:
        return set()
    leader = max(reads, key=lambda a: subject.sizes.numel[a.tensor])
    units = subject.sizes.strides[leader.tensor].units
    return {v for d, i in enumerate(leader.indices) if units[d] == 1 for v in variables(i)}


def _points(
    draft: Draft,
    exact: Mapping[str, int],
    values: Mapping[str, Any],
    coefficients: Mapping[str, Any],
) -> Iterator[PatternPoint]:
    """The product at every place of the unrolled variables that is not absent. A new class of sizes
    is planned anew, and a pattern has hundreds of places: nothing is made twice.
    """
    at = _AtPlace(draft, exact, values, coefficients)
    for place in itertools.product(*(range(n) for n in exact.values())):
        exprs = at.place(place)
        if exprs is not None:
            yield exprs[0], exprs[1:]  # type: ignore[misc]


class _AtPlace:
    """The target and the factors of a product at places of the unrolled variables, their index
    tensors and coefficients replaced by their values.
    """

    def __init__(
        self,
        draft: Draft,
        exact: Mapping[str, int],
        values: Mapping[str, Any],
        coefficients: Mapping[str, Any],
    ) -> None:
        self.exprs = (draft.target, *draft.factors)
        self.padded, self.names = draft.padded, tuple(exact)
        self.values, self.coefficients = values, coefficients
        self.at: dict[str, int] = {}
        self.absent = False
        #: Of every access its indices: what of each is left, its offset, and what is replaced.
        self.parts = {id(a): [self.cut(i) for i in a.indices] for a in self.outermost()}
        self.made: dict[tuple[int, ...], Access] = {}

    def outermost(self) -> Iterator[Access]:
        return (a for e in self.exprs for a in accesses(e, nested=False))

    def place(self, place: tuple[int, ...]) -> tuple[Expr, ...] | None:
        """None where the place is one of padding."""
        self.at, self.absent = dict(zip(self.names, place)), False
        found = tuple(rewrite(e, self.replaced) for e in self.exprs)
        return None if self.absent else found

    def cut(self, index: Affine) -> tuple[Terms, int, Terms]:
        fixed = tuple(term for term in index.terms if self.is_fixed(term[1]))
        left = tuple(term for term in index.terms if term not in fixed)
        return left, index.offset, fixed

    def is_fixed(self, atom: Atom) -> bool:
        return atom.name in self.names if isinstance(atom, Var) else atom.tensor in self.values

    def replaced(self, access: Access) -> Expr:
        if access.tensor in self.coefficients:
            return Number(float(self.looked_up(access, self.coefficients)))
        parts = self.parts[id(access)]
        offsets = [self.offset(offset, fixed) for _, offset, fixed in parts]
        key = (id(access), *offsets)
        found = self.made.get(key)
        if found is None:
            indices = (Affine(left, at) for (left, _, _), at in zip(parts, offsets))
            found = self.made[key] = Access(access.tensor, tuple(indices))
        return found

    def offset(self, offset: int, fixed: Terms) -> int:
        for count, atom in fixed:
            offset += count * self.value(atom)
        return offset

    def value(self, atom: Atom) -> int:
        if isinstance(atom, Var):
            return self.at[atom.name]
        found = self.looked_up(atom, self.values)
        if found < 0 and atom.tensor in self.padded:
            self.absent = True
            return 0
        return int(found)

    def looked_up(self, access: Access, among: Mapping[str, Any]) -> Any:
        found = among[access.tensor]
        for index in access.indices:
            found = found[self.offset(index.offset, index.terms)]
        return found
