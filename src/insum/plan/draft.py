"""One product of a statement on its way to a plan: what is planned, and the drafts that strategies
make of it.

Everything here is a value. A strategy takes a draft and gives another, or a plan.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from insum.lang.bind import Problem
from insum.lang.expand import ProductTerm
from insum.lang.expr import Access, Expr, accesses, fresh, names_of, variables
from insum.lang.types import NARROW_FLOATS, infer, promoted, widened
from insum.plan.library import HALVES
from insum.plan.plan import Bound, Plan, Segment
from insum.plan.questions import Ask, AskExact, AskFacts, AskInside, Known
from insum.plan.recipes import Packed, PackedByStep, RecipeArray, RowRecipe, SizeExpr
from insum.plan.roles import Contraction, Roles, contraction
from insum.plan.sizes import BASE, OUT, SizeClass, Strides, contiguous, power_of_two
from insum.plan.substitution import Scatter
from insum.plan.uses import Use
from insum.settings import SettingValues

TRITON = {
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
    torch.float8_e4m3fn: "float8e4nv",
    torch.float8_e5m2: "float8e5",
}
_ACCUMULATOR = {
    "float16": "float32",
    "bfloat16": "float32",
    "float32": "float32",
    "float64": "float64",
}
#: A buffer is small where what is read is at least this many times its size.
BUFFER_SHARE = 8
#: What buffers for the result may take, whatever is read: no more than libraries of dense products
#: have for themselves.
SMALL_BYTES = 2**25


class CannotFuse(Exception):
    """There is no fused kernel for this statement; the text says why. Never reaches the user unless
    fusion is required.
    """


@dataclass(frozen=True, slots=True)
class Wishes:
    """What decides between strategies besides the statement: settings, determinism, matmul
    precision.
    """

    settings: SettingValues
    deterministic: bool
    precision: str  # "ieee", "tf32x3" or "tf32"
    base: str  # what is added to: the output itself (`OUT`), `BASE`, or nothing
    architecture: str = "sm_90"  # what the first guess of a config is made for

    @property
    def accumulate(self) -> bool:
        """Whether there are values to start from."""
        return bool(self.base)


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A plan, and everything that its launches need beside the caller's tensors."""

    plan: Plan
    extents: Mapping[str, int]  # typical ones
    sizes: SizeClass
    arrays: Mapping[str, RecipeArray]
    segments: RowRecipe | Packed | PackedByStep | None
    fill: bool  # the kernel does not write every place, or adds to what is there
    #: ... unless these two sizes are equal: so many places are written, and so many there are.
    covers: tuple[SizeExpr, SizeExpr] | None = None
    #: ... or unless a dimension has just as many places as a pattern writes.
    written: tuple[int, int] | None = None
    multiples: Mapping[str, int] = field(default_factory=dict)  # of variables of our own
    buffers: int = 0  # buffers for the result that are little (`Subject.small_buffers`)
    altogether: int = 0  # those that are, whatever is read, if the result is rounded from them
    rounds: bool = False  # whether it would be, by one launch more
    longest: int = 0  # entries of a row, a power of two; 0 where nothing is known of them
    entries: int = 0

    def shown(self) -> dict[str, str]:
        """The classes of all extents, for people."""
        own = {v: f"<={power_of_two(n)}" for v, n in self.extents.items()}
        own |= {v: str(n) for v, n in self.multiples.items()}
        return own | {v: str(extent) for v, extent in self.sizes.extents.items()}


@dataclass(frozen=True, slots=True)
class Draft:
    """A product as it is rewritten for a strategy."""

    target: Access
    factors: tuple[Expr, ...]
    extents: Mapping[str, int]
    padded: frozenset[str]
    arrays: Mapping[str, RecipeArray] = field(default_factory=dict)
    views: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    made: Mapping[str, SizeExpr] = field(default_factory=dict)  # extents of variables of our own
    multiples: Mapping[str, int] = field(default_factory=dict)
    segments: RowRecipe | Packed | PackedByStep | None = None
    row: str = ""
    segment: str = ""
    home: Access | None = None  # the index that rows are made of, as the right side reads it
    longest: int = 0
    entries: int = 0
    idle: Access | None = None
    bounds: tuple[Bound, ...] = ()
    why: tuple[str, ...] = ()

    def because(self, reason: str) -> Draft:
        return replace(self, why=(*self.why, reason))

    def reads(self) -> set[str]:
        """Names of the tensors and arrays that the right side reads."""
        return {a.tensor for f in self.factors for a in accesses(f)}

    def summed(self) -> tuple[str, ...]:
        kept = set(variables(self.target))
        found = dict.fromkeys(v for f in self.factors for v in variables(f))
        return tuple(v for v in found if v not in kept)

    def without_padding(self, name: str) -> Draft:
        """Where the target no longer reads an index tensor, its padding matters only if the right
        side reads it too.
        """
        return self if name in self.reads() else replace(self, padded=self.padded - {name})


@dataclass(frozen=True)
class Subject:
    """What is planned: one product of a problem, for a class of sizes."""

    problem: Problem
    term: ProductTerm
    sizes: SizeClass
    wishes: Wishes
    uses: tuple[Use, ...]
    wraps: frozenset[str]
    ask: Ask

    # --- the statement ---

    @property
    def reduce(self) -> str:
        operators = {"=": "sum", "+=": "sum", "max=": "max", "min=": "min"}
        return operators[self.problem.statement.operator]

    @property
    def is_ordered(self) -> bool:
        """Whether contributions must meet in one order: a maximum is the same in all."""
        return self.wishes.deterministic and self.reduce == "sum"

    def name(self, wanted: str, draft: Draft | None = None) -> str:
        """A name that neither the statement nor the draft has."""
        taken = names_of(self.problem.statement)
        if draft is not None:
            taken |= {*draft.extents, *draft.arrays}
        return fresh(wanted, taken)

    def rows(self, scatter: Scatter) -> int:
        """How many places the scattered dimension has, typically."""
        return self.sizes.shape[scatter.dim]

    def is_open(self, var: str) -> bool:
        """Whether nothing bounds the extent of a variable."""
        found = self.sizes.extents.get(var)
        return found is None or found.open

    # --- index tensors ---

    def known(self, name: str) -> Known | None:
        """What is known of an index tensor; nothing of one that was never seen."""
        found: Known | None = self.ask(AskFacts(name))
        return found

    def is_tensor(self, name: str) -> bool:
        return self.problem.kinds[name].device is not None

    def may_be_padded(self, name: str) -> bool:
        if name not in self.problem.padded or not self.is_tensor(name):
            return False
        known = self.known(name)
        return known is None or known.padded

    def may_wrap(self, name: str) -> bool:
        """Whether an index tensor may hold negative values that count from the end."""
        known = self.known(name)
        return name in self.wraps and (known is None or known.padded)

    def is_clean(self, name: str) -> bool:
        """Whether the values of an index tensor are places as they are."""
        known = self.known(name)
        if known is None or known.padded and name in self.problem.padded:
            return False
        return not self.may_wrap(name)

    def last(self, var: str) -> int:
        """The last value of a variable, as a number of the code."""
        return int(self.ask(AskExact(var))) - 1

    # --- types ---

    def operand(self, draft: Draft) -> str:
        """The dtype that every factor of a matrix product is brought to."""
        found: list[torch.dtype] = []
        for factor in draft.factors:
            for access in accesses(factor, nested=False):
                kind = self.problem.kinds.get(access.tensor)
                if kind is not None and kind.strength == 2:
                    found.append(kind.dtype)
        if found and NARROW_FLOATS.issuperset(found):
            return "float16"  # which holds them exactly
        return TRITON.get(widened(functools.reduce(promoted, found)), "") if found else ""

    def accumulator(self) -> str:
        return accumulator_of(self.problem)

    # --- memory ---

    def small_buffers(self) -> int:
        """How many buffers for the result are little beside the tensors that are read, or
        altogether, where it need not be rounded from them by one launch more.
        """
        return max(self.buffers_beside(), 0 if self.rounds() else self.buffers_altogether())

    def rounds(self) -> bool:
        """Whether the result is narrower than what contributions meet in."""
        return self.problem.dtype.itemsize <= 2

    def buffers_altogether(self) -> int:
        """How many of them are little, whatever is read."""
        return SMALL_BYTES // self.buffer_bytes() if self.bounds_result() else 0

    def buffers_beside(self) -> int:
        """How many of them are little beside the tensors that are read."""
        return self.bytes_read() // (BUFFER_SHARE * self.buffer_bytes())

    def buffer_bytes(self) -> int:
        held = 8 if "64" in accumulator_of(self.problem) else 4
        return max(1, held * math.prod(self.sizes.shape))

    def bounds_result(self) -> bool:
        """Whether the class of sizes bounds that of the result: it is told by extents, none of
        which is open.
        """
        walked = self.sizes.walked.get(OUT)
        return walked is not None and all(
            dim is not None and not any(self.sizes.extents[v].open for v in dim) for dim in walked
        )

    def bytes_read(self) -> int:
        """Of all tensors that are read, about."""
        kinds = self.problem.kinds
        return sum(n * kinds[name].dtype.itemsize for name, n in self.sizes.numel.items())

    def array(self, recipe: object, part: str, dtype: str = "", rank: int = 1) -> RecipeArray:
        wide = "int64" if self.sizes.wide else "int32"
        return RecipeArray(recipe, part, dtype or wide, rank)  # type: ignore[arg-type]


def accumulator_of(problem: Problem) -> str:
    """The dtype in which contributions meet: one for all products of a statement."""
    name = TRITON[problem.dtype]
    if name not in _ACCUMULATOR:
        return "int64"
    widest = TRITON.get(_promoted(problem), name)
    return "float64" if "float64" in (widest, name) else "float32"


def _promoted(problem: Problem) -> torch.dtype:
    """The wider of the result's dtype and the right side's own."""
    types = {name: kind.type for name, kind in problem.kinds.items()}
    return promoted(problem.dtype, widened(infer(problem.statement.value, types).dtype))


def check_supported(subject: Subject) -> None:
    problem, reduce = subject.problem, subject.reduce
    if problem.target_read:
        raise CannotFuse("the output is also read on the right side")
    for name, kind in problem.kinds.items():
        if kind.dtype not in TRITON:
            raise CannotFuse(f"{name} holds {str(kind.dtype).removeprefix('torch.')}")
        if kind.dtype == torch.float8_e4m3fn and not reads_e4m3(problem.device):
            raise CannotFuse(f"{name} holds float8_e4m3fn, which GPUs before Ada do not read")
    if problem.dtype == torch.bool or problem.dtype not in TRITON:
        raise CannotFuse(f"the result is {str(problem.dtype).removeprefix('torch.')}")
    extremes = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64)
    if reduce != "sum" and problem.dtype not in extremes:
        raise CannotFuse(f"{reduce} of {str(problem.dtype).removeprefix('torch.')}")
    for kind in problem.kinds.values():
        if kind.device is not None and kind.device != problem.device:
            raise CannotFuse("a 0-d tensor is on another device")
    used = set(variables(subject.term.value)) | set(variables(problem.statement.target))
    if len(used) > 24:
        raise CannotFuse("more than 24 index variables")


def reads_e4m3(device: torch.device) -> bool:
    """Whether kernels on a device convert that kind of 8-bit floats."""
    if device.type != "cuda" or torch.version.hip is not None:
        return True
    return torch.cuda.get_device_capability(device) >= (8, 9)


def first_draft(subject: Subject) -> Draft:
    """The product as it was written."""
    problem, term = subject.problem, subject.term
    typical = subject.sizes.typical()
    extents = {name: typical[name] for name in problem.extents if name in term.variables}
    target = problem.statement.target
    used = {a.tensor for f in (*term.factors, target) for a in accesses(f)}
    padded = frozenset(n for n in problem.padded & used if subject.may_be_padded(n))
    return Draft(Access(target.tensor, target.indices), term.factors, extents, padded)


def roles_of(
    subject: Subject,
    draft: Draft,
    absorbed: tuple[str, ...] = (),
    allow_dot: bool = True,
    in_a_row: bool = False,
) -> Contraction:
    in_order = [v for i in draft.target.indices for v in variables(i)]
    kept = tuple(dict.fromkeys(v for v in in_order if v not in absorbed))
    summed = tuple(v for v in draft.summed() if v not in absorbed)
    sizes = subject.sizes
    exact = frozenset(v for v, size in sizes.extents.items() if not size.open) - sizes.runs
    indices = (a for index in draft.target.indices for a in accesses(index))
    places = tuple(frozenset(variables(a)) for a in indices)
    own = draft.row, draft.segment, absorbed, exact, places, in_a_row
    roles = Roles(draft.factors, kept, summed, draft.extents, *own)
    wish, operand = subject.wishes.settings.dot, subject.operand(draft)
    fits = (
        subject.reduce == "sum"
        and subject.accumulator() == "float32"
        and operand in ("float16", "bfloat16", "float32")
    )
    return contraction(
        roles,
        allow_dot=allow_dot and fits and wish != "never",
        force_dot=wish == "always",
        half=operand in ("float16", "bfloat16"),
    )


def finish(
    subject: Subject,
    draft: Draft,
    strategy: str,
    *,
    fill: bool,
    absorbed: tuple[str, ...] = (),
    onehot: int = -1,
    allow_dot: bool = True,
    roles: Contraction | None = None,
) -> Planned:
    """The plan of a draft, with what a program is made of besides."""
    if roles is None:
        in_a_row = strategy in ("store", "atomic") and _in_a_row(subject, draft)
        roles = roles_of(subject, draft, absorbed, allow_dot, in_a_row)
    draft = _with_exact_entries(subject, draft, roles)
    return Planned(
        _plan(subject, draft, strategy, roles, onehot),
        draft.extents,
        subject.sizes,
        draft.arrays,
        draft.segments,
        fill,
        multiples=draft.multiples,
        buffers=subject.small_buffers(),
        altogether=subject.buffers_altogether(),
        rounds=subject.rounds(),
        longest=draft.longest,
        entries=draft.entries,
    )


def _in_a_row(subject: Subject, draft: Draft) -> bool:
    """Whether the places of the output, in the order of its dimensions, lie one after the other; or
    whether an index tells where each is, and not where rows are.
    """
    if draft.bounds or draft.made:
        return False
    indices = draft.target.indices
    if any(isinstance(index.atom, Access) for index in indices):
        told = indices[-1].var is None and all(index.atom is not None for index in indices)
        return told and _counts(subject, variables(draft.target))
    names = {index.var for index in indices}
    plain = None not in names and len(names) == len(indices)
    return plain and subject.sizes.strides[OUT].is_contiguous


def _counts(subject: Subject, names: Sequence[str]) -> bool:
    """Whether points along all of these variables are no more than 32 bits count: indices may lead
    many of them to a few places, so that the size of the output says nothing.
    """
    found = [subject.sizes.extents.get(v) for v in names]
    most = [0 if one is None or one.open else one.most for one in found]
    return 0 not in most and math.prod(most) < 2**31


def _plan(subject: Subject, draft: Draft, strategy: str, roles: Contraction, onehot: int) -> Plan:
    """What the code of a draft depends on."""
    problem = subject.problem
    used = {a.tensor for f in (*draft.factors, draft.target) for a in accesses(f)}
    kinds = {name: TRITON[kind.dtype] for name, kind in problem.kinds.items() if name in used}
    kinds |= {name: array.dtype for name, array in draft.arrays.items()}
    operand = subject.operand(draft) if roles.dot else ""
    return Plan(
        statement=problem.statement.text or str(problem.statement),
        target=draft.target,
        factors=draft.factors,
        reduce=subject.reduce,
        roles=roles,
        strategy=strategy,
        base="" if strategy == "atomic" else subject.wishes.base,
        kinds=tuple(sorted(kinds.items())),
        strides=_strides(subject, draft, used),
        views=tuple(sorted(draft.views.items())),
        made=tuple(sorted(draft.made.items())),
        padded=draft.padded,
        guarded=_guarded(subject, draft),
        wraps=frozenset(n for n in subject.wraps & used if subject.may_wrap(n)),
        accumulator=subject.accumulator(),
        operand=operand,
        precision=_precision(subject, used) if operand == "float32" else "",
        segment=Segment(draft.row, draft.segment, tiled=not roles.dot) if draft.segment else None,
        home=_home(draft, roles),
        onehot=onehot,
        wide=subject.sizes.wide,
        why=draft.why,
        numbers=tuple(n for n in problem.kinds if n in used and not subject.is_tensor(n)),
        idle=draft.idle,
        bounds=draft.bounds,
    )


def _precision(subject: Subject, used: set[str]) -> str:
    """How float32 operands are multiplied. Where others, and the result, are in half precision,
    parts that half precision has not are lost anyway: one product does.
    """
    kinds, precision = subject.problem.kinds, subject.wishes.precision
    read = any(kinds[name].dtype in HALVES for name in used if name in kinds)
    half = read and subject.problem.dtype in HALVES
    return "tf32" if half and precision == "tf32x3" else precision


def _home(draft: Draft, roles: Contraction) -> Access | None:
    """The index that rows are made of, where the right side reads it and rows are in the tile."""
    if draft.home is None or not draft.segment or roles.dot:
        return None
    read = {a for f in draft.factors for a in accesses(f)}
    return draft.home if draft.home in read else None


def _with_exact_entries(subject: Subject, draft: Draft, roles: Contraction) -> Draft:
    """Where entries are joined on the K axis, how long each is: a number of the code, for it is
    divided by.
    """
    if len(roles.k) < 2 or draft.extents[roles.k[1]] == power_of_two(draft.extents[roles.k[1]]):
        return draft
    inner = roles.k[1]
    return replace(draft, extents={**draft.extents, inner: int(subject.ask(AskExact(inner)))})


def _strides(subject: Subject, draft: Draft, used: set[str]) -> tuple[tuple[str, Strides], ...]:
    found = {OUT: subject.sizes.strides[OUT]}
    if subject.wishes.base == BASE:
        found[BASE] = subject.sizes.strides[BASE]
    for name in used:
        if name in draft.arrays:
            found[name] = contiguous(draft.arrays[name].rank)
        elif name in subject.sizes.strides:
            strides = subject.sizes.strides[name]
            found[name] = strides.joined(*draft.views[name]) if name in draft.views else strides
    return tuple(sorted(found.items()))


def _guarded(subject: Subject, draft: Draft) -> frozenset[tuple[str, int]]:
    """Dimensions that are indexed by values which nobody has looked at yet: kernels treat what is
    out of range as absent. Indices of our own making are in range.
    """
    read = {a.tensor for f in draft.factors for a in accesses(f)}
    read |= {a.tensor for i in draft.target.indices for a in accesses(i)}
    target = any(isinstance(a, Access) for i in draft.target.indices for _, a in i.terms)
    found = set()
    for number, use in enumerate(subject.uses):
        name = OUT if use.is_target else use.access.tensor
        if (target if use.is_target else name in read) and not subject.ask(AskInside(number)):
            found.add((name, use.dim))
    return frozenset(found)
