"""Gradients of a call as further calls, on statements that `lang.derive` gives; hence gradients of
every order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from insum.lang.bind import Problem, Value
from insum.lang.derive import adjoint, winners
from insum.lang.expr import tensors_of, variables
from insum.lang.parser import parse
from insum.request import Request, Sizes

Contract: TypeAlias = Callable[[Request, Mapping[str, Value]], Tensor]


@dataclass(frozen=True, slots=True)
class Gradients:
    """What reaches the initial value, and each tensor that was asked for."""

    initial: Tensor
    tensors: dict[str, Tensor]


def gradients(
    request: Request,
    values: Mapping[str, Value],
    upstream: Tensor,
    wanted: Sequence[str],
    result: Tensor | None,
    held: Tensor | None,
    contract: Contract,
) -> Gradients:
    """Gradients of ``wanted``. ``result``, and where it ``held`` its initial value, matter for
    ``max=`` and ``min=`` only.
    """
    problem = _problem(request, values, upstream)
    if result is not None:
        upstream, to_initial = _shared(request, problem, values, upstream, result, held, contract)
    else:
        to_initial = upstream
    return Gradients(
        to_initial,
        {
            name: _gradient(request, problem, name, values, upstream, result, contract)
            for name in wanted
        },
    )


def _problem(request: Request, values: Mapping[str, Value], upstream: Tensor) -> Problem:
    """The forward problem: its extents are passed on, because a derived statement cannot always
    tell them.
    """
    return request.bind(values, upstream.detach())


def _gradient(
    request: Request,
    problem: Problem,
    name: str,
    values: Mapping[str, Value],
    upstream: Tensor,
    result: Tensor | None,
    contract: Contract,
) -> Tensor:
    source = values[name]
    assert isinstance(source, Tensor)
    kinds = {
        **{n: k.dtype for n, k in problem.kinds.items()},
        problem.statement.target.tensor: upstream.dtype,
    }
    rule = adjoint(
        request.statement, name, frozenset(n for n, dtype in kinds.items() if dtype.is_complex)
    )
    total: Tensor | None = None
    for text in rule.statements:
        part = _derived(
            request,
            problem,
            text,
            values,
            {rule.upstream: upstream, rule.result: result},
            source.shape,
            source.dtype,
            contract,
        )
        total = part if total is None else total + part
    return torch.zeros_like(source) if total is None else total


def _derived(
    request: Request,
    problem: Problem,
    text: str,
    values: Mapping[str, Value],
    more: Mapping[str, Tensor | None],
    shape: Sequence[int | torch.SymInt],
    dtype: torch.dtype,
    contract: Contract,
) -> Tensor:
    """One derived statement, run on those of the values that it reads."""
    statement = parse(text)
    reads = tensors_of(statement)
    known: dict[str, Value] = {**values, **{n: t for n, t in more.items() if t is not None}}
    arguments = {n: known[n] for n in reads}
    is_complex = not dtype.is_complex and any(
        isinstance(v, Tensor) and v.is_complex() for v in arguments.values()
    )
    used = {*variables(statement.target), *variables(statement.value)}
    sizes: Sizes = (*enumerate(shape), *((v, n) for v, n in problem.extents.items() if v in used))
    padded = tuple(p for p in request.padded if p in reads)
    value = contract(
        Request(text, sizes, padded, dtype.to_complex() if is_complex else dtype), arguments
    )
    return value.real if is_complex else value


def _shared(
    request: Request,
    problem: Problem,
    values: Mapping[str, Value],
    upstream: Tensor,
    result: Tensor,
    held: Tensor | None,
    contract: Contract,
) -> tuple[Tensor, Tensor]:
    """For a maximum: the gradient divided evenly among the points that attain it, and the part that
    goes to the initial value.
    """
    text, _, name = winners(request.statement)
    with torch.no_grad():
        wide = upstream.dtype if upstream.dtype.itemsize > 2 else torch.float32
        count = _derived(
            request, problem, text, values, {name: result}, problem.shape, wide, contract
        )
        held = torch.zeros_like(count) if held is None else held.to(wide)
        count = count + held
    share = torch.where(count > 0, upstream / count, 0).to(upstream.dtype)
    return share, share * held.to(upstream.dtype)
