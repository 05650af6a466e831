"""``mean=``: a sum to which each point gives its share.

How many points a place has follows from the indices alone. So a mean is one statement more than a
sum, which counts them, and is remembered with the index tensors: ``y[d[e],f] mean= x[s[e],f]`` is
``count[d[e]] = 1`` once, and ``y[d[e],f] = x[s[e],f] * share[d[e]]`` with ``share = 1 / count`` at
each call. Gradients of any order are those of that sum.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from insum.bounded import keep
from insum.call.request import Request, RequestSizes, head
from insum.compat.calls import is_plain_call
from insum.compat.placed import while_tracing
from insum.errors import IndexRangeError
from insum.lang.bind import Size, Value
from insum.lang.expand import expand
from insum.lang.expr import (
    Access,
    Call,
    Expr,
    Number,
    Statement,
    accesses,
    fresh,
    names_of,
    product,
    tensors_of,
    variables,
)
from insum.lang.parser import parse
from insum.memory import remembered
from insum.ops.eager import contract
from insum.plan.uses import uses_of
from insum.runtime.check import verify

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class MeanStatements:
    """What a mean is made of.

    Attributes:
        total: the sum, which reads the shares under the name ``share``.
        counting: how many points each place has, or '' where all have as many.
        kept: dimensions of the output by which the counts differ.
        times: variables of which each place has all values, besides.
        padded: index tensors that mark absent entries of what is counted.
        counted: variables of the statement that counts, and ``reads`` the tensors that it reads.
    """

    total: str
    counting: str
    share: str
    kept: tuple[int, ...]
    times: tuple[str, ...]
    padded: tuple[str, ...]
    counted: tuple[str, ...]
    reads: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MeanSizes:
    """What of its sizes a mean has to know: those of the output's dimensions that are counted, and
    of variables; and the kind of its result.
    """

    kept: tuple[Size, ...]
    extents: Mapping[str, Size]
    dtype: torch.dtype
    device: torch.device


#: The variables of a statement, and where each stands alone: dimensions of tensors, of the output
#: under the name ''.
VariablePlaces: TypeAlias = tuple[tuple[str, tuple[tuple[str, int], ...]], ...]
#: A sum without shares, the statement that counts, the output's dimensions in it, variables that it
#: leaves out and those that it has, what it reads, its padded tensors, and what the sum reads as
#: values.
MeanPlan: TypeAlias = tuple[
    str,
    str,
    tuple[int, ...],
    VariablePlaces,
    VariablePlaces,
    tuple[str, ...],
    str,
    tuple[str, ...],
]


@while_tracing
def mean_plan(text: str, padded: str) -> MeanPlan:
    """A mean for a tracer, as values that it takes for constants.

    >>> mean_plan("y[d[e],f] mean= A[e,j] * x[s[e],f,j]", "")[:4]
    ('y[d[e],f] = A[e,j] * x[s[e],f,j]', 'count[d[e]] = 1', (0,), (('j', (('A', 1), ('x', 2))),))
    """
    parts = mean_statements(text, tuple(padded.split(",")) if padded else ())
    statement = parse(text)
    total = str(Statement(statement.target, "=", _whole(statement)))
    values = tuple(a.tensor for a in accesses(statement.value, nested=False))
    return (
        total,
        parts.counting,
        parts.kept,
        tuple((v, _places(statement, v)) for v in parts.times),
        tuple((v, _places(statement, v)) for v in parts.counted),
        parts.reads,
        ",".join(parts.padded),
        values,
    )


def variables_of(statement: Statement) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*variables(statement.target), *variables(statement.value))))


def _places(statement: Statement, name: str) -> tuple[tuple[str, int], ...]:
    """Dimensions that a variable indexes by itself; those of the output last, under ''."""
    target = statement.target
    inner = [a for index in target.indices for a in accesses(index)]
    found = [
        (a.tensor, dim)
        for a in (*inner, *accesses(statement.value))
        for dim, index in enumerate(a.indices)
        if index.var == name
    ]
    own = [("", dim) for dim, index in enumerate(target.indices) if index.var == name]
    return (*found, *own)


def is_mean(statement: str) -> bool:
    """
    >>> is_mean("y[i] mean= A[i,j]"), is_mean("y[i] = A[i,j]")
    (True, False)
    """
    return head(statement).operator == "mean="


@functools.lru_cache(maxsize=1024)
def mean_statements(text: str, padded: tuple[str, ...] = ()) -> MeanStatements:
    """The statements of a mean. A place whose points all other places have too is not counted, but
    for its number.

    >>> found = mean_statements("y[d[e],f] mean= A[e,j] * x[s[e],f,j]")
    >>> found.total, found.counting, found.times
    ('y[d[e],f] = A[e,j] * x[s[e],f,j] * share[d[e]]', 'count[d[e]] = 1', ('j',))
    >>> mean_statements("y[i] mean= x[n[i,j]]", ("n",)).counting
    'count[i] = le(0, n[i,j])'
    """
    statement = parse(text)
    target, value = statement.target, statement.value
    marks = _marks(value, frozenset(padded))
    told = {v for mark in marks for v in variables(mark)}
    kept = tuple(d for d in range(len(target.indices)) if not _is_even(target, d, told))
    indices = tuple(target.indices[d] for d in kept)
    linked = told.union(*map(variables, indices))
    times = tuple(
        v for v in variables_of(statement) if v not in linked and v not in variables(target)
    )
    names = names_of(statement)
    share, count = fresh("share", names), Access(fresh("count", names), indices)
    there: list[Expr] = [Call("le", (Number(0), mark)) for mark in marks]
    counting = Statement(count, "=", product(there) if there else Number(1))
    total = Statement(target, "=", product([_whole(statement), Access(share, indices)]))
    within = (count, *accesses(count), *accesses(counting.value))
    indexing = {a.tensor for one in within for index in one.indices for a in accesses(index)}
    return MeanStatements(
        str(total),
        str(counting) if kept or marks else "",
        share,
        kept,
        times,
        tuple(name for name in padded if name in indexing),
        variables_of(counting) if kept or marks else (),
        tensors_of(counting) if kept or marks else (),
    )


def _whole(statement: Statement) -> Expr:
    """The right side as one value for each point, which is not taken apart into products that are
    summed each over its own variables.
    """
    products = expand(replace(statement, operator="="))
    return statement.value if len(products) == 1 else Call("whole", (statement.value,))


def _marks(value: Expr, padded: frozenset[str]) -> tuple[Access, ...]:
    """Where the right side reads index tensors that may say that there is no entry."""
    outer = accesses(value, nested=False)
    inner = [a for one in outer for index in one.indices for a in accesses(index)]
    return tuple(dict.fromkeys(a for a in inner if a.tensor in padded))


def _is_even(target: Access, dim: int, told: set[str]) -> bool:
    """Whether places that differ in one dimension alone have the same points."""
    name = target.indices[dim].var
    others = (i for d, i in enumerate(target.indices) if d != dim)
    return name is not None and name not in told.union(*map(variables, others))


def as_sum(
    request: Request, tensors: Mapping[str, Value], *, told: bool = False
) -> tuple[Request, dict[str, Value]]:
    """The sum that a mean is, and what it reads. What is wrong is said of the mean. ``told``:
    nothing is counted, for the sum is only to be looked at.
    """
    parts = mean_statements(request.statement, request.padded)
    sizes = _sizes(request, parts, tensors)
    # a share in half precision would be as wrong as the result may be
    dtype = sizes.dtype if sizes.dtype in HALVES else request.dtype
    total = replace(request, statement=parts.total, dtype=dtype)
    each = math.prod(sizes.extents[v] for v in parts.times)
    share: Value
    if not parts.counting:
        share = 1 / max(each, 1)
    elif told:
        share = torch.empty(sizes.kept, dtype=share_dtype(sizes.dtype), device=sizes.device)
    else:
        share = _shares(sizes, parts, request, tensors, each)
    return total, {**tensors, parts.share: share}


#: By what was asked for and the kinds of tensors, of a mean that was bound the kind of its result,
#: and where the sizes of variables stand.
_forms: dict[object, tuple[torch.dtype, torch.device, VariablePlaces]] = {}
MOST_FORMS = 1024


def _sizes(request: Request, parts: MeanStatements, tensors: Mapping[str, Value]) -> MeanSizes:
    """The sizes of a mean. Tensors of kinds that were bound before are only measured; what is wrong
    with them is said by binding them.
    """
    plain = is_plain_call(tensors.values())
    key: object = None
    if plain:
        kinds = [
            (name, v.dtype, v.ndim, v.device, v.layout)
            if isinstance(v, Tensor)
            else (name, type(v))
            for name, v in tensors.items()
        ]
        given = _given(request)
        names = tuple(of for of, _ in request.sizes)
        key = replace(request, sizes=()), names, tuple(given), *kinds
        form = _forms.get(key)
        found = None if form is None else _measured(form, parts, given, tensors)
        if found is not None:
            return found
    problem = request.bind(tensors)
    if plain:
        statement = parse(request.statement)
        places = tuple((v, _places(statement, v)) for v in variables_of(statement))
        keep(_forms, key, (problem.dtype, problem.device, places), MOST_FORMS)
    kept = tuple(problem.shape[dim] for dim in parts.kept)
    return MeanSizes(kept, problem.extents, problem.dtype, problem.device)


def _given(request: Request) -> dict[str | int, Size]:
    """Sizes that were given, of variables and of the output's dimensions."""
    found: dict[str | int, Size] = {}
    for of, size in request.sizes:
        if isinstance(size, tuple):
            found |= dict(enumerate(size))  # of no other tensor than the output is a shape given
        else:
            found[of] = size
    return found


def _measured(
    form: tuple[torch.dtype, torch.device, VariablePlaces],
    parts: MeanStatements,
    given: Mapping[str | int, Size],
    tensors: Mapping[str, Value],
) -> MeanSizes | None:
    """None where sizes disagree, or are not simply there."""
    dtype, device, places = form
    if not all(isinstance(size, int) and size >= 0 for size in given.values()):
        return None
    extents: dict[str, Size] = {}
    shape = dict(given)
    for var, where in places:
        asked: set[str | int] = {var, *(dim for name, dim in where if not name)}
        told: set[Size] = {given[k] for k in asked & given.keys()}
        told |= {tensors[name].shape[dim] for name, dim in where if name}  # type: ignore[union-attr]
        if len(told) != 1:
            return None
        (extents[var],) = told
        shape |= dict.fromkeys(asked, extents[var])
    if not all(dim in shape for dim in parts.kept):
        return None
    return MeanSizes(tuple(shape[dim] for dim in parts.kept), extents, dtype, device)


def told_of(request: Request) -> str:
    """A mean and what it is made of, in words.

    >>> print(told_of(Request("y[d[e]] mean= x[e]")))
    y[d[e]] mean= x[e]
    as y[d[e]] = x[e] * share[d[e]], where share is 1 over count[d[e]] = 1
    """
    parts = mean_statements(request.statement, request.padded)
    counts = [
        *([parts.counting] if parts.counting else []),
        *(f"the size of {v}" for v in parts.times),
    ]
    over = ", times ".join(counts) or "1"
    return f"{parse(request.statement)}\nas {parts.total}, where {parts.share} is 1 over {over}"


def _shares(
    found: MeanSizes,
    parts: MeanStatements,
    request: Request,
    tensors: Mapping[str, Value],
    each: Size,
) -> Tensor:
    """What of its sum each point counts for; all of it where there is none."""
    sizes: RequestSizes = (
        *enumerate(found.kept),
        *[(v, found.extents[v]) for v in parts.counted],
    )
    # in float64, for float32 cannot count beyond 2 ** 24
    asked = Request(parts.counting, sizes, parts.padded, torch.float64, None, request.wraps)
    values = {name: tensors[name] for name in parts.reads}
    dtype = share_dtype(found.dtype)

    def make() -> Tensor:
        try:
            return shares_of(contract(asked, values), each, dtype)
        except IndexRangeError:  # of counts, which nobody has written
            problem = request.bind(tensors)
            verify(problem, uses_of(problem, request.wraps), tensors)
            raise

    if not values:  # indices that are sums of variables
        with torch.device(found.device):
            return make()
    first, *others = (v for v in values.values() if isinstance(v, Tensor))
    key = "share", parts.counting, sizes, parts.padded, request.wraps, each, dtype
    return remembered(first, key, make, *others)


def shares_of(count: Tensor, each: Size, dtype: torch.dtype) -> Tensor:
    points: Tensor = count * each  # type: ignore[assignment, unused-ignore]
    return points.clamp(min=1).reciprocal().to(dtype)


def share_dtype(dtype: torch.dtype) -> torch.dtype:
    """
    >>> share_dtype(torch.bfloat16), share_dtype(torch.complex128)
    (torch.float32, torch.float64)
    """
    return torch.float32 if dtype in HALVES else dtype.to_real()
