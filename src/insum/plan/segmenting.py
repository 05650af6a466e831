"""Strategies that give each output row its own entries: segments of a sorted index, an index sorted
once, an inverse table.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import torch
from torch import Tensor

from insum.lang.expr import Access, Affine, Expr, Var, accesses, fresh, index_of, rewrite, variables
from insum.plan.draft import Draft, Prepared, remembered
from insum.plan.facts import IndexFacts, facts_of
from insum.plan.packing import Packing
from insum.plan.rewrite import Merge, Scatter, merge_of, substitute
from insum.plan.schedule import Segments, scaled, segments

#: An inverse index table may have this many places per entry of the index.
INVERT_UP_TO = 2
#: All tensors together are this many times a sorted copy of one index tensor, if it is made.
COMPOSE_SHARE = 32


class Segmenting(Packing):
    """Scatter without atomics: every place of the output is written once."""

    def segmented(self, draft: Draft, scatter: Scatter, anchor: Tensor) -> Prepared:
        draft.why.append(f"{scatter.access.tensor} is sorted")
        self.to_segments(draft, scatter, anchor)
        return self.finish(draft, "segment", fill=False)

    def to_segments(self, draft: Draft, scatter: Scatter, anchor: Tensor) -> None:
        """Output rows own runs of the index; a summed variable that always follows it is merged,
        padding at its end dropped.
        """
        rows = int(self.problem.shape[scatter.dim])
        base = remembered(
            facts_of(anchor), ("segments", rows), lambda: segments(anchor.reshape(-1), rows)
        )
        together = scatter.variables
        summed = [v for v in self.summed(draft) if v not in together]
        merge = next((m for q in summed if (m := self.merge(draft, (*together, q)))), None) or (
            self.merge(draft, together) if len(together) > 1 else None
        )
        width = 1
        if merge is not None:
            width = math.prod(draft.extents[v] for v in merge.variables if v not in together)
            self.apply_merge(draft, merge)
        slot = merge.into if merge else together[0]
        if width > 1 or merge and len(merge.variables) > len(together):
            base = self.widened(draft, base, width, slot, facts_of(anchor))
        self.to_rows(draft, scatter, base, slot)

    def merge(self, draft: Draft, together: tuple[str, ...]) -> Merge | None:
        merge = merge_of(draft.factors, together, self.slot)
        if merge is None or not all(
            _flattens(self.tensors[t], at, len(together))
            for t, at in merge.dims
            if t in self.tensors
        ):
            return None
        return merge

    def apply_merge(self, draft: Draft, merge: Merge) -> None:
        draft.factors = tuple(merge(f) for f in draft.factors)
        draft.views |= {t: (at, len(merge.variables)) for t, at in merge.dims}
        draft.extents[merge.into] = math.prod(draft.extents[v] for v in merge.variables)

    def widened(
        self, draft: Draft, base: Segments, width: int, slot: str, rows_from: IndexFacts
    ) -> Segments:
        reads = {
            a.tensor for f in draft.factors for a in accesses(f) if a.indices == (index_of(slot),)
        }
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

        result, trimmed = remembered(facts, key, compute)
        if trimmed:
            draft.padded -= reads
            draft.why.append("padding ends each row and is skipped")
        return result

    def to_rows(self, draft: Draft, scatter: Scatter, base: Segments, slot: str) -> None:
        draft.row, draft.segment, draft.segments = self.row, slot, base
        draft.extents |= {self.row: base.rows}
        indices = tuple(
            index_of(self.row) if d == scatter.dim else i
            for d, i in enumerate(draft.target.indices)
        )
        draft.target = Access(draft.target.tensor, indices)
        self.unpad(draft, scatter.access.tensor)

    def unpad(self, draft: Draft, name: str) -> None:
        """The target no longer reads this index tensor: its padding matters only where the right
        side reads it too.
        """
        if name not in {a.tensor for f in draft.factors for a in accesses(f)}:
            draft.padded.discard(name)

    def sorted_once(
        self, draft: Draft, scatter: Scatter, anchor: Tensor, facts: IndexFacts
    ) -> Prepared:
        """Sort the index once, keep the order with the tensor, and walk the entries in that order:
        segments again.
        """
        draft.why.append(f"{scatter.access.tensor} was sorted once")
        rows = int(self.problem.shape[scatter.dim])
        flat_order, base = remembered(facts, ("sorted", rows), lambda: _sorted(anchor, rows))
        slot = self.slot
        draft.extents[slot] = anchor.numel()
        order_name = fresh("order", self.taken)
        self.compose(draft, scatter, anchor, flat_order, facts)
        merged = self.merge(draft, scatter.variables) if len(scatter.variables) > 1 else None
        if merged is not None:
            self.apply_merge(draft, replace(merged, into=self.flat))
        through = Affine(((1, Access(order_name, (index_of(slot),))),))
        change = (
            {self.flat: through}
            if merged
            else self.positions(draft, scatter, anchor, flat_order, facts, through)
        )
        draft.factors = tuple(substitute(f, change) for f in draft.factors)
        if any(a.tensor == order_name for f in draft.factors for a in accesses(f)):
            draft.arrays[order_name] = flat_order
        self.to_rows(draft, scatter, base, slot)
        return self.finish(draft, "segment", fill=False)

    def inverted(
        self, draft: Draft, scatter: Scatter, anchor: Tensor, facts: IndexFacts
    ) -> Prepared | None:
        """Where the other variables fix the scattered one (a neighbour table), the scatter is a
        gather through the inverse table.
        """
        if len(scatter.variables) < 2 or not self.tiles_scatter(draft, scatter):
            return None
        dim = max(range(anchor.dim()), key=lambda d: anchor.shape[d])
        if scatter.variables[dim] not in {v for f in draft.factors for v in variables(f)}:
            # the value does not depend on the inverted variable: nothing would mask absent points
            return None
        rows = int(self.problem.shape[scatter.dim])
        if rows * (anchor.numel() // max(1, anchor.shape[dim])) > INVERT_UP_TO * anchor.numel():
            return None
        table = remembered(facts, ("inverse", dim, rows), lambda: _inverse(anchor, dim, rows))
        if table is None:
            return None
        var = scatter.variables[dim]
        read = (
            self.mirrored(draft, scatter, var)
            if isinstance(table, str)
            else self.tabled(draft, scatter, var, table)
        )
        draft.factors = tuple(substitute(f, {var: Affine(((1, read),))}) for f in draft.factors)
        draft.target = Access(
            draft.target.tensor,
            tuple(
                index_of(self.row) if d == scatter.dim else i
                for d, i in enumerate(draft.target.indices)
            ),
        )
        draft.extents[self.row] = rows
        self.unpad(draft, scatter.access.tensor)
        self.packed(draft, facts)
        return self.finish(draft, "store", fill=False)

    def tabled(self, draft: Draft, scatter: Scatter, var: str, table: Tensor) -> Access:
        """A read of the inverse table, which is kept with the index tensor."""
        name = fresh(f"{scatter.access.tensor}_inverse", self.taken)
        draft.why.append(f"{scatter.access.tensor} has an inverse table")
        draft.arrays[name] = table
        draft.padded.add(name)
        return Access(name, tuple(index_of(self.row if v == var else v) for v in scatter.variables))

    def mirrored(self, draft: Draft, scatter: Scatter, var: str) -> Access:
        """A read of the index tensor itself, the other variables backwards: an offset leads back
        where its opposite leads to.
        """
        draft.why.append(f"{scatter.access.tensor}, read backwards, is its own inverse table")
        backwards = {v: Affine(((-1, Var(v)),), draft.extents[v] - 1) for v in scatter.variables}
        return Access(
            scatter.access.tensor,
            tuple(index_of(self.row) if v == var else backwards[v] for v in scatter.variables),
        )

    def positions(
        self,
        draft: Draft,
        scatter: Scatter,
        anchor: Tensor,
        order: Tensor,
        facts: IndexFacts,
        through: Affine,
    ) -> dict[str, Affine]:
        """Each scattered variable as an array over the sorted entries."""
        if len(scatter.variables) == 1:
            return {scatter.variables[0]: through}
        change: dict[str, Affine] = {}
        used = {v for f in draft.factors for v in variables(f)}
        for dim, var in enumerate(scatter.variables):
            if var in used:
                name = fresh(f"{var}_order", self.taken)
                draft.arrays[name] = remembered(
                    facts, ("position", dim), functools.partial(_position, anchor, order, dim)
                )
                change[var] = Affine(((1, Access(name, (index_of(self.slot),))),))
        return change

    def compose(
        self, draft: Draft, scatter: Scatter, anchor: Tensor, order: Tensor, facts: IndexFacts
    ) -> None:
        """Index tensors over the scattered variables are gathered into sorted order once, so that
        the kernel reads them in a row.

        Left alone where the copy would be a noticeable part of all memory: the kernel then reads
        them through the order.
        """
        mine = set(scatter.variables)
        total = sum(t.numel() * t.element_size() for t in self.tensors.values())
        if len(mine) == 1 and COMPOSE_SHARE * order.numel() * order.element_size() > total:
            return
        for factor in draft.factors:
            for access in list(accesses(factor)):
                for index in access.indices:
                    for _, atom in index.terms:
                        if (
                            isinstance(atom, Access)
                            and atom.tensor in self.tensors
                            and atom.indices
                            and all(i.var in mine for i in atom.indices)
                        ):
                            self.compose_one(draft, scatter, anchor, order, atom, facts)

    def compose_one(
        self,
        draft: Draft,
        scatter: Scatter,
        anchor: Tensor,
        order: Tensor,
        atom: Access,
        facts: IndexFacts,
    ) -> None:
        source = self.tensors[atom.tensor]
        name = fresh(f"{atom.tensor}_sorted", self.taken)
        dims = tuple(scatter.variables.index(str(i.var)) for i in atom.indices)

        def compute() -> Tensor:
            return source[tuple(_position(anchor, order, d).long() for d in dims)]

        draft.arrays[name] = remembered(facts_of(source), ("composed", facts.serial, dims), compute)
        draft.baked.setdefault(atom.tensor)
        if atom.tensor in draft.padded:
            draft.padded.add(name)
        new = Access(name, (index_of(self.slot),))
        draft.factors = tuple(_replaced(f, atom, new) for f in draft.factors)


def _flattens(tensor: Tensor, at: int, count: int) -> bool:
    """Whether dimensions ``at .. at+count`` can be viewed as one."""
    return all(
        tensor.shape[d] <= 1 or tensor.stride(d) == tensor.stride(d + 1) * tensor.shape[d + 1]
        for d in range(at, at + count - 1)
    )


def _sorted(anchor: Tensor, rows: int) -> tuple[Tensor, Segments]:
    flat = anchor.reshape(-1)
    values, order = torch.sort(flat, stable=True)
    small = torch.int32 if flat.numel() < 2**31 else torch.int64
    return order.to(small), segments(values, rows)


MIRRORED = "mirrored"


def _inverse(anchor: Tensor, dim: int, rows: int) -> Tensor | str | None:
    """``inverse[.., y, ..] = x`` where ``anchor[.., x, ..] = y``, -1 where there is none; None
    where two x share a y.

    A table that equals the anchor with its other dimensions reversed is not kept: `MIRRORED` says
    so.
    """
    lines = anchor.movedim(dim, -1).reshape(-1, anchor.shape[dim])
    present = lines >= 0
    line = torch.arange(lines.shape[0], device=anchor.device)[:, None]
    flat = torch.where(present, line * rows + lines.long(), lines.shape[0] * rows)
    taken = torch.zeros(lines.shape[0] * rows + 1, dtype=torch.int32, device=anchor.device)
    taken.index_add_(0, flat.reshape(-1), present.reshape(-1).to(torch.int32))
    if bool((taken > 1).any()):
        return None
    inverse = torch.full((lines.shape[0] * rows + 1,), -1, dtype=torch.int32, device=anchor.device)
    inverse[flat.reshape(-1)] = (
        torch.arange(anchor.shape[dim], device=anchor.device, dtype=torch.int32)
        .expand_as(lines)
        .reshape(-1)
    )
    inverse[-1] = -1
    shape = [s for d, s in enumerate(anchor.shape) if d != dim]
    table = inverse[:-1].reshape(*shape, rows).movedim(-1, dim)
    backwards = anchor.flip([d for d in range(anchor.dim()) if d != dim])
    same = rows == anchor.shape[dim] and torch.equal(table, backwards.clamp(min=-1).to(table.dtype))
    return MIRRORED if same else table.contiguous()


def _position(anchor: Tensor, order: Tensor, dim: int) -> Tensor:
    after = math.prod(anchor.shape[dim + 1 :])
    return (order.long() // after % anchor.shape[dim]).to(order.dtype)


def _replaced(expr: Expr, old: Access, new: Access) -> Expr:
    """Replace an access that stands in index position."""

    def in_index(index: Affine) -> Affine:
        return Affine(
            tuple((c, new if a == old else in_access(a)) for c, a in index.terms), index.offset
        )

    def in_access(atom: Var | Access) -> Var | Access:
        return (
            Access(atom.tensor, tuple(in_index(i) for i in atom.indices), atom.span)
            if isinstance(atom, Access)
            else atom
        )

    return rewrite(expr, lambda access: in_access(access))  # type: ignore[arg-type,return-value]
