"""Strategies for small scattered dimensions: kept whole in registers, or written out as
straight-line code.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from insum.lang.expr import Access, Affine, Expr, Var, accesses, rewrite, variables
from insum.plan.draft import Draft, Drafting, Prepared, index_reads, remembered
from insum.plan.facts import facts_of
from insum.plan.model import LONG
from insum.plan.plan import Pattern
from insum.plan.rewrite import Scatter
from insum.plan.roles import Contraction

#: A scattered dimension up to this size can be kept whole in registers.
ONEHOT_UP_TO = 64
#: ... provided the other dimensions give the device this much to do.
ONEHOT_WORK = 2048
ONEHOT_POINTS = 4096
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


class Patterns(Drafting):
    """Scatter into registers."""

    def onehot_pays(self, scatter: Scatter) -> bool:
        sizes = self.problem.extents
        points = math.prod(int(sizes[v]) for v in scatter.variables)
        work = math.prod(
            int(sizes[v])
            for v in variables(self.problem.statement.target)
            if v not in scatter.variables
        )
        return (
            self.reduce == "sum"
            and int(self.problem.shape[scatter.dim]) <= ONEHOT_UP_TO
            and work >= ONEHOT_WORK
            and points <= ONEHOT_POINTS
        )

    def onehot(self, draft: Draft, scatter: Scatter) -> Prepared:
        size = int(self.problem.shape[scatter.dim])
        draft.why.append(f"the scattered dimension has {size} places and stays in registers")
        others = {
            v for d, i in enumerate(draft.target.indices) if d != scatter.dim for v in variables(i)
        }
        absorbed = tuple(v for v in scatter.variables if v not in others)
        roles = self.roles(draft, absorbed)
        # else the register tile has three axes, too many for a matrix product's
        tiled = bool({*roles.m, *roles.n} & set(absorbed))
        return self.finish(
            draft, "onehot", fill=False, absorbed=absorbed, onehot=scatter.dim, allow_dot=tiled
        )

    def unrolled(self, draft: Draft) -> Prepared | None:
        """Every index tensor's entries become constants of straight-line code, if there are few and
        all are declared constant.
        """
        reads = index_reads(self.problem, self.term)
        names = tuple(dict.fromkeys(a.tensor for a in reads))
        forced = self.wishes.settings.scatter == "unrolled"
        over = tuple(dict.fromkeys(v for a in reads for v in variables(a)))
        count = math.prod(draft.extents[v] for v in over)
        if any(n not in self.tensors for n in names):
            return None  # a Python number is not known when code is written
        if (
            self.reduce != "sum"
            or not names
            or count > UNROLL_POINTS
            or not (forced or all(facts_of(self.tensors[n]).constant for n in names))
        ):
            return None
        plain = {v for e in (draft.target,) for i in e.indices if i.var for v in (i.var,)}
        if set(over) & plain or any(self.tensors[n].numel() > UNROLL_POINTS for n in names):
            return None
        host = {
            n: remembered(facts_of(self.tensors[n]), "host", self.tensors[n].tolist) for n in names
        }
        points = tuple(self.points(draft, over, host))
        draft.baked |= dict.fromkeys(names)
        draft.why.append(f"{', '.join(names)} are constants of the code")
        places = math.prod(
            int(size)
            for size, i in zip(self.problem.shape, draft.target.indices, strict=True)
            if i.var is None
        )
        prepared = self.finish(
            draft, "unrolled", fill=len({target for target, _ in points}) < places
        )
        kept = tuple(
            v
            for v in dict.fromkeys(v for i in draft.target.indices for v in variables(i))
            if v not in over
        )
        summed = tuple(v for v in self.summed(draft) if v not in over)
        if not kept or not points:
            return None
        roles = self.straight(draft, kept, summed, long=len(points) > LONG)
        if not forced and roles.n[0] not in kept and draft.extents[roles.n[0]] > SUMMED_UP_TO:
            return None
        return replace(
            prepared,
            plan=replace(
                prepared.plan, pattern=Pattern(over, points), roles=roles, padded=frozenset()
            ),
        )

    def straight(
        self, draft: Draft, kept: tuple[str, ...], summed: tuple[str, ...], *, long: bool
    ) -> Contraction:
        """The axes of straight-line code: rows of the largest factor are read whole, also where
        they lie along a summed variable.

        A ``long`` pattern holds much in registers, so that few programs run at once: each reads as
        much as it can in one go.
        """
        rows = next((v for v in summed if v in self.leader_innermost(draft)), "")
        loops = tuple(v for v in summed if v != rows)
        if (
            not rows
            and len(loops) == 1
            and draft.extents[loops[0]] * draft.extents[kept[-1]]
            <= (AT_ONCE if long else FEW_AT_ONCE)
        ):
            return Contraction(kept[:-1][-1:], kept[-1:], loops, (), (), kept[:-2], False)
        if not rows:
            return Contraction(kept[:-1][-1:], kept[-1:], (), loops, (), kept[:-2], False)
        if loops:  # the others are summed first; what remains is one row, and summed at the end
            return Contraction(kept[-1:], (rows,), (), loops, (), kept[:-1], False)
        return Contraction(kept[:-1][-1:], kept[-1:], (rows,), (), (), kept[:-2], False)

    def leader_innermost(self, draft: Draft) -> set[str]:
        """Variables along the unit stride of the factor that has the most elements."""
        reads = [
            a
            for f in draft.factors
            for a in accesses(f, nested=False)
            if a.tensor in self.tensors and a.indices
        ]
        if not reads:
            return set()
        leader = max(reads, key=lambda a: self.tensors[a.tensor].numel())
        tensor = self.tensors[leader.tensor]
        return {
            v
            for d, i in enumerate(leader.indices)
            if tensor.stride(d) == 1 and tensor.shape[d] > 1
            for v in variables(i)
        }

    def points(
        self, draft: Draft, over: tuple[str, ...], host: Mapping[str, Any]
    ) -> Iterator[tuple[Access, tuple[Expr, ...]]]:
        for values in itertools.product(*(range(draft.extents[v]) for v in over)):
            at = dict(zip(over, values, strict=True))
            present = [True]
            exprs = [
                _constant(e, at, host, draft.padded, present)
                for e in (draft.target, *draft.factors)
            ]
            if present[0]:
                yield exprs[0], tuple(exprs[1:])  # type: ignore[misc]


def _constant(
    expr: Expr,
    at: Mapping[str, int],
    host: Mapping[str, Any],
    padded: set[str],
    present: list[bool],
) -> Expr:
    """The expression at one point of the unrolled variables, its index tensors replaced by their
    values.
    """

    def value(atom: Var | Access) -> int:
        if isinstance(atom, Var):
            return at[atom.name]
        found: Any = host[atom.tensor]
        for index in atom.indices:
            found = found[index.offset + sum(c * value(a) for c, a in index.terms)]
        if found < 0 and atom.tensor in padded:
            present[0] = False
            return 0
        return int(found)

    def index(old: Affine) -> Affine:
        free = [(c, a) for c, a in old.terms if isinstance(a, Var) and a.name not in at]
        fixed = sum(
            c * value(a) for c, a in old.terms if not (isinstance(a, Var) and a.name not in at)
        )
        return Affine(tuple(free), old.offset + fixed)

    return rewrite(
        expr, lambda access: Access(access.tensor, tuple(index(i) for i in access.indices))
    )
