"""Problem + facts about index tensors -> Prepared: the scatter strategy, the rewritten product, and the arrays it needs.

The strategies, in the order in which they are considered:

- *store*: every place of the output is written at most once;
- *unrolled*: the index tensors are small and declared constant, so their entries become constants of the code;
- *onehot*: the scattered dimension is small and stays whole in registers;
- *segment*: the index is sorted (or sorting it once pays), so rows of the output own runs of entries: no atomics, no zero fill;
- *atomic*: everything else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from insum.lang.bind import Problem, Value
from insum.lang.expand import Term
from insum.lang.expr import Access, Affine, Expr, Var, accesses, fresh, index_of, names_of, rewrite, variables
from insum.lang.types import INTEGERS
from insum.plan.facts import IndexFacts, facts_of
from insum.plan.plan import Pattern, Plan, Segment
from insum.plan.rewrite import Merge, Scatter, merge_of, scatter_of, substitute
from insum.plan.roles import Contraction, Roles, contraction
from insum.plan.schedule import Segments, scaled, segments
from insum.settings import Values

#: A scattered dimension up to this size can be kept whole in registers.
ONEHOT_UP_TO = 64
#: ... provided the other dimensions give the device this much to do.
ONEHOT_WORK = 2048
ONEHOT_POINTS = 4096
#: Longer patterns than this are not unrolled: the code would outgrow the instruction cache and the registers.
UNROLL_POINTS = 512
#: A pattern this short that keeps coming back is taken for a constant, promise or no promise.
PROMOTE_POINTS = 128
#: An inverse index table may have this many places per entry of the index.
INVERT_UP_TO = 2
_TRITON = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "uint8",
    torch.bool: "int1",
}
_ACCUMULATOR = {"float16": "float32", "bfloat16": "float32", "float32": "float32", "float64": "float64"}


class CannotFuse(Exception):
    """There is no fused kernel for this statement; the text says why. Never reaches the user unless fusion is required."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A plan, and everything that its launch needs beside the caller's tensors."""

    plan: Plan
    extents: Mapping[str, int]
    arrays: Mapping[str, Tensor]
    views: Mapping[str, tuple[int, int]]  # tensor -> (first dimension, how many) that are flattened into one
    segments: Segments | None
    fill: bool  # the kernel does not write every place, or adds to what is there
    buffer: bool  # contributions meet in a buffer of the accumulator's dtype
    baked: tuple[str, ...] = ()  # index tensors beside the target's whose values went into arrays or code


@dataclass(slots=True)
class _Draft:
    target: Access
    factors: tuple[Expr, ...]
    extents: dict[str, int]
    padded: set[str]
    arrays: dict[str, Tensor] = field(default_factory=dict)
    views: dict[str, tuple[int, int]] = field(default_factory=dict)
    segments: Segments | None = None
    row: str = ""
    segment: str = ""
    why: list[str] = field(default_factory=list)
    baked: dict[str, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What decides between strategies besides the statement: settings, determinism, matmul precision."""

    settings: Values
    deterministic: bool
    precision: str  # "ieee", "tf32x3" or "tf32"
    accumulate: bool


def prepare(problem: Problem, term: Term, values: Mapping[str, Value], wishes: Wishes) -> Prepared:
    """Choose a strategy for one product of a statement and rewrite the product for it."""
    return _Preparation(problem, term, values, wishes).run()


def index_reads(problem: Problem, term: Term) -> tuple[Access, ...]:
    """Every access of a term, the target's included, that stands in an index."""
    exprs = (problem.statement.target, *term.factors)
    return tuple(a for e in exprs for access in accesses(e) for i in access.indices for _, a in i.terms if isinstance(a, Access))


class _Preparation:
    def __init__(self, problem: Problem, term: Term, values: Mapping[str, Value], wishes: Wishes) -> None:
        self.problem, self.term, self.values, self.wishes = problem, term, values, wishes
        self.taken = names_of(problem.statement)
        self.row, self.slot, self.flat = (fresh(name, self.taken) for name in ("row", "slot", "flat"))
        self.reduce = {"=": "sum", "+=": "sum", "max=": "max", "min=": "min"}[problem.statement.operator]
        self.tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}

    # --- the decision ---

    def run(self) -> Prepared:
        self.check_supported()
        draft = self.draft()
        scatter = scatter_of(self.problem.statement)
        wished = self.wishes.settings.scatter
        if scatter == "direct":
            return self.finish(draft, "store", fill=False)
        if scatter == "injective":
            draft.why.append("no two points meet")
            return self.finish(draft, "store", fill=True)
        if isinstance(scatter, Scatter) and len(self.problem.terms) >= 1:
            return self.scattered(draft, scatter, wished)
        if self.wishes.deterministic:
            raise CannotFuse("deterministic mode, and the output is scattered through several indices")
        draft.why.append("several scattered indices")
        return self.finish(draft, "atomic", fill=True)

    def scattered(self, draft: _Draft, scatter: Scatter, wished: str) -> Prepared:
        anchor = self.tensors[scatter.access.tensor]
        facts = facts_of(anchor)
        name = scatter.access.tensor
        clean = not (facts.padded and name in self.problem.padded)
        if wished == "unrolled" or wished == "auto" and facts.constant:
            unrolled = self.unrolled(draft)
            if unrolled is not None:
                return unrolled
        segmentable = facts.sorted and clean and anchor.is_contiguous() and self.segments_fit(scatter)
        if wished == "onehot" and self.reduce == "sum" or wished == "auto" and not segmentable and self.onehot_pays(scatter):
            return self.onehot(draft, scatter)
        if facts.unique and clean and wished in ("auto", "store"):
            draft.why.append(f"{name} is unique")
            covers = anchor.numel() == self.problem.shape[scatter.dim]
            return self.finish(draft, "store", fill=not covers)
        if wished == "atomic" and not self.wishes.deterministic:
            return self.atomic(draft, "asked for")
        if segmentable:
            if wished != "segment" and not self.wishes.deterministic and self.atomic_has_dot(draft) and not self.segment_has_dot(draft, scatter, anchor):
                return self.atomic(draft, f"its tiles hold several entries of {name}")
            return self.segmented(draft, scatter, anchor)
        inverted = self.inverted(draft, scatter, anchor, facts) if wished == "auto" else None
        if inverted is not None:
            return inverted
        if wished == "segment" or self.wishes.deterministic or not self.tiles_scatter(draft, scatter):
            return self.sorted_once(draft, scatter, anchor, facts)
        return self.atomic(draft, f"{name} is not sorted, and its tiles hold several entries of it")

    def segments_fit(self, scatter: Scatter) -> bool:
        return len(scatter.access.indices) == 1 or merge_of(self.term.factors, scatter.variables, self.slot) is not None

    def atomic(self, draft: _Draft, why: str) -> Prepared:
        draft.why.append(why)
        return self.finish(draft, "atomic", fill=True)

    def onehot_pays(self, scatter: Scatter) -> bool:
        sizes = self.problem.extents
        points = math.prod(int(sizes[v]) for v in scatter.variables)
        work = math.prod(int(sizes[v]) for v in variables(self.problem.statement.target) if v not in scatter.variables)
        return self.reduce == "sum" and int(self.problem.shape[scatter.dim]) <= ONEHOT_UP_TO and work >= ONEHOT_WORK and points <= ONEHOT_POINTS

    def tiles_scatter(self, draft: _Draft, scatter: Scatter) -> bool:
        """Whether a matrix product would have the scattered variables along one side of its tile: sorting would destroy that."""
        roles = self.roles(draft)
        return roles.dot and bool(set(scatter.variables) & {roles.m[-1], roles.n[-1]})

    def atomic_has_dot(self, draft: _Draft) -> bool:
        return self.roles(draft).dot

    def segment_has_dot(self, draft: _Draft, scatter: Scatter, anchor: Tensor) -> bool:
        trial = replace(draft, extents=dict(draft.extents), padded=set(draft.padded), arrays={}, views={}, why=[])
        self.to_segments(trial, scatter, anchor)
        return self.roles(trial).dot

    # --- strategies ---

    def onehot(self, draft: _Draft, scatter: Scatter) -> Prepared:
        size = int(self.problem.shape[scatter.dim])
        draft.why.append(f"the scattered dimension has {size} places and stays in registers")
        others = {v for d, i in enumerate(draft.target.indices) if d != scatter.dim for v in variables(i)}
        absorbed = tuple(v for v in scatter.variables if v not in others)
        roles = self.roles(draft, absorbed)
        tiled = bool({*roles.m, *roles.n} & set(absorbed))  # else the register tile has three axes, too many for a matrix product's
        return self.finish(draft, "onehot", fill=False, absorbed=absorbed, onehot=scatter.dim, allow_dot=tiled)

    def segmented(self, draft: _Draft, scatter: Scatter, anchor: Tensor) -> Prepared:
        draft.why.append(f"{scatter.access.tensor} is sorted")
        self.to_segments(draft, scatter, anchor)
        return self.finish(draft, "segment", fill=False)

    def to_segments(self, draft: _Draft, scatter: Scatter, anchor: Tensor) -> None:
        """Output rows own runs of the index; a summed variable that always follows it is merged, padding at its end dropped."""
        rows = int(self.problem.shape[scatter.dim])
        base = _kept(facts_of(anchor), ("segments", rows), lambda: segments(anchor.reshape(-1), rows))
        together = scatter.variables
        summed = [v for v in self.summed(draft) if v not in together]
        merge = next((m for q in summed if (m := self.merge(draft, (*together, q)))), None) or (self.merge(draft, together) if len(together) > 1 else None)
        width = 1
        if merge is not None:
            width = math.prod(draft.extents[v] for v in merge.variables if v not in together)
            self.apply_merge(draft, merge)
        slot = merge.into if merge else together[0]
        if width > 1 or merge and len(merge.variables) > len(together):
            base = self.widened(draft, base, width, slot, facts_of(anchor))
        self.to_rows(draft, scatter, base, slot)

    def merge(self, draft: _Draft, together: tuple[str, ...]) -> Merge | None:
        merge = merge_of(draft.factors, together, self.slot)
        if merge is None or not all(_flattens(self.tensors[t], at, len(together)) for t, at in merge.dims if t in self.tensors):
            return None
        return merge

    def apply_merge(self, draft: _Draft, merge: Merge) -> None:
        draft.factors = tuple(merge(f) for f in draft.factors)
        draft.views |= {t: (at, len(merge.variables)) for t, at in merge.dims}
        draft.extents[merge.into] = math.prod(draft.extents[v] for v in merge.variables)

    def widened(self, draft: _Draft, base: Segments, width: int, slot: str, rows_from: IndexFacts) -> Segments:
        reads = {a.tensor for f in draft.factors for a in accesses(f) if a.indices == (index_of(slot),)}
        padded = [self.tensors[t] for t in sorted(reads & draft.padded)]
        if not padded:
            return scaled(base, width, None)[0]
        key = ("slots", base.rows, rows_from.serial, *(facts_of(t).serial for t in padded))
        facts = facts_of(padded[0])

        def compute() -> tuple[Segments, bool]:
            valid = padded[0] >= 0
            for other in padded[1:]:
                valid = valid & (other >= 0)
            return scaled(base, width, valid)

        result, trimmed = _kept(facts, key, compute)
        if trimmed:
            draft.padded -= reads
            draft.why.append("padding ends each row and is skipped")
        return result

    def to_rows(self, draft: _Draft, scatter: Scatter, base: Segments, slot: str) -> None:
        draft.row, draft.segment, draft.segments = self.row, slot, base
        draft.extents |= {self.row: base.rows}
        indices = tuple(index_of(self.row) if d == scatter.dim else i for d, i in enumerate(draft.target.indices))
        draft.target = Access(draft.target.tensor, indices)
        self.unpad(draft, scatter.access.tensor)

    def unpad(self, draft: _Draft, name: str) -> None:
        """The target no longer reads this index tensor: its padding matters only where the right side reads it too."""
        if name not in {a.tensor for f in draft.factors for a in accesses(f)}:
            draft.padded.discard(name)

    def sorted_once(self, draft: _Draft, scatter: Scatter, anchor: Tensor, facts: IndexFacts) -> Prepared:
        """Sort the index once, keep the order with the tensor, and walk the entries in that order: segments again."""
        draft.why.append(f"{scatter.access.tensor} was sorted once")
        rows = int(self.problem.shape[scatter.dim])
        flat_order, base = _kept(facts, ("sorted", rows), lambda: _sorted(anchor, rows))
        slot = self.slot
        draft.extents[slot] = anchor.numel()
        order_name = fresh("order", self.taken)
        merged = self.merge(draft, scatter.variables) if len(scatter.variables) > 1 else None
        if merged is not None:
            self.apply_merge(draft, replace(merged, into=self.flat))
        self.compose(draft, scatter, anchor, flat_order, merged, facts)
        through = Affine(((1, Access(order_name, (index_of(slot),))),))
        change = {self.flat: through} if merged else self.positions(draft, scatter, anchor, flat_order, facts, through)
        draft.factors = tuple(substitute(f, change) for f in draft.factors)
        if any(a.tensor == order_name for f in draft.factors for a in accesses(f)):
            draft.arrays[order_name] = flat_order
        self.to_rows(draft, scatter, base, slot)
        return self.finish(draft, "segment", fill=False)

    def inverted(self, draft: _Draft, scatter: Scatter, anchor: Tensor, facts: IndexFacts) -> Prepared | None:
        """Where the other variables fix the scattered one (a neighbour table), the scatter is a gather through the inverse table."""
        if len(scatter.variables) < 2 or not self.tiles_scatter(draft, scatter):
            return None
        dim = max(range(anchor.dim()), key=lambda d: anchor.shape[d])
        if scatter.variables[dim] not in {v for f in draft.factors for v in variables(f)}:
            return None  # the value does not depend on the inverted variable, so nothing would mask absent points
        rows = int(self.problem.shape[scatter.dim])
        if rows * (anchor.numel() // max(1, anchor.shape[dim])) > INVERT_UP_TO * anchor.numel():
            return None
        table = _kept(facts, ("inverse", dim, rows), lambda: _inverse(anchor, dim, rows))
        if table is None:
            return None
        name = fresh(f"{scatter.access.tensor}_inverse", self.taken)
        draft.why.append(f"{scatter.access.tensor} has an inverse table")
        draft.arrays[name] = table
        draft.padded.add(name)
        var = scatter.variables[dim]
        indices = tuple(index_of(self.row if v == var else v) for v in scatter.variables)
        draft.factors = tuple(substitute(f, {var: Affine(((1, Access(name, indices)),))}) for f in draft.factors)
        draft.target = Access(draft.target.tensor, tuple(index_of(self.row) if d == scatter.dim else i for d, i in enumerate(draft.target.indices)))
        draft.extents[self.row] = rows
        self.unpad(draft, scatter.access.tensor)
        return self.finish(draft, "store", fill=False)

    def positions(self, draft: _Draft, scatter: Scatter, anchor: Tensor, order: Tensor, facts: IndexFacts, through: Affine) -> dict[str, Affine]:
        """Each scattered variable as an array over the sorted entries."""
        if len(scatter.variables) == 1:
            return {scatter.variables[0]: through}
        change: dict[str, Affine] = {}
        used = {v for f in draft.factors for v in variables(f)}
        for dim, var in enumerate(scatter.variables):
            if var in used:
                name = fresh(f"{var}_order", self.taken)
                draft.arrays[name] = _kept(facts, ("position", dim), lambda d=dim: _position(anchor, order, d))
                change[var] = Affine(((1, Access(name, (index_of(self.slot),))),))
        return change

    def compose(self, draft: _Draft, scatter: Scatter, anchor: Tensor, order: Tensor, merged: Merge | None, facts: IndexFacts) -> None:
        """Index tensors over the scattered variables are gathered into sorted order once, so that the kernel reads them in a row."""
        mine = {self.flat} if merged else set(scatter.variables)
        for factor in draft.factors:
            for access in list(accesses(factor)):
                for index in access.indices:
                    for _, atom in index.terms:
                        if isinstance(atom, Access) and atom.tensor in self.tensors and atom.indices and all(i.var in mine for i in atom.indices):
                            self.compose_one(draft, scatter, anchor, order, atom, facts)

    def compose_one(self, draft: _Draft, scatter: Scatter, anchor: Tensor, order: Tensor, atom: Access, facts: IndexFacts) -> None:
        source = self.tensors[atom.tensor]
        name = fresh(f"{atom.tensor}_sorted", self.taken)
        dims = () if atom.indices == (index_of(self.flat),) else tuple(scatter.variables.index(str(i.var)) for i in atom.indices)

        def compute() -> Tensor:
            return source[tuple(_position(anchor, order, d).long() for d in dims)] if dims else source.reshape(-1)[order.long()]

        draft.arrays[name] = _kept(facts_of(source), ("composed", facts.serial, dims), compute)
        draft.baked.setdefault(atom.tensor)
        if atom.tensor in draft.padded:
            draft.padded.add(name)
        new = Access(name, (index_of(self.slot),))
        draft.factors = tuple(_replaced(f, atom, new) for f in draft.factors)

    def unrolled(self, draft: _Draft) -> Prepared | None:
        """Every index tensor's entries become constants of straight-line code, if there are few and all are declared constant."""
        reads = index_reads(self.problem, self.term)
        names = tuple(dict.fromkeys(a.tensor for a in reads))
        forced = self.wishes.settings.scatter == "unrolled"
        over = tuple(dict.fromkeys(v for a in reads for v in variables(a)))
        count = math.prod(draft.extents[v] for v in over)
        if any(n not in self.tensors for n in names):
            return None  # a Python number is not known when code is written
        if self.reduce != "sum" or not names or count > UNROLL_POINTS or not (forced or all(facts_of(self.tensors[n]).constant for n in names)):
            return None
        plain = {v for e in (draft.target,) for i in e.indices if i.var for v in (i.var,)}
        if set(over) & plain or any(self.tensors[n].numel() > UNROLL_POINTS for n in names):
            return None
        host = {n: _kept(facts_of(self.tensors[n]), "host", lambda t=self.tensors[n]: t.tolist()) for n in names}
        points = tuple(self.points(draft, over, host))
        draft.baked |= dict.fromkeys(names)
        draft.why.append(f"{', '.join(names)} are constants of the code")
        places = math.prod(int(size) for size, i in zip(self.problem.shape, draft.target.indices, strict=True) if i.var is None)
        prepared = self.finish(draft, "unrolled", fill=len({target for target, _ in points}) < places)
        kept = tuple(v for v in dict.fromkeys(v for i in draft.target.indices for v in variables(i)) if v not in over)
        summed = tuple(v for v in self.summed(draft) if v not in over)
        if not kept or not points or not forced and self.leader_innermost(draft) & set(summed):
            return None  # rows of the largest factor lie along a summed variable, which straight-line code walks one by one
        n, m = kept[-1:], kept[:-1][-1:]
        roles = Contraction(m, n, (), summed, (), kept[:-2], False)
        return replace(prepared, plan=replace(prepared.plan, pattern=Pattern(over, points), roles=roles, padded=frozenset()))

    def leader_innermost(self, draft: _Draft) -> set[str]:
        """Variables along the unit stride of the factor that has the most elements."""
        reads = [f for f in draft.factors if isinstance(f, Access) and f.tensor in self.tensors and f.indices]
        leader = max(reads, key=lambda f: self.tensors[f.tensor].numel())
        tensor = self.tensors[leader.tensor]
        return {v for d, i in enumerate(leader.indices) if tensor.stride(d) == 1 and tensor.shape[d] > 1 for v in variables(i)}

    def points(self, draft: _Draft, over: tuple[str, ...], host: Mapping[str, Any]) -> Iterator[tuple[Access, tuple[Expr, ...]]]:
        for values in itertools.product(*(range(draft.extents[v]) for v in over)):
            at = dict(zip(over, values, strict=True))
            present = [True]
            exprs = [_constant(e, at, host, draft.padded, present) for e in (draft.target, *draft.factors)]
            if present[0]:
                yield exprs[0], tuple(exprs[1:])  # type: ignore[misc]

    # --- what all strategies share ---

    def check_supported(self) -> None:
        problem = self.problem
        if problem.target_read:
            raise CannotFuse("the output is also read on the right side")
        for name, kind in problem.kinds.items():
            if kind.dtype not in _TRITON:
                raise CannotFuse(f"{name} holds {str(kind.dtype).removeprefix('torch.')}")
        if problem.dtype == torch.bool or problem.dtype not in _TRITON:
            raise CannotFuse(f"the result is {str(problem.dtype).removeprefix('torch.')}")
        if self.reduce != "sum" and problem.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64):
            raise CannotFuse(f"{self.reduce} of {str(problem.dtype).removeprefix('torch.')}")
        if any(kind.device is not None and kind.device != problem.device for kind in problem.kinds.values()):
            raise CannotFuse("a 0-d tensor is on another device")
        if len(set(variables(self.term.value)) | set(variables(problem.statement.target))) > 24:
            raise CannotFuse("more than 24 index variables")

    def draft(self) -> _Draft:
        extents = {name: int(extent) for name, extent in self.problem.extents.items() if name in self.term.variables}
        used = {a.tensor for f in (*self.term.factors, self.problem.statement.target) for a in accesses(f)}
        padded = {name for name in self.problem.padded & used & self.tensors.keys() if facts_of(self.tensors[name]).padded}
        target = self.problem.statement.target
        return _Draft(Access(target.tensor, target.indices), self.term.factors, extents, padded)

    def summed(self, draft: _Draft) -> tuple[str, ...]:
        kept = set(variables(draft.target))
        return tuple(v for v in dict.fromkeys(v for f in draft.factors for v in variables(f)) if v not in kept)

    def roles(self, draft: _Draft, absorbed: tuple[str, ...] = (), allow_dot: bool = True) -> Contraction:
        kept = tuple(v for v in variables(draft.target) if v not in absorbed)
        kept = tuple(v for i in draft.target.indices for v in variables(i) if v in kept and v not in absorbed)
        summed = tuple(v for v in self.summed(draft) if v not in absorbed)
        roles = Roles(draft.factors, tuple(dict.fromkeys(kept)), summed, draft.extents, draft.row, draft.segment, absorbed)
        wish = self.wishes.settings.dot
        allowed = allow_dot and wish != "never" and self.reduce == "sum" and self.accumulator() == "float32" and self.operand(draft) in ("float16", "bfloat16", "float32")
        return contraction(roles, allow_dot=allowed, force_dot=wish == "always")

    def operand(self, draft: _Draft) -> str:
        """The dtype that every factor of a matrix product is brought to."""
        dtype: torch.dtype | None = None
        for factor in draft.factors:
            for access in accesses(factor, nested=False):
                kind = self.problem.kinds.get(access.tensor)
                if kind is not None and kind.strength == 2:
                    dtype = kind.dtype if dtype is None else torch.promote_types(dtype, kind.dtype)
        return _TRITON.get(dtype, "") if dtype is not None else ""

    def accumulator(self) -> str:
        name = _TRITON[self.problem.dtype]
        if name in _ACCUMULATOR:
            widest = _TRITON.get(_promoted(self.problem, self.term), name)
            return "float64" if "float64" in (widest, name) else "float32"
        return "int64"

    def finish(self, draft: _Draft, strategy: str, *, fill: bool, absorbed: tuple[str, ...] = (), onehot: int = -1, allow_dot: bool = True) -> Prepared:
        roles = self.roles(draft, absorbed, allow_dot)
        accumulator = self.accumulator()
        segment = Segment(draft.row, draft.segment, tiled=not roles.dot) if draft.segment else None
        used = {a.tensor for f in (*draft.factors, draft.target) for a in accesses(f)}
        kinds = {name: _TRITON[kind.dtype] for name, kind in self.problem.kinds.items() if name in used}
        kinds |= {name: _TRITON[array.dtype] for name, array in draft.arrays.items()}
        numbers = tuple(n for n, kind in self.problem.kinds.items() if kind.device is None and n in used)
        if numbers and accumulator == "float64":
            raise CannotFuse("a Python number would be passed in float32 to a float64 kernel; pass it as a 0-d tensor")
        half = _TRITON[self.problem.dtype] != accumulator
        plan = Plan(
            statement=self.problem.statement.text or str(self.problem.statement),
            target=draft.target,
            factors=draft.factors,
            reduce=self.reduce,
            roles=roles,
            strategy=strategy,
            accumulate=self.wishes.accumulate and strategy != "atomic",
            kinds=tuple(sorted(kinds.items())),
            padded=frozenset(draft.padded),
            accumulator=accumulator,
            operand=self.operand(draft) if roles.dot else "",
            precision=self.wishes.precision if roles.dot and self.operand(draft) == "float32" else "",
            segment=segment,
            onehot=onehot,
            wide=self.wide(draft),
            why=tuple(draft.why),
            numbers=numbers,
        )
        return Prepared(plan, draft.extents, draft.arrays, draft.views, draft.segments, fill, strategy == "atomic" and half, tuple(draft.baked))

    def wide(self, draft: _Draft) -> bool:
        """Whether any offset can pass 2**31 elements."""
        reach = [sum((s - 1) * abs(st) for s, st in zip(t.shape, t.stride(), strict=True)) for t in (*self.tensors.values(), *draft.arrays.values()) if t.numel()]
        return max([*reach, math.prod(int(s) for s in self.problem.shape)], default=0) >= 2**31 - 1


def _promoted(problem: Problem, term: Term) -> torch.dtype:
    dtype = problem.dtype
    for factor in term.factors:
        for access in accesses(factor, nested=False):
            kind = problem.kinds.get(access.tensor)
            if kind is not None and kind.strength == 2 and kind.dtype.is_floating_point:
                dtype = torch.promote_types(dtype, kind.dtype)
    return dtype


def _flattens(tensor: Tensor, at: int, count: int) -> bool:
    """Whether dimensions ``at .. at+count`` can be viewed as one."""
    for d in range(at, at + count - 1):
        if tensor.shape[d] > 1 and tensor.stride(d) != tensor.stride(d + 1) * tensor.shape[d + 1]:
            return False
    return True


def _kept(facts: IndexFacts, key: object, compute):  # type: ignore[no-untyped-def]
    """A value derived from an index tensor, computed once and kept with its facts."""
    if key not in facts.derived:
        facts.derived[key] = compute()
    return facts.derived[key]


def _sorted(anchor: Tensor, rows: int) -> tuple[Tensor, Segments]:
    flat = anchor.reshape(-1)
    values, order = torch.sort(flat, stable=True)
    small = torch.int32 if flat.numel() < 2**31 else torch.int64
    return order.to(small), segments(values, rows)


def _inverse(anchor: Tensor, dim: int, rows: int) -> Tensor | None:
    """``inverse[.., y, ..] = x`` where ``anchor[.., x, ..] = y``, -1 where there is none; None where two x share a y."""
    lines = anchor.movedim(dim, -1).reshape(-1, anchor.shape[dim])
    present = lines >= 0
    line = torch.arange(lines.shape[0], device=anchor.device)[:, None]
    flat = torch.where(present, line * rows + lines.long(), lines.shape[0] * rows)
    taken = torch.zeros(lines.shape[0] * rows + 1, dtype=torch.int32, device=anchor.device)
    taken.index_add_(0, flat.reshape(-1), present.reshape(-1).to(torch.int32))
    if bool((taken > 1).any()):
        return None
    inverse = torch.full((lines.shape[0] * rows + 1,), -1, dtype=torch.int32, device=anchor.device)
    inverse[flat.reshape(-1)] = torch.arange(anchor.shape[dim], device=anchor.device, dtype=torch.int32).expand_as(lines).reshape(-1)
    inverse[-1] = -1
    shape = [s for d, s in enumerate(anchor.shape) if d != dim]
    return inverse[:-1].reshape(*shape, rows).movedim(-1, dim).contiguous()


def _position(anchor: Tensor, order: Tensor, dim: int) -> Tensor:
    after = math.prod(anchor.shape[dim + 1 :])
    return (order.long() // after % anchor.shape[dim]).to(order.dtype)


def _replaced(expr: Expr, old: Access, new: Access) -> Expr:
    """Replace an access that stands in index position."""

    def in_index(index: Affine) -> Affine:
        return Affine(tuple((c, new if a == old else in_access(a)) for c, a in index.terms), index.offset)

    def in_access(atom: Var | Access) -> Var | Access:
        return Access(atom.tensor, tuple(in_index(i) for i in atom.indices), atom.span) if isinstance(atom, Access) else atom

    return rewrite(expr, lambda access: in_access(access))  # type: ignore[arg-type,return-value]


def _constant(expr: Expr, at: Mapping[str, int], host: Mapping[str, Any], padded: set[str], present: list[bool]) -> Expr:
    """The expression at one point of the unrolled variables, its index tensors replaced by their values."""

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
        fixed = sum(c * value(a) for c, a in old.terms if not (isinstance(a, Var) and a.name not in at))
        return Affine(tuple(free), old.offset + fixed)

    return rewrite(expr, lambda access: Access(access.tensor, tuple(index(i) for i in access.indices)))


__all__ = ["INTEGERS", "CannotFuse", "Prepared", "Wishes", "prepare"]
