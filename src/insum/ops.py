"""The torch ops ``insum::contract``, ``insum::accumulate`` and ``insum::accumulate_``, and the
short way past the dispatcher.

A call becomes a `Request` (statement and options) and named values. In plain eager mode it runs at
once; under a tracer, a transform, autocast or a tensor subclass it goes through the registered op,
which means the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from insum.autograd import gradients
from insum.batching import batched, front
from insum.compat.calls import is_plain_call, is_transformed
from insum.errors import AutogradError
from insum.lang.bind import Size, Value
from insum.plan.config import choice_from, choice_text
from insum.request import Prepared, Request, head, prepare
from insum.settings import settings

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
]


# --- what the rest of insum calls -----------------------------------------------------------------


def contract(request: Request, values: Mapping[str, Value]) -> Tensor:
    """The result of a statement as a new tensor. Differentiable."""
    # Without a tensor the default device decides, which is not to be seen from within an op.
    if not is_plain_call(values.values()) and any(isinstance(v, Tensor) for v in values.values()):
        result: Tensor = (
            _transformed(request, None, values)
            if is_transformed()
            else torch.ops.insum.contract(*encode(request, values))
        )
        return result
    prepared = prepare(request, values)
    prepared.verify(values)
    if torch.is_grad_enabled() and prepared.needs_gradient(values):
        return differentiable(prepared, None, values)
    return prepared.run("new", values, None)


def accumulate(request: Request, initial: Tensor, values: Mapping[str, Value]) -> Tensor:
    """The result of accumulating into ``initial``, which is left as it was. Differentiable."""
    if not is_plain_call((initial, *values.values())):
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
class _Spec:
    """What a differentiable call knows besides its tensors; ``prepared`` where the tensors are
    plain and verified.
    """

    request: Request
    numbers: dict[str, Scalar]
    names: tuple[str, ...]
    prepared: Prepared | None

    def run(self, initial: Tensor | None, tensors: Sequence[Tensor]) -> Tensor:
        values = {**self.numbers, **dict(zip(self.names, tensors))}
        if self.prepared is not None:
            return self.prepared.run("new" if initial is None else "from", values, initial)
        return (
            contract(self.request, values)
            if initial is None
            else accumulate(self.request, initial, values)
        )


class _Differentiable(torch.autograd.Function):
    """In the form that torch.func can transform; the registered op's own autograd cannot be."""

    @staticmethod
    def forward(spec: _Spec, initial: Tensor | None, *tensors: Tensor) -> Tensor:
        return spec.run(initial, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        spec, initial, *tensors = inputs
        _save(ctx, spec.request, spec.numbers, spec.names, initial, tensors, output)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        to_initial, to_tensors = _backward(
            ctx, upstream[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2:]
        )
        return None, to_initial, *to_tensors

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], spec: _Spec, initial: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, int]:
        values = {**spec.numbers, **dict(zip(spec.names, tensors))}
        request, moved = batched(
            spec.request, values, dict(zip(spec.names, in_dims[2:])), info.batch_size
        )
        if initial is None:
            return contract(request, moved), 0
        return accumulate(request, front(initial, in_dims[1], info.batch_size), moved), 0


def differentiable(
    prepared: Prepared, initial: Tensor | None, values: Mapping[str, Value]
) -> Tensor:
    """A verified call in plain eager mode, recorded for autograd."""
    return _applied(prepared.request, prepared, initial, values)


def _transformed(request: Request, initial: Tensor | None, values: Mapping[str, Value]) -> Tensor:
    return _applied(request, None, initial, values)


def _applied(
    request: Request, prepared: Prepared | None, initial: Tensor | None, values: Mapping[str, Value]
) -> Tensor:
    tensors = {n: v for n, v in values.items() if isinstance(v, Tensor)}
    numbers = {n: v for n, v in values.items() if not isinstance(v, Tensor)}
    spec = _Spec(request, numbers, tuple(tensors), prepared)
    result: Tensor = _Differentiable.apply(spec, initial, *tensors.values())  # type: ignore[no-untyped-call]
    return result


def _save(
    ctx: Any,
    request: Request,
    numbers: dict[str, Scalar],
    names: tuple[str, ...],
    initial: Tensor | None,
    tensors: Sequence[Tensor],
    result: Tensor,
) -> None:
    ctx.request, ctx.numbers, ctx.names, ctx.settings = request, numbers, names, settings.values
    ctx.initial_dtype = None if initial is None else initial.dtype
    more: list[Tensor] = []
    if request.is_extremum:
        # The initial value itself is not kept: the in-place form overwrites it.
        more = [result] if initial is None else [result, initial.detach() == result.detach()]
    ctx.save_for_backward(*tensors, *more)


def _backward(
    ctx: Any, upstream: Tensor, initial_needs: bool, needs: Sequence[bool]
) -> tuple[Tensor | None, list[Tensor | None]]:
    saved = list(ctx.saved_tensors)
    count = len(ctx.names)
    values = {**ctx.numbers, **dict(zip(ctx.names, saved[:count]))}
    result, held = (*saved[count:], None, None)[:2]
    wanted = [name for name, need in zip(ctx.names, needs) if need]
    with settings.holding(ctx.settings):  # this may be a thread of autograd's
        found = gradients(ctx.request, values, upstream, wanted, result, held, contract)
    to_initial = (
        found.initial.to(ctx.initial_dtype)
        if initial_needs and ctx.initial_dtype is not None
        else None
    )
    return to_initial, [found.tensors.get(name) for name in ctx.names]


# --- arguments of the ops -------------------------------------------------------------------------


def encode(request: Request, values: Mapping[str, Value]) -> Arguments:
    """A request and its values as arguments that a torch op can take; a shape among the sizes is
    spelt ``name#length``.
    """
    tensors = {n: v for n, v in values.items() if isinstance(v, Tensor)}
    numbers = {n: v for n, v in values.items() if not isinstance(v, Tensor)}
    if not _can_encode(request, numbers):
        # which says what is wrong; torch would only say that the op's schema does not fit
        request.bind(values)
    keys: list[str] = []
    sizes: list[Size] = []
    for key, size in request.sizes:
        keys.append(f"{key}#{len(size)}" if isinstance(size, tuple) else str(key))
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
    return request.statement, *named, ";".join(keys), sizes or None, padded, request.dtype, config


def _can_encode(request: Request, numbers: Mapping[str, Value]) -> bool:
    sizes = [s for _, size in request.sizes for s in (size if isinstance(size, tuple) else (size,))]
    keys_fit = all(isinstance(key, str | int) for key, _ in request.sizes)
    return (
        keys_fit
        and all(isinstance(s, int | torch.SymInt) for s in sizes)
        and all(isinstance(n, bool | int | float | complex) for n in numbers.values())
    )


def decode(arguments: Sequence[Any]) -> tuple[Request, dict[str, Value]]:
    """The reverse of `encode`."""
    statement, names, tensors, number_names, numbers, keys, sizes, padded, dtype, config = arguments
    values: dict[str, Value] = dict(zip(_split(names, ","), tensors, strict=True))
    values.update(zip(_split(number_names, ","), map(_plain_number, numbers or ()), strict=True))
    read: list[tuple[str | int, Size | tuple[Size, ...]]] = []
    rest = list(sizes or ())
    for key in _split(keys, ";"):
        name, mark, length = key.partition("#")
        read.append(
            (
                int(name) if name.isdigit() else name,
                tuple(rest.pop(0) for _ in range(int(length))) if mark else rest.pop(0),
            )
        )
    return Request(
        statement, tuple(read), tuple(_split(padded, ",")), dtype, choice_from(config)
    ), values


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
    "ScalarType? dtype, str config"
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
    _save(ctx, request, numbers, tuple(tensors), initial, list(tensors.values()), output)
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


torch.library.register_autograd(
    "insum::contract", _backward_contract, setup_context=_setup_contract, lib=_library
)
torch.library.register_autograd(
    "insum::accumulate", _backward_accumulate, setup_context=_setup_accumulate, lib=_library
)


# vmap: the batch becomes an index variable.


def _contract_vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
    request, values = _batched(info, in_dims, arguments)
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
    info: Any, in_dims: tuple[Any, ...], arguments: tuple[Any, ...]
) -> tuple[Request, dict[str, Value]]:
    request, values = decode(arguments)
    dims = dict(zip(_split(arguments[1], ","), in_dims[2]))
    return batched(request, values, dims, info.batch_size)


for _name, _rule in (
    ("contract", _contract_vmap),
    ("accumulate", _accumulate_vmap),
    ("accumulate_", _accumulate_in_place_vmap),
):
    torch.library.register_vmap(f"insum::{_name}", _rule, lib=_library)


# Autocast: floating tensors, float64 excepted, are cast; what gives the output its dtype is not.


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


def _lowered(tensor: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    eligible = (
        tensor.is_floating_point()
        and tensor.dtype != torch.float64
        and tensor.device.type == device
    )
    return tensor.to(dtype) if eligible else tensor


for _device, _key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
    for _name, _first in (("contract", 0), ("accumulate", 1), ("accumulate_", 1)):
        _library.impl(_name, _autocast(_device, getattr(torch.ops.insum, _name), _first), _key)  # type: ignore[no-untyped-call]
