"""Problem + facts about index tensors -> Prepared: the scatter strategy, the rewritten product, and
the arrays it needs.

The strategies, in the order in which they are considered:

- *store*: every place of the output is written at most once;
- *unrolled*: the index tensors are small and declared constant, so their entries become constants
  of the code;
- *onehot*: the scattered dimension is small and stays whole in registers;
- *segment*: the index is sorted (or sorting it once pays), so rows of the output own runs of
  entries: no atomics, no zero fill;
- *atomic*: everything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from insum.lang.bind import Problem, Value
from insum.lang.expand import Term
from insum.plan.draft import CannotFuse, Draft, Prepared, Wishes, index_reads
from insum.plan.facts import facts_of
from insum.plan.patterns import PROMOTE_POINTS, Patterns
from insum.plan.rewrite import Scatter, scatter_of
from insum.plan.segmenting import Segmenting

__all__ = ["PROMOTE_POINTS", "CannotFuse", "Prepared", "Wishes", "index_reads", "prepare"]


def prepare(problem: Problem, term: Term, values: Mapping[str, Value], wishes: Wishes) -> Prepared:
    """Choose a strategy for one product of a statement and rewrite the product for it."""
    return Preparation(problem, term, values, wishes).run()


class Preparation(Segmenting, Patterns):
    """The decision between strategies."""

    def run(self) -> Prepared:
        self.check_supported()
        draft = self.draft()
        scatter = scatter_of(self.problem.statement)
        wished = self.wishes.settings.scatter
        if scatter == "direct":
            meets = self.packed(draft)
            return self.finish(draft, "atomic" if meets else "store", fill=meets)
        if scatter == "injective":
            draft.why.append("no two points meet")
            return self.finish(draft, "store", fill=True)
        if isinstance(scatter, Scatter) and len(self.problem.terms) >= 1:
            return self.scattered(draft, scatter, wished)
        if self.wishes.deterministic:
            raise CannotFuse(
                "deterministic mode, and the output is scattered through several indices"
            )
        draft.why.append("several scattered indices")
        return self.finish(draft, "atomic", fill=True)

    def scattered(self, draft: Draft, scatter: Scatter, wished: str) -> Prepared:
        anchor = self.tensors[scatter.access.tensor]
        facts = facts_of(anchor)
        name = scatter.access.tensor
        clean = not (facts.padded and name in self.problem.padded)
        if facts.passing and not self.wishes.deterministic:
            return self.atomic(draft, f"{name} is seen once")
        if wished == "unrolled" or wished == "auto" and facts.constant:
            unrolled = self.unrolled(draft)
            if unrolled is not None:
                return unrolled
        segmentable = (
            facts.sorted and clean and anchor.is_contiguous() and self.segments_fit(draft, scatter)
        )
        pays = (
            wished == "auto"
            and not segmentable
            and self.onehot_pays(scatter)
            and not self.rows_have_dot(draft, scatter)
        )
        if wished == "onehot" and self.reduce == "sum" or pays:
            return self.onehot(draft, scatter)
        if facts.unique and clean and wished in ("auto", "store"):
            draft.why.append(f"{name} is unique")
            covers = anchor.numel() == self.problem.shape[scatter.dim]
            return self.finish(draft, "store", fill=not covers)
        if wished == "atomic" and not self.wishes.deterministic:
            return self.atomic(draft, "asked for")
        if segmentable:
            if (
                wished != "segment"
                and not self.wishes.deterministic
                and self.atomic_has_dot(draft)
                and not self.segment_has_dot(draft, scatter, anchor)
            ):
                return self.atomic(draft, f"its tiles hold several entries of {name}")
            return self.segmented(draft, scatter, anchor)
        inverted = self.inverted(draft, scatter, anchor, facts) if wished == "auto" else None
        if inverted is not None:
            return inverted
        if (
            wished == "segment"
            or self.wishes.deterministic
            or not self.tiles_scatter(draft, scatter)
        ):
            return self.sorted_once(draft, scatter, anchor, facts)
        return self.atomic(draft, f"{name} is not sorted, and its tiles hold several entries of it")

    def segments_fit(self, draft: Draft, scatter: Scatter) -> bool:
        """Whether entries have one number: an index of one dimension, or of several that every
        tensor can be flattened over.
        """
        return len(scatter.access.indices) == 1 or self.merge(draft, scatter.variables) is not None

    def atomic(self, draft: Draft, why: str) -> Prepared:
        draft.why.append(why)
        return self.finish(draft, "atomic", fill=True)

    def rows_have_dot(self, draft: Draft, scatter: Scatter) -> bool:
        """Whether the entries of one output row are matrix products by themselves, as blocks are:
        rows keep those, a register tile does not.
        """
        roles = self.roles(draft)
        return roles.dot and not set(scatter.variables) & {*roles.m, *roles.n}

    def atomic_has_dot(self, draft: Draft) -> bool:
        return self.roles(draft).dot

    def segment_has_dot(self, draft: Draft, scatter: Scatter, anchor: Tensor) -> bool:
        trial = replace(
            draft,
            extents=dict(draft.extents),
            padded=set(draft.padded),
            arrays={},
            views={},
            why=[],
        )
        self.to_segments(trial, scatter, anchor)
        return self.roles(trial).dot
