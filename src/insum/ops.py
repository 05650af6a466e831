"""The torch ops ``insum::contract``, ``insum::accumulate`` and ``insum::accumulate_``, and the
short way past the dispatcher.

A call becomes a `Request` (statement and options) and named values. In plain eager mode it runs at
once; under a tracer, a transform, autocast or a tensor subclass it goes through the registered op,
which means the same.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, TypeAlias

import torch
from torch import Tensor

from insum.autograd import ForwardCall, StatementRunner, gradients, tangent_of
from insum.batching import batched, front
from insum.bounded import keep
from insum.call import BoundCall, Kinds, kinds_of, prepare
from insum.compat.calls import (
    autocasts,
    is_eager_call,
    is_plain_call,
    is_transformed,
    modes_now,
    plain_apply,
    without_autocast,
)
from insum.compat.placed import is_placed, is_recordable
from insum.compat.tangents import (
    forward_levels,
    make_dual,
    register_autograd,
    unpack_dual,
    with_tangent,
)
from insum.errors import AutogradError, InsumError
from insum.lang.bind import Size, Value
from insum.plan.config import choice_from, choice_text
from insum.request import Form, Request, head
from insum.runtime.check import raise_found
from insum.settings import settings

#: Statements in several layouts that are kept with the call which they are derived from.
MOST_DERIVED = 32
Scalar: TypeAlias = bool | int | float | complex
Arguments: TypeAlias = tuple[
    str,
    str,
    list[Tensor],
    str,
    list[Scalar] | None,
    str,
    list[Size] | None,
    str,
    torch.dtype | None,
    str,
    str,
]


# --- what the rest of insum calls -----------------------------------------------------------------


def contract(request: Request, values: Mapping[str, Value]) -> Tensor:
    """The result of a statement as a new tensor. Differentiable."""
    if autocasts() and is_eager_call(values.values()):
        return run_lowered(kinds_of(request.form), request.size_values, values)
    # Without a tensor the default device decides, which is not to be seen from within an op.
    if not is_plain_call(values.values()) and any(isinstance(v, Tensor) for v in values.values()):
        if is_placed(values.values()) and is_recordable():
            from insum.distributed import dispatch  # which loads a good deal of torch

            return dispatch.contract(kinds_of(request.form), values, request.size_values)
        result: Tensor = (
            _transformed(request, None, values)
            if is_transformed()
            else torch.ops.insum.contract(*encode(request, values))
        )
        return result
    return run(prepare(request, values), values)


def run(
    call: BoundCall, values: Mapping[str, Value], leaves: Mapping[str, Tensor] | None = None
) -> Tensor:
    """A call in plain eager mode, as a new tensor. ``leaves``: what some of the values were cast
    from without being recorded; gradients are theirs.
    """
    prepared = call.prepared
    if prepared.uses and not prepared.kernels_look:
        call.look(values)
    if torch.is_grad_enabled():
        if leaves:
            return differentiable(call, None, values, leaves)
        for name in prepared.sources:
            if values[name].requires_grad:  # type: ignore[union-attr]
                return differentiable(call, None, values)
    return call.run("new", values, None)


def run_lowered(kinds: Kinds, sizes: tuple[Any, ...], values: Mapping[str, Value]) -> Tensor:
    """A call under autocast, in eager mode and past the dispatcher, as a new tensor. The parameters
    of a layer are cast where the call is recorded, so that autograd sees one operation rather than
    two, and their gradients are summed and rounded once.
    """
    leaves: dict[str, Tensor] = {}
    lower = lowered(kinds.form.statement, values, leaves if torch.is_grad_enabled() else None)
    with without_autocast():
        return run(kinds.find(lower, sizes), lower, leaves)


def accumulate(request: Request, initial: Tensor, values: Mapping[str, Value]) -> Tensor:
    """The result of accumulating into ``initial``, which is left as it was. Differentiable."""
    if not is_plain_call((initial, *values.values())):
        if is_placed((initial, *values.values())) and is_recordable():
            from insum.distributed import dispatch  # which loads a good deal of torch

            kinds, sizes = kinds_of(request.form), request.size_values
            return dispatch.accumulate(kinds, initial, values, sizes)
        result: Tensor = (
            _transformed(request, initial, values)
            if is_transformed()
            else torch.ops.insum.accumulate(initial, *encode(request, values))
        )
        return result
    prepared = prepare(request, values, initial)
    prepared.verify(values)
    if torch.is_grad_enabled() and (initial.requires_grad or prepared.needs_gradient(values)):
        return differentiable(prepared, initial, values)
    return prepared.run("from", values, initial)


def accumulate_(request: Request, target: Tensor, values: Mapping[str, Value]) -> Tensor:
    """Accumulate into ``target`` in place. Not differentiable: `insum.inplace` has the in-place
    form that is.
    """
    if not is_plain_call((target, *values.values())):
        torch.ops.insum.accumulate_(target, *encode(request, values))
        return target
    prepared = prepare(request, values, target)
    prepared.verify(values)
    return prepared.run("into", values, target)


# --- eager autograd and torch.func ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _CastLeaf:
    """A leaf that a call was recorded with, which ran on a cast of it as it was by then."""

    name: str
    tensor: Tensor
    version: int

    def cast(self, dtype: torch.dtype, statement: str) -> Tensor:
        """The cast, recorded: for gradients of gradients."""
        if self.tensor._version != self.version:
            raise AutogradError(
                f"{self.name} was changed after the call that a gradient is asked of",
                statement=statement,
                expected="parameters as they were, where gradients have gradients of their own",
            )
        return self.tensor.to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class _DifferentiableCall:
    """What a differentiable call knows besides its tensors: the call itself, where the tensors are
    plain and verified, else what was asked for.
    """

    asked: Request | None
    numbers: dict[str, Scalar]
    names: tuple[str, ...]
    call: BoundCall | None
    leaves: tuple[_CastLeaf, ...] = ()

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
        spec: _DifferentiableCall,
        values: Mapping[str, Value],
        initial: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        """``values`` are the tensors by name, and numbers; the context holds none of them."""
        assert spec.call is not None
        result = spec.call.run("new" if initial is None else "from", values, initial)
        held = [values[name] for name in spec.names] if spec.leaves else tensors
        _save(ctx, spec, initial, held, result)  # type: ignore[arg-type]
        return result

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad
        to_initial, to_tensors = _backward(ctx, upstream[0], needs[2], needs[3:])
        return None, None, to_initial, *to_tensors


_record = plain_apply(_Recorded)


class _Differentiable(torch.autograd.Function):
    """In the form that torch.func can transform; the registered op's own autograd cannot be."""

    @staticmethod
    def forward(spec: _DifferentiableCall, initial: Tensor | None, *tensors: Tensor) -> Tensor:
        return spec.run(initial, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        spec, initial, *tensors = inputs
        _save(ctx, spec, initial, tensors, output)
        held = None if initial is None else held_by(initial.detach(), output.detach())
        ctx.save_for_forward(*tensors, output, *(() if held is None else (held,)))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad
        to_initial, to_tensors = _backward(ctx, upstream[0], needs[1], needs[2:])
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
        spec: _DifferentiableCall,
        initial: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, int]:
        values = {**spec.numbers, **dict(zip(spec.names, tensors))}
        dims = dict(zip(spec.names, in_dims[2:]))
        request, moved = batched(spec.request, values, dims, info.batch_size, new=initial is None)
        if initial is None:
            return contract(request, moved), 0
        return accumulate(request, front(initial, in_dims[1], info.batch_size), moved), 0


def differentiable(
    call: BoundCall,
    initial: Tensor | None,
    values: Mapping[str, Value],
    leaves: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """A verified call in plain eager mode, recorded for autograd; with these ``leaves`` in place of
    what was cast from them.
    """
    tensors: Collection[Any] = values.values()
    if call.prepared.scalars:
        spec, tensors = _apart(None, call, values)
    else:
        spec = _DifferentiableCall(None, {}, call.prepared.names, call)
    if leaves:
        cast = tuple([_CastLeaf(name, leaf, leaf._version) for name, leaf in leaves.items()])
        spec = _DifferentiableCall(None, spec.numbers, spec.names, call, cast)
        tensors = [leaves[n] if n in leaves else values[n] for n in spec.names]
    try:
        result: Tensor = _record(spec, values, initial, *tensors)
    except RuntimeError as error:
        made = [n for n, v in values.items() if isinstance(v, Tensor) and v.is_inference()]
        if not made or isinstance(error, InsumError):
            raise
        raise AutogradError(
            f"{made[0]} was made under inference mode, so that no gradient can be recorded with it",
            statement=spec.request.statement,
            remedy=f"pass {made[0]}={made[0]}.clone(), or call under torch.no_grad()",
        ) from error
    return result


def _transformed(request: Request, initial: Tensor | None, values: Mapping[str, Value]) -> Tensor:
    if autocasts():  # here: a batched statement is asked for the dtype of one item's result
        lower = lowered(request.statement, values)
        with without_autocast():
            return _transformed(request, initial, lower)
    spec, tensors = _apart(request, None, values)
    result: Tensor = _Differentiable.apply(spec, initial, *tensors)  # type: ignore[no-untyped-call]
    return result


def _apart(
    request: Request | None, call: BoundCall | None, values: Mapping[str, Value]
) -> tuple[_DifferentiableCall, list[Tensor]]:
    """What autograd is to see, the tensors, and the rest."""
    names: list[str] = []
    tensors: list[Tensor] = []
    numbers: dict[str, Scalar] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            names.append(name)
            tensors.append(value)
        else:
            numbers[name] = value
    return _DifferentiableCall(request, numbers, tuple(names), call), tensors


def _forward_mode(ctx: Any, initial: Tensor | None, tangents: Sequence[Tensor | None]) -> Tensor:
    """The tangent of a call that was just made, of those of its arguments."""
    saved, spec = ctx.saved_tensors, ctx.spec
    count = len(spec.names)
    values = {**spec.numbers, **dict(zip(spec.names, saved[:count]))}
    result, held = (*saved[count:], None)[:2]
    given = {name: t for name, t in zip(spec.names, tangents) if t is not None}
    return _tangent(spec.request, values, given, result, held, initial, _run_derived)


def _tangent(
    request: Request,
    values: Mapping[str, Value],
    tangents: Mapping[str, Tensor],
    result: Tensor,
    held: Tensor | None,
    initial: Tensor | None,
    run: StatementRunner,
) -> Tensor:
    name = next(iter(tangents), head(request.statement).target)
    if forward_levels() > 1:  # torch drops the tangents of the outer one
        raise _no_tangents(request.statement, name, "inside of two transforms of that mode")
    if any(torch.is_complex(t) for t in (result, *tangents.values())):
        raise _no_tangents(request.statement, name, "over complex numbers")
    known = ForwardCall(request.form, {}, request.bind(values, result.detach()).extents)
    return tangent_of(known, values, tangents, result, held, initial, run)


def _no_tangents(statement: str, name: str, which: str) -> AutogradError:
    return AutogradError(
        f"{name} carries a tangent, but statements {which} have no derivatives in forward mode",
        statement=statement,
        expected="reverse mode: backward(), torch.autograd.grad, torch.func.vjp or jacrev",
        remedy="= instead of an operator that writes in place, and the sum outside; for a hessian "
        "torch.func.hessian, which takes forward mode once; or torch.autograd.functional.jvp, "
        "which takes reverse mode twice",
    )


_dtype_of = operator.attrgetter("dtype")


def _runner_of(
    call: BoundCall | None, saved: Sequence[Tensor], upstream: Tensor
) -> StatementRunner:
    """Runs what is derived from a call. Where nothing is recorded, sizes and strides of all that
    is read follow from the call's own and from those of the gradient that arrives, but for hooks
    that gave other tensors back: one comparison finds what the last backward pass ran.
    """
    given = (upstream, *saved)
    if call is None or torch.is_grad_enabled() or not is_plain_call(given):
        return _run_derived
    layouts = *map(Tensor.stride, given), *map(_dtype_of, given)
    marks = upstream.shape, upstream.is_neg(), upstream.is_conj()
    state, kept = (layouts, marks, modes_now(settings)), call.derived

    def run_kept(kinds: Kinds, values: Mapping[str, Value], sizes: tuple[Any, ...]) -> Tensor:
        key = kinds, state
        found = kept.get(key)
        if found is None:
            found = kinds.known(values, sizes) or kinds.find(values, sizes)
            if len(kept) < MOST_DERIVED:  # as for sizes that come once
                kept[key] = found
            else:
                keep(kept, key, found, MOST_DERIVED)
        return run(found, values)

    return run_kept


def _run_derived(kinds: Kinds, values: Mapping[str, Value], sizes: tuple[Any, ...]) -> Tensor:
    if is_plain_call(values.values()):
        return run(kinds.known(values, sizes) or kinds.find(values, sizes), values)
    return contract(kinds.form.request(sizes), values)


def _save(
    ctx: Any,
    spec: _DifferentiableCall,
    initial: Tensor | None,
    tensors: Sequence[Tensor],
    result: Tensor,
) -> None:
    call = spec.call  # which was found for the settings of now
    ctx.spec, ctx.settings = spec, settings.values if call is None else call.prepared.settings
    ctx.initial_dtype = None if initial is None else initial.dtype
    more: list[Tensor] = []
    if spec.form.is_extremum if call is None else call.prepared.is_extremum:
        # The initial value itself is not kept: the in-place form overwrites it.
        more = [result] if initial is None else [result, held_by(initial.detach(), result.detach())]
    ctx.save_for_backward(*tensors, *more)


def held_by(initial: Tensor, result: Tensor) -> Tensor:
    """Where an extremum is its initial value; one that is NaN stays."""
    return (initial == result) | ~(initial == initial)


def _backward(
    ctx: Any, upstream: Tensor, initial_needs: bool, needs: Sequence[bool]
) -> tuple[Tensor | None, list[Tensor | None]]:
    saved, spec = ctx.saved_tensors, ctx.spec
    count, call = len(spec.names), spec.call
    values = {**spec.numbers, **dict(zip(spec.names, saved[:count]))}
    result, held = (*saved[count:], None, None)[:2]
    wanted = list(compress(spec.names, needs))
    raise_found()
    token = settings.hold(ctx.settings)  # this may be a thread of autograd's
    try:
        form, rules, extents = _derivable(spec, values, upstream)
        dtypes: dict[str, torch.dtype] = {}
        for leaf in spec.leaves:
            dtypes[leaf.name] = leaf.tensor.dtype
            if torch.is_grad_enabled():
                cast = values[leaf.name].dtype
                values[leaf.name] = leaf.cast(cast, spec.form.statement)
        known = ForwardCall(form, rules, extents, dtypes)
        runner = _runner_of(call, saved, upstream)
        found = gradients(known, values, upstream, wanted, result, held, runner)
    finally:
        settings.let_go(token)
    raise_found()
    to_initial = (
        found.initial.to(ctx.initial_dtype)
        if initial_needs and ctx.initial_dtype is not None
        else None
    )
    return to_initial, list(map(found.tensors.get, spec.names))


def _derivable(
    spec: _DifferentiableCall, values: Mapping[str, Value], upstream: Tensor
) -> tuple[Form, dict[object, Any], Mapping[str, Size]]:
    """Of a call what gradients are derived from: its form, the rules so far, its extents."""
    call = spec.call
    if call is None:
        return spec.form, {}, spec.request.bind(values, upstream.detach()).extents
    return call.prepared.form, call.prepared.adjoints, call.sized.extents


# --- arguments of the ops -------------------------------------------------------------------------


def encode(request: Request, values: Mapping[str, Value]) -> Arguments:
    """A request and its values as arguments that a torch op can take; sizes are named by
    `size_name`.
    """
    tensors = {n: v for n, v in values.items() if isinstance(v, Tensor)}
    numbers = {n: v for n, v in values.items() if not isinstance(v, Tensor)}
    if not _can_encode(request, numbers):
        # which says what is wrong; torch would only say that the op's schema does not fit
        request.bind(values)
    keys: list[str] = []
    sizes: list[Size] = []
    for key, size in request.sizes:
        keys.append(size_name(str(key), len(size) if isinstance(size, tuple) else None))
        sizes += size if isinstance(size, tuple) else (size,)
    padded, config = ",".join(request.padded), choice_text(request.config)
    # No numbers, and no sizes, are None and not an empty list, which torch.export cannot write to a
    # file or a package.
    named = (
        ",".join(tensors),
        list(tensors.values()),
        ",".join(numbers),
        list(numbers.values()) or None,
    )
    rest = padded, request.dtype, config, request.optimize
    return request.statement, *named, ";".join(keys), sizes or None, *rest


def size_name(key: str, length: int | None) -> str:
    """How a key of ``sizes`` stands among the arguments of an op: ``name#length`` for a shape, and
    for a single size the key itself, unless that would read as a shape.

    No key with a mark of ours means anything, but it has to arrive where that is said.
    """
    key = key.replace(";", "?")
    return f"{key}#{length}" if length is not None else f"{key}#" if "#" in key else key


def _can_encode(request: Request, numbers: Mapping[str, Value]) -> bool:
    sizes = [s for _, size in request.sizes for s in (size if isinstance(size, tuple) else (size,))]
    keys_fit = all(isinstance(key, str | int) for key, _ in request.sizes)
    return (
        keys_fit
        and all(isinstance(s, torch.SymInt) or _fits(s) for s in sizes)
        and all(isinstance(n, float | complex) or _fits(n) for n in numbers.values())
    )


def _fits(number: object) -> bool:
    return isinstance(number, int) and -(2**63) <= number < 2**63


def decode(arguments: Sequence[Any]) -> tuple[Request, dict[str, Value]]:
    """The reverse of `encode`."""
    statement, names, tensors, number_names, numbers, keys, sizes, *rest = arguments
    padded, dtype, config, optimize = rest
    values: dict[str, Value] = dict(zip(_split(names, ","), tensors, strict=True))
    values.update(zip(_split(number_names, ","), map(_plain_number, numbers or ()), strict=True))
    read: list[tuple[str | int, Size | tuple[Size, ...]]] = []
    rest = list(sizes or ())
    for key in _split(keys, ";"):
        name, mark, length = key.rpartition("#")
        name = name if mark else key
        read.append(
            (
                int(name) if name.isdigit() else name,
                tuple(rest.pop(0) for _ in range(int(length))) if length and mark else rest.pop(0),
            )
        )
    padded_names, choice = tuple(_split(padded, ",")), choice_from(config)
    request = Request(statement, tuple(read), padded_names, dtype, choice, optimize=optimize)
    return request, values


def decode_exactly(arguments: Sequence[Any]) -> tuple[Request, dict[str, Value]]:
    """The same, with symbolic numbers as they are: for what is traced, not only looked at."""
    request, values = decode(arguments)
    values.update(zip(_split(arguments[3], ","), arguments[4] or ()))
    return request, values


def _split(text: str, mark: str) -> list[str]:
    return text.split(mark) if text else []


def _plain_number(number: Any) -> Scalar:
    """A tracer's symbolic number stands for one of its type; only the type matters where tracers
    look.
    """
    if isinstance(number, torch.SymInt):
        return 1
    result: Scalar = (
        1.0
        if isinstance(number, torch.SymFloat)
        else True
        if isinstance(number, torch.SymBool)
        else number
    )
    return result


# --- registration ---------------------------------------------------------------------------------

_VALUES = "str names, Tensor[] tensors, str scalar_names, Scalar[]? scalars"
_ARGUMENTS = (
    f"str statement, {_VALUES}, str size_names, SymInt[]? sizes, str padded, "
    "ScalarType? dtype, str config, str optimize"
)
_library = torch.library.Library("insum", "DEF")  # type: ignore[no-untyped-call]


def _define(schema: str, kernel: Any) -> None:
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _library.impl(schema.partition("(")[0], kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


def _contract_kernel(*arguments: Any) -> Tensor:
    request, values = decode(arguments)
    prepared = prepare(request, values)
    prepared.verify(values)
    return prepared.run("new", values, None)


def _accumulate_kernel(initial: Tensor, *arguments: Any) -> Tensor:
    request, values = decode(arguments)
    prepared = prepare(request, values, initial)
    prepared.verify(values)
    return prepared.run("from", values, initial)


def _accumulate_in_place_kernel(target: Tensor, *arguments: Any) -> None:
    request, values = decode(arguments)
    prepared = prepare(request, values, target)
    prepared.verify(values)
    prepared.run("into", values, target)


_define(f"contract({_ARGUMENTS}) -> Tensor", _contract_kernel)
_define(f"accumulate(Tensor initial, {_ARGUMENTS}) -> Tensor", _accumulate_kernel)
_define(f"accumulate_(Tensor(a!) target, {_ARGUMENTS}) -> ()", _accumulate_in_place_kernel)


def register_subclass(name: str, kind: type, rule: Any) -> None:
    """What one of the ops does with tensors of a subclass, below autograd."""
    torch.library.register_torch_dispatch(f"insum::{name}", kind, rule, lib=_library)


# Fake kernels: shapes, dtypes and devices from binding, which looks at no data.


def _contract_fake(*arguments: Any) -> Tensor:
    request, values = decode(arguments)
    problem = request.bind(values)
    return torch.empty(problem.shape, dtype=problem.dtype, device=problem.device)


def _accumulate_fake(initial: Tensor, *arguments: Any) -> Tensor:
    request, values = decode(arguments)
    request.bind(values, initial)
    return torch.empty(initial.shape, dtype=initial.dtype, device=initial.device)


def _accumulate_in_place_fake(target: Tensor, *arguments: Any) -> None:
    request, values = decode(arguments)
    request.bind(values, target)


for _name, _fake in (
    ("contract", _contract_fake),
    ("accumulate", _accumulate_fake),
    ("accumulate_", _accumulate_in_place_fake),
):
    torch.library.register_fake(f"insum::{_name}", _fake, lib=_library)


# Gradients of the two functional ops.


def _setup_contract(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _setup(ctx, None, inputs, output)


def _setup_accumulate(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _setup(ctx, inputs[0], inputs[1:], output)


def _setup(ctx: Any, initial: Tensor | None, inputs: tuple[Any, ...], output: Tensor) -> None:
    request, values = decode(inputs)
    tensors = {n: v for n, v in values.items() if isinstance(v, Tensor)}
    numbers = dict(zip(_split(inputs[3], ","), inputs[4] or ()))
    spec = _DifferentiableCall(request, numbers, tuple(tensors), None)
    _save(ctx, spec, initial, list(tensors.values()), output)
    # torch takes any empty list for one of tensors, and wants a list back.
    ctx.rest = [
        [] if isinstance(value, list | tuple) and not value else None for value in inputs[3:]
    ]


def _backward_contract(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
    _, to_tensors = _backward(ctx, upstream, False, ctx.needs_input_grad[2])
    return None, None, to_tensors, *ctx.rest


def _backward_accumulate(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
    to_initial, to_tensors = _backward(
        ctx, upstream, ctx.needs_input_grad[0], ctx.needs_input_grad[3]
    )
    return to_initial, None, None, to_tensors, *ctx.rest


def _tangents_of_contract(*arguments: Any) -> Tensor | None:
    if with_tangent(arguments[2]) < 0:
        return None
    return _with_tangents(None, arguments)


def _tangents_of_accumulate(initial: Tensor, *arguments: Any) -> Tensor | None:
    if with_tangent((initial, *arguments[2])) < 0:
        return None
    return _with_tangents(initial, arguments)


def _with_tangents(initial: Tensor | None, arguments: tuple[Any, ...]) -> Tensor:
    """The call of an op, and the tangent of its result."""
    request, given = decode(arguments)
    pairs = {name: unpack_dual(v) for name, v in given.items() if isinstance(v, Tensor)}
    values = given | {name: primal for name, (primal, _) in pairs.items()}
    tangents = {name: t for name, (_, t) in pairs.items() if t is not None}
    if forward_levels():  # what is made here does not reach the transform
        name = next(iter(tangents), head(request.statement).target)
        raise _no_tangents(request.statement, name, "in compiled code")
    own = unpack_dual(initial) if initial is not None else None
    result: Tensor = (
        torch.ops.insum.contract(*encode(request, values))
        if own is None
        else torch.ops.insum.accumulate(own[0], *encode(request, values))
    )
    held = None if own is None else held_by(own[0].detach(), result.detach())
    tangent = _tangent(
        request, values, tangents, result, held, None if own is None else own[1], _call_derived
    )
    return make_dual(result, tangent)


def _call_derived(kinds: Kinds, values: Mapping[str, Value], sizes: tuple[Any, ...]) -> Tensor:
    result: Tensor = torch.ops.insum.contract(*encode(kinds.form.request(sizes), values))
    return result


def _no_tangents_in_place(initial: Tensor, *arguments: Any) -> None:
    place = with_tangent((initial, *arguments[2]))
    if place >= 0:
        names = head(arguments[0]).target, *_split(arguments[1], ",")
        raise _no_tangents(arguments[0], names[place], "in place")


register_autograd(
    _library,
    torch.ops.insum.contract.default,
    _tangents_of_contract,
    _backward_contract,
    _setup_contract,
)
register_autograd(
    _library,
    torch.ops.insum.accumulate.default,
    _tangents_of_accumulate,
    _backward_accumulate,
    _setup_accumulate,
)
register_autograd(_library, torch.ops.insum.accumulate_.default, _no_tangents_in_place)


# vmap: the batch becomes an index variable.


def _contract_vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
    request, values = _batched(info, in_dims, arguments, new=True)
    return contract(request, values), 0


def _accumulate_vmap(
    info: Any, in_dims: tuple[Any, ...], initial: Tensor, *arguments: Any
) -> tuple[Tensor, int]:
    request, values = _batched(info, in_dims[1:], arguments)
    return accumulate(request, front(initial, in_dims[0], info.batch_size), values), 0


def _accumulate_in_place_vmap(
    info: Any, in_dims: tuple[Any, ...], target: Tensor, *arguments: Any
) -> tuple[None, None]:
    if in_dims[0] is None:
        raise AutogradError(
            "vmap: the output is not batched, but what is accumulated into it is",
            remedy="pass the output through vmap too, or use = instead",
        )
    request, values = _batched(info, in_dims[1:], arguments)
    accumulate_(request, target.movedim(in_dims[0], 0), values)
    return None, None


def _batched(
    info: Any, in_dims: tuple[Any, ...], arguments: tuple[Any, ...], *, new: bool = False
) -> tuple[Request, dict[str, Value]]:
    request, values = decode(arguments)
    dims = dict(zip(_split(arguments[1], ","), in_dims[2]))
    return batched(request, values, dims, info.batch_size, new=new)


for _name, _rule in (
    ("contract", _contract_vmap),
    ("accumulate", _accumulate_vmap),
    ("accumulate_", _accumulate_in_place_vmap),
):
    torch.library.register_vmap(f"insum::{_name}", _rule, lib=_library)


# Autocast: floating tensors, float64 excepted, are cast; what gives the output its dtype is not.

AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def _autocast(device: str, op: Any, first: int) -> Any:
    def kernel(*arguments: Any) -> Any:
        target, dtype = head(arguments[first]).target, torch.get_autocast_dtype(device)
        names = _split(arguments[first + 1], ",")
        tensors = [
            t if name == target else _lowered(t, dtype, device)
            for name, t in zip(names, arguments[first + 2], strict=True)
        ]
        with torch.autocast(device, enabled=False):
            return op(*arguments[: first + 2], tensors, *arguments[first + 3 :])

    return kernel


def lowered(
    statement: str, values: Mapping[str, Value], leaves: dict[str, Tensor] | None = None
) -> dict[str, Value]:
    """The values of a statement as autocast has them. Leaves that a gradient is asked of are cast
    without being recorded, and put into ``leaves``, where that is given.
    """
    target, found, known, dtype = head(statement).target, dict(values), "", None
    for name, value in values.items():
        if not isinstance(value, Tensor) or not value.is_floating_point() or name == target:
            continue
        device = value.device.type
        if device != known:
            known = device
            on = device in AUTOCAST_KEYS and torch.is_autocast_enabled(device)
            dtype = torch.get_autocast_dtype(device) if on else None
        if dtype is None or value.dtype is dtype or value.dtype is torch.float64:
            continue
        if leaves is not None and value.requires_grad and value.is_leaf:
            if not value.is_inference():  # of such a one no versions are counted
                leaves[name], value = value, value.detach()
        found[name] = value.to(dtype)
    return found


def _lowered(tensor: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    eligible = (
        tensor.is_floating_point()
        and tensor.dtype != torch.float64
        and tensor.device.type == device
    )
    return tensor.to(dtype) if eligible else tensor


for _device, _key in AUTOCAST_KEYS.items():
    for _name, _first in (("contract", 0), ("accumulate", 1), ("accumulate_", 1)):
        _library.impl(_name, _autocast(_device, getattr(torch.ops.insum, _name), _first), _key)  # type: ignore[no-untyped-call]
