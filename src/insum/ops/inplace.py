"""``+=``, ``max=`` and ``min=`` into a tensor that was passed: everything is checked before
anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from insum.call import running
from insum.call.prepared import BoundCall
from insum.call.request import Request, RequestSizes, head
from insum.compat.placed import is_placed
from insum.compat.tensors import base_of
from insum.errors import AutogradError, BindingError, InsumError
from insum.lang.bind import Value
from insum.ops.eager import accumulate, accumulate_, contract

_HALVES = (torch.float16, torch.bfloat16)


def add_in_place(request: Request, call: BoundCall | None, tensors: Mapping[str, Value]) -> Tensor:
    """Accumulate into the output among ``tensors`` and return it. ``call`` is given in plain eager
    mode.
    """
    left = head(request.statement)
    target = tensors[left.target]
    assert isinstance(target, Tensor)
    check_target(request, target, tensors)
    if torch.is_grad_enabled() and (
        target.requires_grad
        or (_any_requires(tensors) if call is None else call.needs_gradient(tensors))
    ):
        if call is None:
            # a mistake in the output's shape or dtype is found before anything runs
            request.bind(tensors)
        return _differentiable(request, left.operator, target, left.arguments(tensors))
    if call is None:
        return accumulate_(request, target, left.arguments(tensors))
    call.verify(tensors)
    return running.run(call, "into", tensors, target)


def _any_requires(tensors: Mapping[str, Value]) -> bool:
    return any(isinstance(v, Tensor) and v.requires_grad for v in tensors.values())


def _differentiable(
    request: Request, operator: str, target: Tensor, values: Mapping[str, Value]
) -> Tensor:
    """Through torch's own in-place ops, which autograd tracks."""
    name = head(request.statement).target
    if name in values:
        # what the right side read must outlive the writing
        values = {**values, name: target.clone()}
    if operator != "+=" or is_placed((target,)):  # torch adds to fewer placements than we do
        return _written(request, target, values, "copy_", accumulate(request, target, values))
    wide = torch.float32 if target.dtype in _HALVES else target.dtype
    update = contract(
        replace(request, sizes=((name, tuple(target.shape)), *_without(request, name)), dtype=wide),
        values,
    )
    return _written(request, target, values, "add_", update)


def _without(request: Request, name: str) -> RequestSizes:
    return tuple((k, v) for k, v in request.sizes if k != name)


def _written(
    request: Request, target: Tensor, values: Mapping[str, Value], how: str, update: Tensor
) -> Tensor:
    try:
        result: Tensor = getattr(target, how)(update)
    except RuntimeError as error:
        raise _forbidden(
            request, {**values, head(request.statement).target: target}, str(error).splitlines()[0]
        ) from error
    return result


def check_target(request: Request, target: Tensor, tensors: Mapping[str, Value]) -> None:
    """Refuse, before anything runs, to write where autograd forbids it or where one write would be
    seen twice.
    """
    if torch.is_grad_enabled() and target.requires_grad:
        base = base_of(target)
        if target.is_leaf or base is not None and base.is_leaf:
            what = "a leaf" if target.is_leaf else "a view of a leaf"
            raise _forbidden(
                request,
                tensors,
                f"NAME is {what} that requires a gradient, so that it cannot be written in place",
            )
    if target.is_inference() and not torch.is_inference_mode_enabled():
        raise _forbidden(
            request,
            tensors,
            "NAME was made under inference mode, so that it cannot be written outside of it",
        )
    if not target.is_contiguous() and _overlaps(target):
        where = f"shape {tuple(target.shape)}, strides {target.stride()}"
        raise _forbidden(
            request,
            tensors,
            f"several elements of NAME lie at one place in memory ({where}): it cannot be "
            "written in place",
            BindingError,
        )


def _forbidden(
    request: Request,
    tensors: Mapping[str, Value],
    fact: str,
    kind: type[InsumError] = AutogradError,
) -> InsumError:
    problem = request.bind(tensors)
    name = problem.statement.target.tensor
    remedy = f"pass {name}={name}.clone(), or compute the new value with = and without {name}"
    return problem.complain(
        kind, fact.replace("NAME", name), span=problem.statement.target.span, remedy=remedy
    )


def _overlaps(target: Tensor) -> bool:
    """Whether two elements may share memory, as in expanded and unfolded tensors."""
    reach = 0
    for stride, size in sorted(
        (abs(st), sz) for st, sz in zip(target.stride(), target.shape) if sz > 1
    ):
        if stride <= reach:
            return target.numel() > 0
        reach += stride * (size - 1)
    return False
