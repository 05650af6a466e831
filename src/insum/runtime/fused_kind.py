"""What all calls of one kind share that are generated kernels, and what one of them is known by."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from insum import memory
from insum.compat.streams import stream_getter
from insum.lang.bind import Problem, Value
from insum.lang.expr import accesses
from insum.plan.config import Choice
from insum.plan.draft import Wishes
from insum.plan.sizes import BASE, OUT
from insum.plan.strategies.unrolling import UNROLL_POINTS
from insum.plan.uses import Use
from insum.runtime import cache, classify
from insum.runtime.shelf import Programs, QuestionTree, Shelf, wishes_of
from insum.runtime.unseen import Unseen

_serial = operator.attrgetter("serial")
_serials = itertools.count()
Classify = Callable[[Mapping[str, Any], tuple[int, ...], tuple[int, ...], Any], tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class FusedKind:
    """What all calls of one kind share.

    Attributes:
        classify: the class of a call's sizes, as a key; the second for calls in place.
        wishes: what decides plans besides the statement; the second for calls in place.
        negated: whether some tensor is to be read as its negative.
        numbers: scalars that are passed as Python numbers.
        coefficients: tensors at the places of index tensors, whose values may be promised.
        unseen: programs for index tensors that were never seen, by class of sizes; for maps of
            kernels by what is known of every map of their kind, too.
        told: programs for index tensors of which all is known, by what that is; what was derived
            from them may decide further.
    """

    programs: Programs
    indices: tuple[str, ...]
    runs: frozenset[str]
    classify: tuple[Classify, Classify]
    wishes: tuple[Wishes, Wishes]
    negated: bool
    numbers: tuple[str, ...]
    coefficients: tuple[str, ...]
    unseen: dict[object, Unseen] = field(default_factory=dict)
    told: dict[object, QuestionTree] = field(default_factory=dict)

    @property
    def problem(self) -> Problem:
        return self.programs.problem

    @functools.cached_property
    def device(self) -> torch.device:
        return self.programs.problem.device

    @functools.cached_property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @functools.cached_property
    def stream(self) -> Callable[[], int]:
        """Tells which stream is the current one."""
        return stream_getter(self.device)

    @functools.cached_property
    def firm(self) -> bool:
        """Whether what is found out about tensors later must change nothing."""
        wishes = self.wishes[0]
        return wishes.deterministic or wishes.settings.tier == "stable"

    @functools.cached_property
    def limits(self) -> tuple[tuple[str, str, int], ...] | None:
        """Of every use its index tensor, what that indexes and where; None where a use is more."""
        uses = self.programs.uses
        if not all(use.tensor for use in uses):
            return None
        return tuple((u.tensor, OUT if u.is_target else u.access.tensor, u.dim) for u in uses)

    @functools.cached_property
    def exact(self) -> tuple[int, ...]:
        """Places, among all extents, of those that all tensors of a layer share."""
        return tuple(k for k, v in enumerate(self.problem.extents) if v not in self.runs)


class SizedCall:
    """A call of certain sizes and strides, and what it is known by: ``spans`` are the ``extents``,
    in the order of the problem's.
    """

    __slots__ = ("extents", "keeps", "kind", "new_class", "serial", "shape", "spans")

    def __init__(
        self,
        kind: FusedKind,
        spans: tuple[int, ...],
        shape: tuple[int, ...],
        extents: Mapping[str, int],
    ) -> None:
        self.kind, self.spans, self.shape, self.extents = kind, spans, shape, extents
        self.serial = next(_serials)
        self.keeps = False  # whether something is kept under this serial
        #: The class of sizes and strides of calls that make their result.
        self.new_class: tuple[Any, ...] | None = None

    def is_by_indices(self, values: Mapping[str, Value]) -> bool:
        """Whether nothing decides what is run but sizes and what is remembered of index tensors."""
        kind = self.kind
        if kind.negated or not kind.indices:
            return False
        if not self.has_few_coefficients(values):
            return True
        entries = [memory.known(values[name]) for name in kind.indices]  # type: ignore[arg-type]
        return not any(entry is not None and entry.declared for entry in entries)

    def has_few_coefficients(self, values: Mapping[str, Value]) -> bool:
        """Whether some tensor is so small that its values become part of the program, where it and
        an index tensor are promised to stay.
        """
        few = 2 * UNROLL_POINTS
        return any(values[name].numel() <= few for name in self.kind.coefficients)  # type: ignore[union-attr]

    def key(self, target: Tensor | None, entries: list[memory.Entry]) -> tuple[object, ...]:
        """What is kept for this call is kept under, with the first of its index tensors."""
        kind = self.kind
        out = None if target is None else target.stride()
        if len(entries) < 2:
            return self.serial, kind.stream(), cache.state["epoch"], out
        others = tuple(map(_serial, entries))
        return self.serial, kind.stream(), cache.state["epoch"], out, others

    def class_key(self, values: Mapping[str, Value], target: Tensor | None) -> tuple[Any, ...]:
        """The class of sizes and strides, by which programs are told apart."""
        classes = self.kind.classify
        if target is not None:
            return classes[1](values, self.spans, self.shape, target)
        if self.new_class is None:
            self.new_class = classes[0](values, self.spans, self.shape, None)
        return self.new_class


def fused_kind(
    problem: Problem,
    uses: tuple[Use, ...],
    wraps: frozenset[str],
    config: Choice | None,
    negated: bool,
    shelf: Shelf,
    *,
    based: bool,
) -> FusedKind:
    """A kind of call as generated kernels; ``shelf``: where its programs are kept; ``based``: new
    results are accumulated from a tensor that is passed as `BASE`.
    """
    runs = classify.running(problem)
    names = dict.fromkeys(a.tensor for use in uses for a in accesses(use.index))
    return FusedKind(
        Programs(problem, uses, wraps, config, shelf),
        tuple(n for n in names if problem.kinds[n].device is not None),
        runs,
        (
            classify.classifier(problem, runs, into=False, based=based),
            classify.classifier(problem, runs, into=True),
        ),
        (wishes_of(BASE if based else "", problem.device), wishes_of(OUT, problem.device)),
        negated,
        tuple(n for n, kind in problem.kinds.items() if kind.device is None),
        _coefficients(problem, runs),
    )


def _coefficients(problem: Problem, runs: frozenset[str]) -> tuple[str, ...]:
    """Floating-point tensors that are read at the places of index tensors and nowhere else."""
    reads = [a for a in accesses(problem.statement.value, nested=False) if a.indices]
    return tuple(
        dict.fromkeys(
            a.tensor
            for a in reads
            if problem.kinds[a.tensor].dtype.is_floating_point
            and all(i.var in runs for i in a.indices)
        )
    )
