"""Gradients of a call as further calls, on statements that `lang.derive` gives; hence gradients of
every order.

What is derived from a statement is found once for each kind of call, so that a backward pass only
looks up and runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from insum.call import in_kernels, running
from insum.call.filled import FilledBuffers
from insum.call.on_host import at_once, is_one_graph
from insum.call.prepared import BoundCall, Kinds, kinds_of
from insum.call.request import Form
from insum.lang.bind import Size, Value
from insum.lang.derive import adjoint, tangent, winners
from insum.lang.expr import tensors_of, variables
from insum.lang.factored import FactoredSum, factored
from insum.lang.measure import SizeKeys
from insum.lang.parser import parse
from insum.lang.problem import kind_of
from insum.lang.repeat import repetition_of
from insum.ops.shared_rows import sharing
from insum.plan.order import Path
from insum.plan.path import AUTO, is_path, optimize_text

#: Runs a statement, of which the kinds of calls are known, on these values and sizes.
StatementRunner: TypeAlias = Callable[[Kinds, Mapping[str, Value], tuple[Any, ...]], Tensor]
#: The calls of derived statements that are found for values of certain layouts. Two may be spelled
#: alike and be of other sizes: ``A[s[e],k] + A[k,s[e]]`` has gradients along rows and columns.
#: What is added to another value is another call, by how that lies in memory.
FoundCalls: TypeAlias = "dict[Derived | tuple[Derived, tuple[int, ...]], BoundCall]"
#: Multiplications of each number of a sum from which on a product with it is quicker than two
#: without, measured.
LEAST_REUSED = 64


@dataclass(frozen=True, slots=True, eq=False)
class Derived:
    """A derived statement.

    Attributes:
        kinds: the statement, without the dimensions along which it repeats its value.
        reads: the tensors that it reads.
        variables: those whose extents it is given.
        real: whether only the real part of its value counts.
        repeats: the dimensions that a view of its value repeats. As torch does for its own sums:
            what keeps such a gradient as its own makes a copy.
        views: the tensor that its value is a view of, so that nothing is to be run, or ''.
        order: of that tensor's dimensions in the value.
        alike: the statement but for the name of its result.
    """

    kinds: Kinds
    reads: tuple[str, ...]
    variables: tuple[str, ...]
    real: bool
    repeats: tuple[int, ...]
    views: str
    order: tuple[int, ...]
    alike: str

    def __call__(
        self,
        values: Mapping[str, Any],
        shape: Sequence[Size],
        of: ForwardCall,
        run: StatementRunner,
        calls: FoundCalls | None = None,
        filled: FilledBuffers | None = None,
    ) -> Tensor:
        """Its value, of this shape, on those of the values that it reads. ``calls``: those that
        earlier passes have found for values of the same layouts, to which this adds; ``run`` is
        asked where there are none. ``filled``: buffers that others of this pass have filled.
        """
        if self.views:
            source: Tensor = values[self.views]
            return self.repeated(source.permute(self.order), shape) if self.repeats else source
        # loops: before Python 3.12 every comprehension is a call, and a backward pass has many
        arguments = {}
        for name in self.reads:
            arguments[name] = values[name]
        call = None if calls is None else calls.get(self)
        if call is None:
            sizes = [*shape]
            for dim in reversed(self.repeats):
                del sizes[dim]
            for var in self.variables:
                sizes.append(of.extents[var])
            if calls is not None:
                kinds, given = self.kinds, tuple(sizes)
                call = kinds.known(arguments, given) or kinds.find(arguments, given)
                if of.path and call.prepared.orderable:
                    call = self.along(of, call, arguments)
                calls[self] = call
        if call is None:
            found = run(self.kinds, arguments, tuple(sizes))
        else:
            if call.prepared.looks_first:
                call.look(arguments)
            found = running.run(call, "new", arguments, None, False, filled)
        if self.real:
            found = found.real
        return self.repeated(found, shape) if self.repeats else found

    def added_to(
        self,
        total: Tensor,
        values: Mapping[str, Any],
        of: ForwardCall,
        run: StatementRunner,
        calls: FoundCalls | None,
        filled: FilledBuffers,
    ) -> Tensor:
        """The sum of a value of its shape and its own: kernels start from the one that is there,
        which is read on the way. Everybody else adds afterwards.
        """
        key, shape = (self, total.stride()), total.shape
        if not (calls is None or self.views or self.repeats or self.real):
            arguments = {name: values[name] for name in self.reads}
            call = calls.get(key)
            if call is None:
                call = self.bound(arguments, shape, of, calls)
                if in_kernels.alone(call, arguments) and call.prepared.problem.dtype == total.dtype:
                    call = self.kinds.find(arguments, call.sizes, total)
                calls[key] = call
            if call.prepared.count > len(arguments):  # what it is added to is one more
                if call.prepared.looks_first:
                    call.look(arguments)
                return running.run(call, "from", arguments, total)
        return total + self(values, shape, of, run, calls, filled)

    def bound(
        self,
        arguments: Mapping[str, Any],
        shape: Sequence[Size],
        of: ForwardCall,
        calls: FoundCalls,
    ) -> BoundCall:
        """The call that gives its value, found for the first time, and kept. (`__call__` does the
        same in place: a pass on new data would take a call of Python more for each statement.)
        """
        sizes = [*shape]
        for dim in reversed(self.repeats):
            del sizes[dim]
        for var in self.variables:
            sizes.append(of.extents[var])
        kinds, given = self.kinds, tuple(sizes)
        found = kinds.known(arguments, given) or kinds.find(arguments, given)
        if of.path and found.prepared.orderable:
            found = self.along(of, found, arguments)
        calls[self] = found
        return found

    def along(self, of: ForwardCall, call: BoundCall, arguments: Mapping[str, Any]) -> BoundCall:
        """The call along the path of what it is derived from, where that is a good one."""
        form = self.kinds.form
        if form.optimize != AUTO:
            return call
        path = call.prepared.path_along(call, arguments, of.path, of.factors)
        if not path:
            return call
        return kinds_of(replace(form, optimize=optimize_text(path))).find(arguments, call.sizes)

    def repeated(self, value: Tensor, shape: Sequence[Size]) -> Tensor:
        """The whole as a view of what it repeats."""
        for dim in self.repeats:
            value = value.unsqueeze(dim)
        return value.expand(*shape)


@dataclass(frozen=True, slots=True)
class GradientRule:
    """How the gradient of one tensor is computed: a sum of statements, over the gradient that
    arrives and the result under these names; ``joined``: of fewer, where each is one kernel;
    ``factored``: of fewer products, each with a sum that is multiplied ``along`` variables of one.
    """

    statements: tuple[Derived, ...]
    upstream: str
    result: str
    joined: tuple[Derived, ...] = ()
    factored: tuple[Derived, ...] = ()
    along: tuple[tuple[str, ...], ...] = ()

    def on_host(self, extents: Mapping[str, Size]) -> tuple[Derived, ...]:
        """Those that a CPU runs."""
        fewer = bool(self.factored) and _is_reused(self.along, extents)
        return self.factored if fewer else self.statements


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """What gradients need of a call besides its tensors.

    Attributes:
        rules: what was derived for this kind of call so far.
        dtypes: of gradients that are not to have the dtype of the tensor.
        path: the order in which it multiplied its ``factors``, where it was several statements.
    """

    form: Form
    rules: dict[object, Any]
    extents: Mapping[str, Size]
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    path: Path = ()
    factors: tuple[str, ...] = ()


def gradients(
    call: ForwardCall,
    values: Mapping[str, Value],
    upstream: Tensor,
    wanted: Sequence[str],
    result: Tensor | None,
    held: Tensor | None,
    run: StatementRunner,
    calls: FoundCalls | None = None,
    on_host: bool = False,
    filled: FilledBuffers | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """What reaches the initial value, and each tensor that is ``wanted``. ``result``, and where it
    ``held`` its initial value, matter for ``max=`` and ``min=`` only. ``calls``: as `Derived` has
    them. ``on_host``: torch operations compute what is derived, and nothing is recorded.
    ``filled``: buffers that were filled from some of the values, to which this adds.
    """
    to_initial = upstream
    if result is not None:
        upstream, to_initial = _shared(call, values, upstream, result, held, run)
    found: dict[str, Tensor] = {}
    if calls is not None and not on_host and len(wanted) > 1:
        key = "shared rows", upstream.dtype, *wanted, *call.dtypes.items()
        members: SharingRows | None = call.rules.get(key)
        if members is None:
            members = call.rules[key] = _sharing_rows(call, values, upstream, wanted)
        if members:
            found = _of_shared_rows(members, call, values, upstream, result, calls)
    joint = {}
    if calls is not None and on_host:
        joint = _in_one_graph(call, values, upstream, wanted, result, calls)
    alike: dict[object, Tensor] = {}
    filled = {} if filled is None else filled
    for name in wanted:
        if name in found:
            continue
        source = values[name]
        assert isinstance(source, Tensor)
        key = name, upstream.dtype, call.dtypes.get(name)
        rule = call.rules.get(key) or _rule(call, values, *key)
        known = {**values, rule.upstream: upstream, rule.result: result}
        statements = rule.joined
        if on_host:
            statements = rule.on_host(call.extents) if rule.factored else rule.statements
        same: object = None
        # without calls sizes may be traced, which cannot be compared
        if calls is not None and not on_host and len(statements) == 1:
            same = statements[0].alike, *key[1:], source.dtype, source.shape
            if same in alike:
                found[name] = alike[same].clone()
                continue
        total: Tensor | None = None
        for one in statements:
            part = joint.pop(one, None)
            if part is None and total is not None:
                total = one.added_to(total, known, call, run, calls, filled)
                continue
            part = one(known, source.shape, call, run, calls, filled) if part is None else part
            total = part if total is None else total + part
        if total is None:
            total = torch.zeros_like(source, dtype=call.dtypes.get(name, source.dtype))
        found[name] = total
        if same is not None:
            alike[same] = total
    return to_initial, found


def _is_reused(along: Sequence[tuple[str, ...]], extents: Mapping[str, Size]) -> bool:
    """Whether sums are multiplied often enough to be made."""
    return all(math.prod(int(extents[v]) for v in vars) >= LEAST_REUSED for vars in along)


#: By tensor the rule of its gradient, and the statement that this is.
SharingRows: TypeAlias = "dict[str, tuple[GradientRule, Derived]]"


def _of_shared_rows(
    members: SharingRows,
    call: ForwardCall,
    values: Mapping[str, Value],
    upstream: Tensor,
    result: Tensor | None,
    calls: FoundCalls,
) -> dict[str, Tensor]:
    """Of the gradients that gather the same rows those that kernels give, in one where it can."""
    bound, given = list[BoundCall](), list[dict[str, Any]]()
    names, alike, copies = list[str](), dict[object, str](), dict[str, str]()
    for name, (rule, one) in members.items():
        source: Any = values[name]  # no view repeats it
        same = one.alike, source.dtype, source.shape, call.dtypes.get(name)
        first = alike.setdefault(same, name)
        if first != name:
            copies[name] = first
            continue
        known = {**values, rule.upstream: upstream, rule.result: result}
        arguments: dict[str, Any] = {}
        for read in one.reads:
            arguments[read] = known[read]
        names.append(name)
        bound.append(calls.get(one) or one.bound(arguments, source.shape, call, calls))
        given.append(arguments)
    results = in_kernels.at_once(bound, given)
    every = {name: it for name, it in zip(names, results) if it is not None}
    for name, first in copies.items():
        if first in every:
            every[name] = every[first].clone()
    return every


def _sharing_rows(
    call: ForwardCall, values: Mapping[str, Any], upstream: Tensor, wanted: Sequence[str]
) -> SharingRows:
    """Those gradients that are one statement each, and may be computed in one walk."""
    single = {}
    for name in wanted:
        key = name, upstream.dtype, call.dtypes.get(name)
        rule = call.rules.get(key) or _rule(call, values, *key)
        (first, *more) = rule.joined or (None,)
        if first is not None and not (more or first.views or first.repeats or first.real):
            single[name] = rule, first
    texts = {name: parse(one.kinds.form.statement) for name, (_, one) in single.items()}
    return {name: single[name] for name in sharing(texts)}


def _in_one_graph(
    call: ForwardCall,
    values: Mapping[str, Value],
    upstream: Tensor,
    wanted: Sequence[str],
    result: Tensor | None,
    calls: FoundCalls,
) -> dict[Derived, Tensor]:
    """Of the statements of gradients those that a CPU computes together, where it does."""
    key = "one graph", upstream.dtype, *wanted, *call.dtypes.items()
    rules: list[tuple[str, GradientRule]] | None = call.rules.get(key)
    if rules is None:
        keys = [(n, upstream.dtype, call.dtypes.get(n)) for n in wanted]
        rules = [(k[0], call.rules.get(k) or _rule(call, values, *k)) for k in keys]
        call.rules[key] = rules
    every: list[tuple[str, GradientRule, Derived]] = []
    for name, rule in rules:  # loops: of sizes, which may be others at every call
        for one in rule.on_host(call.extents) if rule.factored else rule.statements:
            if not (one.views or one.real):
                every.append((name, rule, one))
    known = [calls.get(one) for _, _, one in every]
    if len(every) < 2 or not is_one_graph(known):
        return {}
    bound, given, shapes = list[BoundCall](), list[dict[str, Any]](), list[Sequence[int]]()
    for name, rule, one in every:
        every_value: dict[str, Any] = {**values, rule.upstream: upstream, rule.result: result}
        given.append({read: every_value[read] for read in one.reads})
        shapes.append(every_value[name].shape)
        bound.append(calls.get(one) or one.bound(given[-1], shapes[-1], call, calls))
    return {
        one: one.repeated(value, shape) if one.repeats else value
        for (_, _, one), shape, value in zip(every, shapes, at_once(bound, given))
        if value is not None
    }


def tangent_of(
    call: ForwardCall,
    values: Mapping[str, Value],
    tangents: Mapping[str, Tensor],
    result: Tensor,
    held: Tensor | None,
    initial: Tensor | None,
    run: StatementRunner,
) -> Tensor:
    """The tangent of a result, of those of tensors and of its ``initial`` value."""
    total = torch.zeros_like(result)
    for name, given in tangents.items():
        rule = _tangent_rule(call, name, given.dtype, result.dtype)
        known = {**values, rule.upstream: given, rule.result: result}
        for one in rule.statements:
            total = total + one(known, result.shape, call, run)
    if not call.form.is_extremum:
        return total if initial is None else total + initial
    count = _winners(call, values, result, held, run)
    if initial is not None and held is not None:
        total = total + initial * held
    return _per(total, count).to(result.dtype)


def _tangent_rule(
    call: ForwardCall, name: str, given: torch.dtype, dtype: torch.dtype
) -> GradientRule:
    key = "tangent", name, given, dtype
    found: GradientRule | None = call.rules.get(key)
    if found is None:
        derived = tangent(call.form.statement, name)
        rank = len(parse(call.form.statement).target.indices)
        known = {derived.upstream: given}
        found = call.rules[key] = GradientRule(
            tuple(_derived(call.form, text, rank, dtype, known) for text in derived.statements),
            derived.upstream,
            derived.result,
        )
    return found


def _rule(
    call: ForwardCall,
    values: Mapping[str, Any],
    name: str,
    upstream: torch.dtype,
    own: torch.dtype | None,
) -> GradientRule:
    """The rule for one tensor, found once for a kind of call; ``own``: the dtype of its gradient,
    where that is another than the tensor's.
    """
    dtypes = {n: v.dtype for n, v in values.items() if isinstance(v, Tensor)}
    every = {n: kind_of(v).dtype for n, v in values.items()}
    target = parse(call.form.statement).target.tensor
    complexes = {n for n, d in {**every, target: upstream}.items() if d.is_complex}
    derived = adjoint(call.form.statement, name, frozenset(complexes))
    known = {**dtypes, derived.upstream: upstream, derived.result: upstream}
    source, fewer = values[name], None
    if {*dtypes.values(), upstream} <= {torch.float32, torch.float64}:  # others sum with less
        fewer = factored(derived.statements)
    fewer = fewer or FactoredSum(())
    groups = derived.statements, derived.joined, fewer.statements
    made_of = {
        text: _derived(call.form, text, source.dim(), own or source.dtype, known)
        for group in groups
        for text in group
    }
    apart, joined, products = (tuple(made_of[text] for text in group) for group in groups)
    made = GradientRule(apart, derived.upstream, derived.result, joined, products, fewer.along)
    call.rules[name, upstream, own] = made
    return made


def _derived(
    of: Form,
    text: str,
    rank: int,
    dtype: torch.dtype,
    dtypes: Mapping[str, torch.dtype],
) -> Derived:
    repetition = repetition_of(parse(text))
    statement, repeats = repetition.statement, repetition.dims
    reads = tensors_of(statement)
    used = dict.fromkeys((*variables(statement.target), *variables(statement.value)))
    real = not dtype.is_complex and any(n in dtypes and dtypes[n].is_complex for n in reads)
    kept = range(rank - len(repeats))
    keys: SizeKeys = (*((dim, None) for dim in kept), *((v, None) for v in used))
    form = Form(
        str(statement),
        keys,
        tuple(p for p in of.padded if p in reads),
        dtype.to_complex() if real else dtype,
        None,
        of.wraps & frozenset(reads),
        # a path counts the factors of the forward statement
        AUTO if is_path(of.optimize) else of.optimize,
    )
    # A transposed view alone could be taken for a gradient of its own, and share its memory with
    # another; a tensor itself, or one that repeats, is not.
    apart = repeats or repetition.order == tuple(kept)
    views = repetition.copies if apart and dtypes.get(repetition.copies) is dtype else ""
    alike = str(replace(statement, target=replace(statement.target, tensor="d")))
    kinds = kinds_of(form)
    return Derived(kinds, reads, tuple(used), real, repeats, views, repetition.order, alike)


def _shared(
    call: ForwardCall,
    values: Mapping[str, Value],
    upstream: Tensor,
    result: Tensor,
    held: Tensor | None,
    run: StatementRunner,
) -> tuple[Tensor, Tensor]:
    """For a maximum: the gradient divided evenly among the points that attain it, and the part that
    goes to the initial value.
    """
    count = _winners(call, values, result, held, run)
    share = _per(upstream, count).to(upstream.dtype)
    return share, torch.zeros_like(share) if held is None else share * held.to(upstream.dtype)


def _per(value: Tensor, count: Tensor) -> Tensor:
    """A value divided evenly, and zero where nobody shares it; so are its derivatives there."""
    return torch.where(count > 0, value / count.clamp(min=1), 0)


def _winners(
    call: ForwardCall,
    values: Mapping[str, Value],
    result: Tensor,
    held: Tensor | None,
    run: StatementRunner,
) -> Tensor:
    """How many points attain a maximum, and with them the initial value that it ``held``."""
    text, _, name = winners(call.form.statement)
    wide = result.dtype if result.dtype.itemsize > 2 else torch.float32
    key = "winners", wide
    counting: Derived | None = call.rules.get(key)
    if counting is None:
        counting = call.rules[key] = _derived(call.form, text, result.dim(), wide, {})
    with torch.no_grad():
        count = counting({**values, name: result}, result.shape, call, run)
        return count if held is None else count + held.to(wide)
