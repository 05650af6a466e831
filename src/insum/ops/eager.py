"""A statement as one differentiable operation on tensors, by the short way past the dispatcher.

A call becomes a `Request` (statement and options) and named values. In plain eager mode it runs at
once; under a tracer, a transform, autocast or a tensor subclass it goes through the registered op
(`insum.ops.registration`), which means the same.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from insum.bounded import keep
from insum.call import running
from insum.call.filled import FilledBuffers
from insum.call.prepared import BoundCall, BoundStage, Kinds, kinds_of, prepare
from insum.call.request import Form, Request, head
from insum.compat.autograd import keeps_as_they_are, plain_apply, wanted_gradients
from insum.compat.calls import autocasts, is_eager_call, is_plain_call, is_transformed, modes_now
from insum.compat.contexts import outlived, without_autocast
from insum.compat.many import any_batched, is_batched, over_items
from insum.compat.placed import is_placed, is_recordable
from insum.compat.tangents import forward_levels, with_tangent
from insum.errors import AutogradError, InsumError
from insum.lang.bind import Value
from insum.ops.autocast import lowered
from insum.ops.encoding import Scalar, encode
from insum.ops.gradients import (
    ForwardCall,
    FoundCalls,
    StatementRunner,
    gradients,
    tangent_of,
)
from insum.ops.vmap import batched, front_of_base
from insum.plan.path import operands_of
from insum.runtime.check import raise_found
from insum.settings import SettingValues, settings

#: Statements in several layouts that are kept with the call which they are derived from.
MOST_DERIVED = 32


# --- what the rest of insum calls -----------------------------------------------------------------


def contract(request: Request, values: Mapping[str, Value]) -> Tensor:
    """The result of a statement as a new tensor. Differentiable."""
    if autocasts() and is_eager_call(values.values()):
        target = head(request.statement).target
        return run_lowered(kinds_of(request.form), target, request.size_values, values)
    # Without a tensor the default device decides, which is not to be seen from within an op.
    tensors = [v for v in values.values() if isinstance(v, Tensor)]
    if tensors and (not is_plain_call(tensors) or any_batched(tensors)):
        if is_placed(values.values()) and is_recordable():
            from insum.distributed import dispatch  # which loads a good deal of torch

            return dispatch.contract(kinds_of(request.form), values, request.size_values)
        result: Tensor = (
            _transformed(request, None, values)
            if is_transformed() or with_tangent(tensors) >= 0
            else torch.ops.insum.contract(*encode(request, values))
        )
        return result
    return run(prepare(request, values), values)


def run(
    call: BoundCall,
    values: Mapping[str, Value],
    leaves: Mapping[str, Tensor] | None = None,
    initial: Tensor | None = None,
) -> Tensor:
    """A call in plain eager mode, as a new tensor, which accumulates from ``initial`` where there
    is one; recorded for autograd where a gradient may be asked of it. ``leaves``: what some of the
    values were cast from without being recorded; gradients are theirs.
    """
    prepared = call.prepared
    if prepared.looks_first:
        call.look(values)
    recorded = False
    if torch.is_grad_enabled():
        recorded = bool(leaves) or initial is not None and initial.requires_grad
        for name in prepared.sources:
            recorded = recorded or values[name].requires_grad  # type: ignore[union-attr]
    if not recorded:
        return running.run(call, "new" if initial is None else "from", values, initial)
    tensors: Collection[Any] = values.values()
    spec: DifferentiableCall | None = None if leaves else call.recorded
    if prepared.scalars:
        spec, tensors = _apart(None, call, values, leaves)
    elif spec is None:
        spec = DifferentiableCall(None, {}, prepared.names, call, prepared.settings, leaves)
        if leaves:
            tensors = {**values, **leaves}.values()
        elif call.count > 1:
            call.recorded = spec  # the same for all tensors
    try:
        result: Tensor = _record(spec, values, initial, *tensors)
    except RuntimeError as error:
        made = [n for n, v in values.items() if isinstance(v, Tensor) and v.is_inference()]
        if not made or isinstance(error, InsumError):
            raise
        raise _made_in_inference(made[0], spec.request.statement) from error
    return result


def _made_in_inference(name: str, statement: str) -> AutogradError:
    return AutogradError(
        f"{name} was made under inference mode, so that no gradient can be recorded with it",
        statement=statement,
        remedy=f"pass {name}={name}.clone(), or call under torch.no_grad()",
    )


def run_lowered(
    kinds: Kinds, target: str, sizes: tuple[Any, ...], values: Mapping[str, Value]
) -> Tensor:
    """A call under autocast, in eager mode and past the dispatcher, as a new tensor. The parameters
    of a layer are cast where the call is recorded, so that autograd sees one operation rather than
    two, and their gradients are summed and rounded once.
    """
    leaves: dict[str, Tensor] = {}
    lower = lowered(target, values, leaves if torch.is_grad_enabled() else None)
    with without_autocast():
        return run(kinds.known(lower, sizes) or kinds.find(lower, sizes), lower, leaves)


def accumulate(request: Request, initial: Tensor, values: Mapping[str, Value]) -> Tensor:
    """The result of accumulating from ``initial``, which is left as it was. Differentiable. Where
    the shape of the result is among the sizes, ``initial`` may be broadcast to it.
    """
    given = initial, *values.values()
    if not is_plain_call(given) or any_batched(given):
        if is_placed(given) and is_recordable():
            from insum.distributed import dispatch  # which loads a good deal of torch

            kinds, sizes = kinds_of(request.form), request.size_values
            return dispatch.accumulate(kinds, initial, values, sizes)
        result: Tensor = (
            _transformed(request, initial, values)
            if is_transformed() or with_tangent(given) >= 0
            else torch.ops.insum.accumulate(initial, *encode(request, values))
        )
        return result
    return run(prepare(request, values, initial), values, None, initial)


def accumulate_(request: Request, target: Tensor, values: Mapping[str, Value]) -> Tensor:
    """Accumulate into ``target`` in place. Not differentiable: `insum.ops.inplace` has the in-place
    form that is.
    """
    if any_batched((target, *values.values())):  # such a target has no memory that is written to
        return target.copy_(accumulate(request, target, values))
    if not is_plain_call((target, *values.values())):
        torch.ops.insum.accumulate_(target, *encode(request, values))
        return target
    prepared = prepare(request, values, target)
    prepared.verify(values)
    return running.run(prepared, "into", values, target)


# --- eager autograd and torch.func ----------------------------------------------------------------


class _CastBefore(torch.autograd.Function):
    """A cast that was made of a leaf by an earlier call, recorded now: for gradients of gradients,
    whatever has become of the leaf since.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, cast: Tensor) -> Tensor:
        ctx.dtype = leaf.dtype
        return cast.view_as(cast)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return upstream[0].to(ctx.dtype), None


@dataclass(frozen=True, slots=True, eq=False)
class DifferentiableCall:
    """What a differentiable call knows besides its tensors: the call itself, where the tensors are
    plain and verified, else what was asked for.
    """

    asked: Request | None
    numbers: dict[str, Scalar]
    names: tuple[str, ...]
    call: BoundCall | None
    #: Those of the call, for its gradients.
    settings: SettingValues
    #: Leaves that a call was recorded with, which ran on casts of them.
    leaves: Mapping[str, Tensor] | None = None

    @property
    def request(self) -> Request:
        if self.asked is not None:
            return self.asked
        assert self.call is not None
        return self.call.request

    @property
    def form(self) -> Form:
        return self.request.form if self.call is None else self.call.prepared.form

    def run(self, initial: Tensor | None, tensors: Sequence[Tensor]) -> Tensor:
        values, request = {**self.numbers, **dict(zip(self.names, tensors))}, self.request
        return (
            contract(request, values) if initial is None else accumulate(request, initial, values)
        )


class _Recorded(torch.autograd.Function):
    """A call in plain eager mode. Without `setup_context`, for which torch would look at the
    signature of ``forward`` at every call.
    """

    @staticmethod
    def forward(
        ctx: Any,
        spec: DifferentiableCall,
        values: Mapping[str, Value],
        initial: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        """``values`` are the tensors by name, and numbers; the context holds none of them."""
        call, ctx.spec = spec.call, spec
        assert call is not None
        filled: FilledBuffers | None = None
        if call.prepared.kept and keeps_as_they_are():
            filled = {}
        mode = "new" if initial is None else "from"
        result = running.run(call, mode, values, initial, False, filled)
        if result._base is not None:  # autograd lets nobody write to a view of memory of its own
            result = result.data
        held: Any = map(values.get, spec.names) if spec.leaves else tensors
        ctx.initial_shape = None if initial is None else initial.shape
        more = attained(initial, result) if call.prepared.is_extremum else ()
        if filled:
            kept = _buffers_to_keep(call, values, filled)
            ctx.stages = [one for one, _ in kept]
            more = [*more, *(buffer for _, buffer in kept)]
        ctx.save_for_backward(*held, *more)
        return result

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        needs = wanted_gradients(ctx)
        to_initial, to_tensors = pull_back(ctx, upstream[0], needs[2], needs[3:])
        return None, None, to_initial, *to_tensors


_record = plain_apply(_Recorded)


def _buffers_to_keep(
    call: BoundCall, values: Mapping[str, Value], filled: FilledBuffers
) -> list[tuple[BoundStage, Tensor]]:
    """Those that backward passes read, and that are no larger than what is kept for them anyway."""
    most = sum(v.nbytes for v in values.values() if isinstance(v, Tensor))
    found = []
    for one, buffer in running.buffers(call, values, filled):
        if one.kinds in call.prepared.kept and buffer.nbytes <= most:
            found.append((one, buffer))
            most -= buffer.nbytes
    return found


class _Differentiable(torch.autograd.Function):
    """In the form that torch.func can transform; the registered op's own autograd cannot be."""

    @staticmethod
    def forward(spec: DifferentiableCall, initial: Tensor | None, *tensors: Tensor) -> Tensor:
        return spec.run(initial, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.spec, initial, *tensors = inputs
        ctx.initial_shape = None if initial is None else initial.shape
        more = attained(initial, output) if ctx.spec.form.is_extremum else ()
        ctx.save_for_backward(*tensors, *more)
        held = None if initial is None else held_by(initial.detach(), output.detach())
        ctx.save_for_forward(*tensors, output, *(() if held is None else (held,)))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad
        to_initial, to_tensors = pull_back(ctx, upstream[0], needs[1], needs[2:])
        return None, to_initial, *to_tensors

    @staticmethod
    def jvp(
        ctx: Any, spec: None, initial: Tensor | None, *tangents: Tensor | None
    ) -> Tensor | None:
        result = ctx.saved_tensors[len(ctx.spec.names)]
        has_tangent = result.is_floating_point() or result.is_complex()
        return _forward_mode(ctx, initial, tangents) if has_tangent else None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        spec: DifferentiableCall,
        initial: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, int]:
        values = {**spec.numbers, **dict(zip(spec.names, tensors))}
        dims = dict(zip(spec.names, in_dims[2:]))
        request, moved = batched(spec.request, values, dims, info.batch_size, new=initial is None)
        if initial is None:
            return contract(request, moved), 0
        led = front_of_base(request, initial, in_dims[1], info.batch_size)
        return accumulate(request, led, moved), 0


def _transformed(request: Request, initial: Tensor | None, values: Mapping[str, Value]) -> Tensor:
    if autocasts():  # here: a batched statement is asked for the dtype of one item's result
        lower = lowered(head(request.statement).target, values)
        with without_autocast():
            return _transformed(request, initial, lower)
    spec, tensors = _apart(request, None, values, None)
    result: Tensor = _Differentiable.apply(spec, initial, *tensors)  # type: ignore[no-untyped-call]
    return result


def _apart(
    request: Request | None,
    call: BoundCall | None,
    values: Mapping[str, Value],
    leaves: Mapping[str, Tensor] | None,
) -> tuple[DifferentiableCall, list[Tensor]]:
    """What autograd is to see, the tensors or the leaves that they were cast from, and the rest."""
    names: list[str] = []
    tensors: list[Tensor] = []
    numbers: dict[str, Scalar] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            names.append(name)
            tensors.append(leaves[name] if leaves and name in leaves else value)
        else:
            numbers[name] = value
    now = settings.values if call is None else call.prepared.settings
    return DifferentiableCall(request, numbers, tuple(names), call, now, leaves), tensors


def _forward_mode(ctx: Any, initial: Tensor | None, tangents: Sequence[Tensor | None]) -> Tensor:
    """The tangent of a call that was just made, of those of its arguments."""
    saved, spec = ctx.saved_tensors, ctx.spec
    count = len(spec.names)
    values = {**spec.numbers, **dict(zip(spec.names, saved[:count]))}
    result, held = (*saved[count:], None)[:2]
    given = {name: t for name, t in zip(spec.names, tangents) if t is not None}
    return push_forward(spec.request, values, given, result, held, initial, _run_derived)


def push_forward(
    request: Request,
    values: Mapping[str, Value],
    tangents: Mapping[str, Tensor],
    result: Tensor,
    held: Tensor | None,
    initial: Tensor | None,
    run: StatementRunner,
) -> Tensor:
    """The tangent of a result, of those of what it was made of: the derivative in forward mode."""
    name = next(iter(tangents), head(request.statement).target)
    if forward_levels() > 1:  # torch drops the tangents of the outer one
        raise no_tangents(request.statement, name, "inside of two transforms of that mode")
    if any(torch.is_complex(t) for t in (result, *tangents.values())):
        raise no_tangents(request.statement, name, "over complex numbers")
    known = ForwardCall(request.form, {}, request.bind(values, result.detach()).extents)
    return tangent_of(known, values, tangents, result, held, initial, run)


def no_tangents(statement: str, name: str, which: str) -> AutogradError:
    return AutogradError(
        f"{name} carries a tangent, but statements {which} have no derivatives in forward mode",
        statement=statement,
        expected="reverse mode: backward(), torch.autograd.grad, torch.func.vjp or jacrev",
        remedy="= instead of an operator that writes in place, and the sum outside; for a hessian "
        "torch.func.hessian, which takes forward mode once; or torch.autograd.functional.jvp, "
        "which takes reverse mode twice",
    )


_dtype_of = operator.attrgetter("dtype")


def _found_calls(call: BoundCall, saved: Sequence[Tensor], upstream: Tensor) -> FoundCalls | None:
    """The calls that backward passes of a call have found, by what was derived from it; None where
    something is recorded or looks on. Sizes and strides of all that is read follow from the call's
    own and from those of the gradient that arrives, but for hooks that gave other tensors back.
    """
    given = (upstream, *saved)
    if torch.is_grad_enabled() or not is_plain_call(given):
        return None
    # the settings are those of the call, and take as long to hash as all the rest
    modes = modes_now(settings)[1:]
    marks = upstream.shape, upstream.is_neg(), upstream.is_conj()
    key = marks, modes, *map(Tensor.stride, given), *map(_dtype_of, given)
    found = call.derived.get(key)
    return keep(call.derived, key, {}, MOST_DERIVED) if found is None else found


def _run_derived(kinds: Kinds, values: Mapping[str, Value], sizes: tuple[Any, ...]) -> Tensor:
    if is_plain_call(values.values()):
        return run(kinds.known(values, sizes) or kinds.find(values, sizes), values)
    return contract(kinds.form.request(sizes), values)


def attained(initial: Tensor | None, result: Tensor) -> list[Tensor]:
    """What gradients of an extremum need besides its tensors: the result, and where it is the
    initial value. That itself is not kept: the in-place form overwrites it.
    """
    return [result] if initial is None else [result, held_by(initial.detach(), result.detach())]


def held_by(initial: Tensor, result: Tensor) -> Tensor:
    """Where an extremum is its initial value; one that is NaN stays."""
    return (initial == result) | ~(initial == initial)


def pull_back(
    ctx: Any, upstream: Tensor, initial_needs: bool, needs: Sequence[bool]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The gradients of what a saved call accumulated into, and of its tensors: reverse mode."""
    if is_batched(upstream):
        return _pull_back_each(ctx, upstream, initial_needs, needs)
    saved, spec = ctx.saved_tensors, ctx.spec
    count, call = len(spec.names), spec.call
    if call is None:
        saved = outlived(saved)
    values = {**spec.numbers, **dict(zip(spec.names, saved[:count]))}
    filled: FilledBuffers = {}
    stages = getattr(ctx, "stages", ())
    if stages:
        for one, buffer in zip(stages, saved[-len(stages) :], strict=True):
            one.add(buffer, one.given(values), filled)
        saved = saved[: -len(stages)]
    result, held = (*saved[count:], None, None)[:2]
    wanted = list(compress(spec.names, needs))
    token = settings.hold(spec.settings)  # this may be a thread of autograd's
    try:
        known = _derivable(spec, values, upstream) if call is None else call.forward
        if known is None and call is not None:  # the same for all tensors
            known = ForwardCall(call.prepared.form, call.prepared.adjoints, call.extents)
            if call.ordered.get(False) or call.prepared.on_host and call.prepared.orderable:
                known = _on_its_path(known, call, values)
            call.forward = known
        if spec.leaves:
            dtypes = dict(zip(spec.leaves, map(_dtype_of, spec.leaves.values())))
            known = replace(known, dtypes=dtypes)
            if torch.is_grad_enabled():
                for name, leaf in spec.leaves.items():
                    values[name] = _CastBefore.apply(leaf, values[name])  # type: ignore[no-untyped-call]
        calls = None if call is None else _found_calls(call, saved, upstream)
        on_host = calls is not None and call is not None and call.prepared.on_host
        first = calls is not None and not calls
        initial, found = gradients(
            known, values, upstream, wanted, result, held, _run_derived, calls, on_host, filled
        )
        if first and filled and call is not None:
            call.prepared.kept.update(one.kinds for one, _ in running.buffers(call, values, filled))
    finally:
        settings.let_go(token)
    raise_found()  # of earlier calls too: what they did wrong may have come this far
    to_initial = initial if initial_needs else None
    if to_initial is not None and to_initial.shape != ctx.initial_shape:
        to_initial = to_initial.sum_to_size(ctx.initial_shape)
    return to_initial, list(map(found.get, spec.names))


def _pull_back_each(
    ctx: Any, upstream: Tensor, initial_needs: bool, needs: Sequence[bool]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The same of an ``upstream`` that is many at once."""

    def one(item: Tensor) -> list[Tensor | None]:
        to_initial, to_tensors = pull_back(ctx, item, initial_needs, needs)
        return [to_initial, *to_tensors]

    to_initial, *to_tensors = over_items(one, (upstream,))
    return to_initial, to_tensors


def _on_its_path(known: ForwardCall, call: BoundCall, values: Mapping[str, Value]) -> ForwardCall:
    """With the order in which a product ran, as several statements or as a graph of dense ones."""
    terms = call.prepared.problem.terms
    if len(terms) != 1:
        return known
    path = tuple(one.stage.positions for one in call.ordered.get(False, ()))
    if not path:
        from insum.host.gradient_order import order_for_gradients  # takes a while to import

        path = order_for_gradients(call.problem(values))
    return replace(known, path=path, factors=tuple(map(str, operands_of(terms[0]))))


def _derivable(
    spec: DifferentiableCall, values: Mapping[str, Value], upstream: Tensor
) -> ForwardCall:
    """What gradients are derived from where no call was prepared."""
    return ForwardCall(spec.form, {}, spec.request.bind(values, upstream.detach()).extents)
