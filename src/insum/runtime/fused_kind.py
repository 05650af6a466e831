"""What all calls of one kind share that are generated kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from insum.compat.streams import stream_getter
from insum.lang.bind import Problem
from insum.lang.expr import accesses
from insum.plan.config import Choice
from insum.plan.draft import Wishes
from insum.plan.sizes import BASE, OUT
from insum.plan.uses import Use
from insum.runtime import classify
from insum.runtime.shelf import Programs, QuestionTree, Shelf, wishes_of
from insum.runtime.unseen import Unseen

if TYPE_CHECKING:
    from insum.runtime.fused import FusedCall

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
    def call(self) -> Callable[[tuple[int, ...], tuple[int, ...], Mapping[str, int]], FusedCall]:
        """Makes the call of certain sizes."""
        from insum.runtime.fused import FusedCall  # which rests on this

        return functools.partial(FusedCall, self)

    @functools.cached_property
    def exact(self) -> tuple[int, ...]:
        """Places, among all extents, of those that all tensors of a layer share."""
        return tuple(k for k, v in enumerate(self.problem.extents) if v not in self.runs)


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
