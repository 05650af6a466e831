"""The torch ops ``insum::contract``, ``insum::accumulate`` and ``insum::accumulate_``: schemas, and
what they do under a tracer, autograd, a transform and autocast.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from insum.call import running
from insum.call.prepared import prepare
from insum.call.request import Request, head
from insum.compat.many import over_items
from insum.compat.tangents import (
    forward_levels,
    register_autograd,
    with_tangent,
)
from insum.errors import AutogradError
from insum.lang.bind import Value
from insum.ops.autocast import AUTOCAST_KEYS, lowered_tensor
from insum.ops.eager import (
    DifferentiableCall,
    accumulate,
    accumulate_,
    attained,
    contract,
    no_tangents,
    pull_back,
)
from insum.ops.encoding import decode, split_at
from insum.ops.vmap import batched, front_of_base
from insum.settings import settings

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
    return running.run(prepared, "new", values, None)


def _accumulate_kernel(initial: Tensor, *arguments: Any) -> Tensor:
    request, values = decode(arguments)
    prepared = prepare(request, values, initial)
    prepared.verify(values)
    return running.run(prepared, "from", values, initial)


def _accumulate_in_place_kernel(target: Tensor, *arguments: Any) -> None:
    request, values = decode(arguments)
    prepared = prepare(request, values, target)
    prepared.verify(values)
    running.run(prepared, "into", values, target)


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
    shape = request.bind(values, initial).shape
    return torch.empty(shape, dtype=initial.dtype, device=initial.device)


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
    numbers = dict(zip(split_at(inputs[3], ","), inputs[4] or ()))
    ctx.spec = DifferentiableCall(request, numbers, tuple(tensors), None, settings.values)
    ctx.initial_shape = None if initial is None else initial.shape
    more = attained(initial, output) if request.form.is_extremum else ()
    ctx.save_for_backward(*tensors.values(), *more)
    # torch takes any empty list for one of tensors, and wants a list back.
    ctx.rest = [
        [] if isinstance(value, list | tuple) and not value else None for value in inputs[3:]
    ]


def _backward_contract(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
    _, to_tensors = pull_back(ctx, upstream, False, ctx.needs_input_grad[2])
    return None, None, to_tensors, *ctx.rest


def _backward_accumulate(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
    to_initial, to_tensors = pull_back(
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
    """The call of an op, recorded with the tangents of what it reads."""
    request, values = decode(arguments)
    if forward_levels():  # what is made here does not reach the transform
        place = with_tangent((initial, *arguments[2]))
        name = (head(request.statement).target, *split_at(arguments[1], ","))[place]
        raise no_tangents(request.statement, name, "in compiled code")
    return contract(request, values) if initial is None else accumulate(request, initial, values)


def _no_tangents_in_place(initial: Tensor, *arguments: Any) -> None:
    place = with_tangent((initial, *arguments[2]))
    if place >= 0:
        names = head(arguments[0]).target, *split_at(arguments[1], ",")
        raise no_tangents(arguments[0], names[place], "in place")


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
    led = front_of_base(request, initial, in_dims[0], info.batch_size)
    return accumulate(request, led, values), 0


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
    dims = dict(zip(split_at(arguments[1], ","), in_dims[2]))
    return batched(request, values, dims, info.batch_size, new=new)


for _name, _rule in (
    ("contract", _contract_vmap),
    ("accumulate", _accumulate_vmap),
    ("accumulate_", _accumulate_in_place_vmap),
):
    torch.library.register_vmap(f"insum::{_name}", _rule, lib=_library)


# What is many at once in torch's older way, as tangents of a vectorized jacobian are.


def _contract_many(*arguments: Any) -> Tensor | None:
    statement, names, tensors, *rest = arguments

    def one(*items: Tensor) -> list[Tensor | None]:
        return [contract(*decode((statement, names, items, *rest)))]

    return over_items(one, tensors)[0]


def _accumulate_many(*arguments: Any) -> Tensor | None:
    initial, statement, names, tensors, *rest = arguments

    def one(begin: Tensor, *items: Tensor) -> list[Tensor | None]:
        request, values = decode((statement, names, items, *rest))
        return [accumulate(request, begin, values)]

    return over_items(one, (initial, *tensors))[0]


_library.impl("contract", _contract_many, "Batched")  # type: ignore[no-untyped-call]
_library.impl("accumulate", _accumulate_many, "Batched")  # type: ignore[no-untyped-call]


# Autocast: tensors are cast, and the op is called again.


def _autocast(device: str, op: Any, first: int) -> Any:
    def kernel(*arguments: Any) -> Any:
        target, dtype = head(arguments[first]).target, torch.get_autocast_dtype(device)
        names = split_at(arguments[first + 1], ",")
        tensors = [
            t if name == target else lowered_tensor(t, dtype, device)
            for name, t in zip(names, arguments[first + 2], strict=True)
        ]
        with torch.autocast(device, enabled=False):
            return op(*arguments[: first + 2], tensors, *arguments[first + 3 :])

    return kernel


for _device, _key in AUTOCAST_KEYS.items():
    for _name, _first in (("contract", 0), ("accumulate", 1), ("accumulate_", 1)):
        _library.impl(_name, _autocast(_device, getattr(torch.ops.insum, _name), _first), _key)  # type: ignore[no-untyped-call]
