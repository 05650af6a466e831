"""``mean=``: a sum to which each point gives its share.

How many points a place has follows from the indices alone. So a mean is one statement more than a
sum, which counts them, and is remembered with the index tensors: ``y[d[e],f] mean= x[s[e],f]`` is
``count[d[e]] = 1`` once, and ``y[d[e],f] = x[s[e],f] * share[d[e]]`` with ``share = 1 / count`` at
each call. Kernels multiply the sum of a row by its share; where there are none, that is an
operation on the result. Gradients of any order are those of that sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from insum.call.prepared import MOST_KINDS, Kinds, kinds_of
from insum.call.request import Form, Request, head
from insum.compat.calls import is_plain_call
from insum.compat.placed import while_tracing
from insum.compat.tensors import kinds_guard
from insum.errors import IndexRangeError
from insum.lang.bind import Problem, Size, Value
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
from insum.lang.measure import Measure, SizeKeys, measure_of
from insum.lang.parser import parse
from insum.memory import remembered
from insum.ops.eager import contract
from insum.plan.uses import uses_of
from insum.runtime.check import verify
from insum.settings import settings

HALVES = (torch.float16, torch.bfloat16)
#: What these are added up in.
WIDE = torch.float32


@dataclass(frozen=True, slots=True)
class MeanStatements:
    """What a mean is made of.

    Attributes:
        total: the sum, which reads the shares under the name ``share``; ``bare``: without them.
        counting: how many points each place has, or '' where all have as many.
        kept: dimensions of the output by which the counts differ.
        times: variables of which each place has all values, besides.
        padded: index tensors that mark absent entries of what is counted.
        counted: variables of the statement that counts, and ``reads`` the tensors that it reads.
    """

    total: str
    bare: str
    counting: str
    share: str
    kept: tuple[int, ...]
    times: tuple[str, ...]
    padded: tuple[str, ...]
    counted: tuple[str, ...]
    reads: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class MeanKind:
    """A kind of call of a mean: what it is made of for tensors of certain kinds and of any sizes.

    Attributes:
        names: of the tensors; ``alike``: whether others are of this kind, and ``default`` the
            default dtype that it was found under.
        total: the sum; ``bare``: without shares; ``counting``: the statement that counts, with the
            sizes that it is given.
        measure: extents and the shape of the output; ``times`` and ``counted`` are the places of
            variables among the extents.
    """

    names: tuple[str, ...]
    alike: Callable[..., bool]
    default: torch.dtype
    parts: MeanStatements
    total: Kinds
    bare: Kinds
    counting: Form
    measure: Measure
    times: tuple[int, ...]
    counted: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


#: Extents of variables, and the shape of the output.
MeasuredSizes: TypeAlias = tuple[tuple[Size, ...], tuple[Size, ...]]
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
    values = tuple(a.tensor for a in accesses(statement.value, nested=False))
    return (
        parts.bare,
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
        str(Statement(target, "=", _whole(statement))),
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


def mean_of(
    kinds: Kinds,
    sizes: tuple[Size, ...],
    tensors: Mapping[str, Value],
    run: Callable[[Kinds, tuple[Size, ...], dict[str, Value]], Tensor],
) -> Tensor:
    """A mean, of a sum that is ``run``. What is wrong is said of the mean."""
    mean, measured = _known_mean(kinds, sizes, tensors) or _bound_mean(kinds, sizes, tensors)
    share = _share(mean, kinds, sizes, measured, tensors)
    if not multiplies_results(mean.device):
        return run(mean.total, sizes, {**tensors, mean.parts.share: share})
    total = run(mean.bare, sizes, dict(tensors))
    if isinstance(share, Tensor):
        kept = mean.parts.kept
        share = share.view([n if d in kept else 1 for d, n in enumerate(total.shape)])
    return (total * share).to(mean.dtype)


def multiplies_results(device: torch.device) -> bool:
    """Whether shares multiply results, because no kernels do."""
    now = settings.values
    kernels = now.backend == "fused" or now.require_fused and now.backend != "inductor"
    return device.type == "cpu" and not kernels


def as_sum(
    kinds: Kinds, sizes: tuple[Size, ...], tensors: Mapping[str, Value]
) -> tuple[Kinds, tuple[Size, ...], dict[str, Value]]:
    """The sum that a mean is in kernels, and what it reads."""
    mean, measured = _known_mean(kinds, sizes, tensors) or _bound_mean(kinds, sizes, tensors)
    share = _share(mean, kinds, sizes, measured, tensors)
    return mean.total, sizes, {**tensors, mean.parts.share: share}


def _bound_mean(
    kinds: Kinds, sizes: tuple[Size, ...], tensors: Mapping[str, Value]
) -> tuple[MeanKind, MeasuredSizes]:
    problem = kinds.form.request(sizes).bind(tensors)
    return _mean_kind(kinds, problem, tensors), (tuple(problem.extents.values()), problem.shape)


def sum_of(request: Request, tensors: Mapping[str, Value]) -> tuple[Request, dict[str, Value]]:
    """The same of a request."""
    kinds, sizes, given = as_sum(kinds_of(request.form), request.size_values, tensors)
    return kinds.form.request(sizes), given


def known_sum(
    kinds: Kinds, sizes: tuple[Any, ...], tensors: Mapping[str, Value]
) -> tuple[Kinds, tuple[Any, ...], dict[str, Value]] | None:
    """The sum that kernels compute a mean of such tensors as, where one was bound before; None
    where it was not, or where binding has to say what is wrong.
    """
    found = _known_mean(kinds, sizes, tensors)
    if found is None or multiplies_results(found[0].device):
        return None
    mean, measured = found
    share = _share(mean, kinds, sizes, measured, tensors)
    return mean.total, sizes, {**tensors, mean.parts.share: share}


def _known_mean(
    kinds: Kinds, sizes: tuple[Any, ...], tensors: Mapping[str, Value]
) -> tuple[MeanKind, MeasuredSizes] | None:
    """What a mean of such tensors is made of, where one was bound before: they are only measured.
    None where it was not, or where binding has to say what is wrong.
    """
    if not kinds.means or not is_plain_call(tensors.values()):
        return None
    for size in sizes:
        if type(size) is not int:
            return None
    for value in tensors.values():  # torch's guards end the process at one
        if type(value) is Tensor and value.is_nested:
            return None
    names, default = tuple(tensors), torch.get_default_dtype()
    for mean in kinds.means:
        if mean.names == names and mean.default is default and mean.alike(*tensors.values()):
            found = mean.measure(tensors, sizes)
            return None if found is None else (mean, found)
    return None


def _mean_kind(kinds: Kinds, problem: Problem, tensors: Mapping[str, Value]) -> MeanKind:
    """What a mean is made of for tensors that were bound; kept, where others can be compared."""
    form, places = kinds.form, {v: k for k, v in enumerate(problem.extents)}
    parts = mean_statements(form.statement, form.padded)
    plain, given = is_plain_call(tensors.values()), tuple(tensors.values())
    # a share in half precision would be as wrong as the result may be
    dtype = problem.dtype if problem.dtype in HALVES else form.dtype
    keys: SizeKeys = (*((k, None) for k, _ in enumerate(parts.kept)), *_unsized(parts.counted))
    mean = MeanKind(
        tuple(tensors),
        kinds_guard(given, exact=False) if plain else lambda *others: False,
        torch.get_default_dtype(),
        parts,
        kinds_of(replace(form, statement=parts.total, dtype=dtype)),
        # rounded once, behind the shares
        kinds_of(replace(form, statement=parts.bare, dtype=WIDE if dtype in HALVES else dtype)),
        # in float64, for float32 cannot count beyond 2 ** 24
        Form(parts.counting, keys, parts.padded, torch.float64, None, form.wraps),
        measure_of(problem, form.size_keys),
        tuple(places[v] for v in parts.times),
        tuple(places[v] for v in parts.counted),
        problem.dtype,
        problem.device,
    )
    if plain and any(isinstance(v, Tensor) for v in given):
        kinds.means.insert(0, mean)
        del kinds.means[MOST_KINDS:]
    return mean


def _unsized(names: tuple[str, ...]) -> SizeKeys:
    return tuple((name, None) for name in names)


def _share(
    mean: MeanKind,
    kinds: Kinds,
    sizes: tuple[Size, ...],
    measured: MeasuredSizes,
    tensors: Mapping[str, Value],
    *,
    told: bool = False,
) -> Value:
    """Of its sum what each point counts for. ``told``: a tensor like it."""
    parts, (extents, shape) = mean.parts, measured
    each, counted = 1, []
    for place in mean.times:
        each *= extents[place]  # type: ignore[assignment]
    for dim in parts.kept:
        counted.append(shape[dim])
    if not parts.counting:
        return 1 / max(each, 1)
    if told:
        return torch.empty(counted, dtype=share_dtype(mean.dtype), device=mean.device)
    for place in mean.counted:
        counted.append(extents[place])
    return _shares(mean, kinds, sizes, tuple(counted), each, tensors)


def mean_to_explain(
    request: Request, tensors: Mapping[str, Value], *, on_gpu: bool
) -> tuple[Request, dict[str, Value], str]:
    """The sum that a mean is, here or ``on_gpu``, what it reads, and in words what it is made of.
    Nothing is counted.
    """
    kinds, sizes = kinds_of(request.form), request.size_values
    mean, measured = _bound_mean(kinds, sizes, tensors)
    if not on_gpu and multiplies_results(mean.device):
        bare = mean.bare.form.request(sizes)
        return bare, dict(tensors), _in_words(request, mean.parts, "times share")
    share = _share(mean, kinds, sizes, measured, tensors, told=True)
    given = {**tensors, mean.parts.share: share}
    return mean.total.form.request(sizes), given, _in_words(request, mean.parts, "")


def _in_words(request: Request, parts: MeanStatements, behind: str) -> str:
    counts = [
        *([parts.counting] if parts.counting else []),
        *(f"the size of {v}" for v in parts.times),
    ]
    over = ", times ".join(counts) or "1"
    made = f"{parts.bare}, {behind}" if behind else parts.total
    return f"{parse(request.statement)}\nas {made}, where {parts.share} is 1 over {over}"


def _shares(
    mean: MeanKind,
    kinds: Kinds,
    sizes: tuple[Size, ...],
    counted: tuple[Size, ...],
    each: Size,
    tensors: Mapping[str, Value],
) -> Tensor:
    """What of its sum each point counts for; all of it where there is none."""
    parts, form = mean.parts, mean.counting
    dtype = share_dtype(mean.dtype)

    def make() -> Tensor:
        values = {name: tensors[name] for name in parts.reads}
        try:
            return shares_of(contract(form.request(counted), values), each, dtype)
        except IndexRangeError:  # of counts, which nobody has written
            problem = kinds.form.request(sizes).bind(tensors)
            verify(problem, uses_of(problem, kinds.form.wraps), tensors)
            raise

    read: list[Tensor] = []
    for name in parts.reads:
        if isinstance(tensors[name], Tensor):
            read.append(tensors[name])  # type: ignore[arg-type]
    if not read:  # indices that are sums of variables
        with torch.device(mean.device):
            return make()
    key = "share", parts.counting, counted, parts.padded, form.wraps, each, dtype
    return remembered(read[0], key, make, *read[1:])


def shares_of(count: Tensor, each: Size, dtype: torch.dtype) -> Tensor:
    points: Tensor = count * each  # type: ignore[assignment, unused-ignore]
    return points.clamp(min=1).reciprocal().to(dtype)


def share_dtype(dtype: torch.dtype) -> torch.dtype:
    """
    >>> share_dtype(torch.bfloat16), share_dtype(torch.complex128)
    (torch.float32, torch.float64)
    """
    return torch.float32 if dtype in HALVES else dtype.to_real()
