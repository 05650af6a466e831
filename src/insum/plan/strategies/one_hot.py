"""A small scattered dimension is kept whole in registers."""

from __future__ import annotations

import math

from insum.lang.expr import variables
from insum.plan.draft import Draft, Planned, Subject, finish, roles_of
from insum.plan.strategies.segmenting import fits
from insum.plan.strategies.sorting import HEAVY_ROW
from insum.plan.substitution import Scatter

#: A scattered dimension up to this size can be kept whole in registers ...
ONEHOT_UP_TO = 64
#: ... provided the other dimensions give the device this much to do.
ONEHOT_WORK = 2048
ONEHOT_POINTS = 4096


def onehot(subject: Subject, draft: Draft, scatter: Scatter) -> Planned | None:
    wished = subject.wishes.settings.scatter
    if subject.reduce != "sum" or wished not in ("auto", "onehot") or subject.sizes.general:
        return None
    if wished == "auto" and not _pays(subject, draft, scatter):
        return None
    draft = draft.because("the scattered dimension is small and stays in registers")
    others = {
        v for d, i in enumerate(draft.target.indices) if d != scatter.dim for v in variables(i)
    }
    absorbed = tuple(v for v in scatter.variables if v not in others)
    roles = roles_of(subject, draft, absorbed)
    # Else the register tile has three axes, too many for a matrix product's.
    tiled = bool({*roles.m, *roles.n} & set(absorbed))
    return finish(
        subject,
        draft,
        "onehot",
        fill=False,
        absorbed=absorbed,
        onehot=scatter.dim,
        allow_dot=tiled,
    )


def _pays(subject: Subject, draft: Draft, scatter: Scatter) -> bool:
    sizes = subject.sizes.typical()
    points = math.prod(sizes[v] for v in scatter.variables)
    kept = variables(subject.problem.statement.target)
    work = math.prod(sizes[v] for v in kept if v not in scatter.variables)
    if subject.rows(scatter) > ONEHOT_UP_TO or work < ONEHOT_WORK or points > ONEHOT_POINTS:
        return False
    if fits(subject, draft, scatter) or _is_sum_of_rows(subject, scatter, work):
        return False
    # The entries of one output row may be matrix products by themselves, as blocks are: rows keep
    # those, a register tile does not.
    roles = roles_of(subject, draft)
    return not (roles.dot and not set(scatter.variables) & {*roles.m, *roles.n})


def _is_sum_of_rows(subject: Subject, scatter: Scatter, row: int) -> bool:
    """Whether an output row is a sum of large rows, and nothing else is summed: where an order of
    the entries is kept with the index tensor, programs that walk those of one row do no work for
    the others.
    """
    if row < HEAVY_ROW or subject.known(scatter.access.tensor) is None:
        return False
    kept = {*variables(subject.problem.statement.target), *scatter.variables}
    return kept >= {*subject.sizes.typical()}
