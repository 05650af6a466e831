"""How gathered tensors are shared, and how contributions to the left side meet: an ordered list of
rules, of which the first that applies decides.

Each rule is a function of the product and its draft that gives a plan, or None where it does not
apply or would not pay.

- *shared*: an index tensor selects whole matrices, and entries that select the same one are put
  into tiles that share it; then, as below, they are stored or added;
- *store*: every place of the output is written at most once, also where points meet through
  windows, which are then gathered;
- *unrolled*: the index tensors are small and constant, so their entries become constants of the
  code; such a pattern also nests inside of what other index tensors scatter;
- *onehot*: the scattered dimension is small and stays whole in registers;
- *segment*: the index is sorted (or sorting it once pays), so rows of the output own runs of
  entries: no atomics, no zero fill;
- *atomic*: everything else, and entries with matrices of their own, which rows would take apart.
"""

from __future__ import annotations

from insum.plan.draft import (
    CannotFuse,
    Draft,
    Planned,
    Subject,
    check_supported,
    finish,
    first_draft,
)
from insum.plan.strategies.atomics import (
    atomic,
    atomic_for_numbers,
    atomic_is_asked_for,
    atomic_keeps_its_tiles,
    atomic_reads_matrices_once,
)
from insum.plan.strategies.inverting import columns_in_order, inverse
from insum.plan.strategies.one_hot import onehot
from insum.plan.strategies.packing import packed
from insum.plan.strategies.segmenting import segments
from insum.plan.strategies.several import several_indices
from insum.plan.strategies.sharing import shared, shared_rows
from insum.plan.strategies.sorting import sorted_first, sorted_for_heavy_rows
from insum.plan.strategies.storing import several_unique, unique
from insum.plan.strategies.unrolling import nested, unrolled, unrolled_variables
from insum.plan.strategies.windowing import gathered_windows
from insum.plan.substitution import Scatter, scatter_of

#: For one dimension that is written through an index tensor.
SCATTERED = (
    unrolled,
    shared_rows,
    sorted_for_heavy_rows,
    onehot,
    columns_in_order,
    unique,
    atomic_is_asked_for,
    atomic_keeps_its_tiles,
    atomic_reads_matrices_once,
    atomic_for_numbers,
    segments,
    inverse,
    sorted_first,
    atomic,
)


def plan(subject: Subject) -> Planned:
    """Choose a strategy for one product of a statement and rewrite the product for it."""
    check_supported(subject)
    draft = first_draft(subject)
    if not unrolled_variables(subject, draft):  # what is constant needs no tiles
        planned = shared(subject, draft)
        if planned is not None:
            return planned
    planned = gathered_windows(subject, draft)
    if planned is not None:
        return planned
    scatter = scatter_of(subject.problem.statement)
    match scatter:
        case "direct":
            draft, meets = packed(subject, draft)
            return finish(subject, draft, "atomic" if meets else "store", fill=meets)
        case "injective":
            return finish(subject, draft.because("no two points meet"), "store", fill=True)
        case Scatter():
            return _scattered(subject, draft, scatter)
    planned = nested(subject, draft) or several_unique(subject, draft)
    planned = planned or several_indices(subject, draft)
    if planned is not None:
        return planned
    if subject.is_ordered:
        raise CannotFuse("deterministic mode, and indices lead to too many places")
    return finish(subject, draft.because("several scattered indices"), "atomic", fill=True)


def _scattered(subject: Subject, draft: Draft, scatter: Scatter) -> Planned:
    for rule in SCATTERED:
        planned = rule(subject, draft, scatter)
        if planned is not None:
            return planned
    raise CannotFuse("no strategy applies")
