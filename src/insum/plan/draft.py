"""What every scatter strategy starts from and ends with: a draft of the rewritten product, and the
plan made of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from insum.lang.bind import Problem, Size, Value
from insum.lang.expand import Term
from insum.lang.expr import Access, Expr, accesses, fresh, names_of, variables
from insum.plan.facts import IndexFacts, facts_of
from insum.plan.plan import Plan, Segment
from insum.plan.rewrite import Scatter
from insum.plan.roles import Contraction, Roles, contraction
from insum.plan.schedule import Segments
from insum.settings import Values

T = TypeVar("T")
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
_ACCUMULATOR = {
    "float16": "float32",
    "bfloat16": "float32",
    "float32": "float32",
    "float64": "float64",
}


class CannotFuse(Exception):
    """There is no fused kernel for this statement; the text says why. Never reaches the user unless
    fusion is required.
    """


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A plan, and everything that its launch needs beside the caller's tensors."""

    plan: Plan
    extents: Mapping[str, int]
    arrays: Mapping[str, Tensor]
    # tensor -> (first dimension, how many) that are flattened into one
    views: Mapping[str, tuple[int, int]]
    segments: Segments | None
    fill: bool  # the kernel does not write every place, or adds to what is there
    # index tensors beside the target's whose values went into arrays or code
    baked: tuple[str, ...] = ()


@dataclass(slots=True)
class Draft:
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
    """What decides between strategies besides the statement: settings, determinism, matmul
    precision.
    """

    settings: Values
    deterministic: bool
    precision: str  # "ieee", "tf32x3" or "tf32"
    accumulate: bool
    architecture: str = "sm_90"  # what the first guess of a config is made for


def index_reads(problem: Problem, term: Term) -> tuple[Access, ...]:
    """Every access of a term, the target's included, that stands in an index."""
    exprs = (problem.statement.target, *term.factors)
    return tuple(
        a
        for e in exprs
        for access in accesses(e)
        for i in access.indices
        for _, a in i.terms
        if isinstance(a, Access)
    )


class Drafting:
    """One product of a statement on its way to a plan."""

    def __init__(
        self, problem: Problem, term: Term, values: Mapping[str, Value], wishes: Wishes
    ) -> None:
        self.problem, self.term, self.values, self.wishes = problem, term, values, wishes
        self.taken = names_of(problem.statement)
        self.row, self.slot, self.flat = (
            fresh(name, self.taken) for name in ("row", "slot", "flat")
        )
        self.reduce = {"=": "sum", "+=": "sum", "max=": "max", "min=": "min"}[
            problem.statement.operator
        ]
        self.tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def check_supported(self) -> None:
        problem = self.problem
        if problem.target_read:
            raise CannotFuse("the output is also read on the right side")
        for name, kind in problem.kinds.items():
            if kind.dtype not in _TRITON:
                raise CannotFuse(f"{name} holds {str(kind.dtype).removeprefix('torch.')}")
        if problem.dtype == torch.bool or problem.dtype not in _TRITON:
            raise CannotFuse(f"the result is {str(problem.dtype).removeprefix('torch.')}")
        if self.reduce != "sum" and problem.dtype not in (
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float64,
            torch.int64,
        ):
            raise CannotFuse(f"{self.reduce} of {str(problem.dtype).removeprefix('torch.')}")
        if any(
            kind.device is not None and kind.device != problem.device
            for kind in problem.kinds.values()
        ):
            raise CannotFuse("a 0-d tensor is on another device")
        if len(set(variables(self.term.value)) | set(variables(problem.statement.target))) > 24:
            raise CannotFuse("more than 24 index variables")

    def draft(self) -> Draft:
        extents = {
            name: int(extent)
            for name, extent in self.problem.extents.items()
            if name in self.term.variables
        }
        used = {
            a.tensor
            for f in (*self.term.factors, self.problem.statement.target)
            for a in accesses(f)
        }
        padded = {
            name
            for name in self.problem.padded & used & self.tensors.keys()
            if facts_of(self.tensors[name]).padded
        }
        target = self.problem.statement.target
        return Draft(Access(target.tensor, target.indices), self.term.factors, extents, padded)

    def summed(self, draft: Draft) -> tuple[str, ...]:
        kept = set(variables(draft.target))
        return tuple(
            v
            for v in dict.fromkeys(v for f in draft.factors for v in variables(f))
            if v not in kept
        )

    def roles(
        self, draft: Draft, absorbed: tuple[str, ...] = (), allow_dot: bool = True
    ) -> Contraction:
        kept = tuple(v for v in variables(draft.target) if v not in absorbed)
        kept = tuple(
            v for i in draft.target.indices for v in variables(i) if v in kept and v not in absorbed
        )
        summed = tuple(v for v in self.summed(draft) if v not in absorbed)
        roles = Roles(
            draft.factors,
            tuple(dict.fromkeys(kept)),
            summed,
            draft.extents,
            draft.row,
            draft.segment,
            absorbed,
        )
        wish = self.wishes.settings.dot
        fits = (
            self.reduce == "sum"
            and self.accumulator() == "float32"
            and self.operand(draft) in ("float16", "bfloat16", "float32")
        )
        return contraction(
            roles, allow_dot=allow_dot and fits and wish != "never", force_dot=wish == "always"
        )

    def tiles_scatter(self, draft: Draft, scatter: Scatter) -> bool:
        """Whether a matrix product would have the scattered variables along one side of its tile:
        sorting would destroy that.
        """
        roles = self.roles(draft)
        return roles.dot and bool(set(scatter.variables) & {roles.m[-1], roles.n[-1]})

    def operand(self, draft: Draft) -> str:
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

    def finish(
        self,
        draft: Draft,
        strategy: str,
        *,
        fill: bool,
        absorbed: tuple[str, ...] = (),
        onehot: int = -1,
        allow_dot: bool = True,
    ) -> Prepared:
        roles = self.roles(draft, absorbed, allow_dot)
        accumulator = self.accumulator()
        segment = Segment(draft.row, draft.segment, tiled=not roles.dot) if draft.segment else None
        used = {a.tensor for f in (*draft.factors, draft.target) for a in accesses(f)}
        kinds = {
            name: _TRITON[kind.dtype] for name, kind in self.problem.kinds.items() if name in used
        }
        kinds |= {name: _TRITON[array.dtype] for name, array in draft.arrays.items()}
        numbers = tuple(
            n for n, kind in self.problem.kinds.items() if kind.device is None and n in used
        )
        if numbers and accumulator == "float64":
            raise CannotFuse(
                "a Python number would be passed in float32 to a float64 kernel; pass it as a "
                "0-d tensor"
            )
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
            precision=self.wishes.precision
            if roles.dot and self.operand(draft) == "float32"
            else "",
            segment=segment,
            onehot=onehot,
            wide=self.wide(draft),
            why=tuple(draft.why),
            numbers=numbers,
        )
        return Prepared(
            plan, draft.extents, draft.arrays, draft.views, draft.segments, fill, tuple(draft.baked)
        )

    def wide(self, draft: Draft) -> bool:
        return is_wide((*self.tensors.values(), *draft.arrays.values()), self.problem.shape)


def is_wide(tensors: Iterable[Tensor], shape: Sequence[Size]) -> bool:
    """Whether any offset into tensors, or into a result of this shape, can pass 2**31 elements."""
    reach = [
        sum((size - 1) * abs(stride) for size, stride in zip(t.shape, t.stride(), strict=True))
        for t in tensors
        if t.numel()
    ]
    return max([*reach, math.prod(int(s) for s in shape)], default=0) >= 2**31 - 1


def _promoted(problem: Problem, term: Term) -> torch.dtype:
    dtype = problem.dtype
    for factor in term.factors:
        for access in accesses(factor, nested=False):
            kind = problem.kinds.get(access.tensor)
            if kind is not None and kind.strength == 2 and kind.dtype.is_floating_point:
                dtype = torch.promote_types(dtype, kind.dtype)
    return dtype


def remembered(facts: IndexFacts, key: object, compute: Callable[[], T]) -> T:
    """A value derived from an index tensor, computed once and kept with its facts."""
    if key not in facts.derived:
        facts.derived[key] = compute()
    value: T = facts.derived[key]
    return value
