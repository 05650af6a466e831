"""Parts of a statement that are statements of their own, run as graphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite, prod
from typing import Any

import torch
from torch import Tensor

from insum.graph.lower import Lowered
from insum.host.arguments import HostCall
from insum.host.operations import lower_on_host
from insum.host.roles import HostRoles, cast, plain_variables
from insum.lang.bind import Problem, Value
from insum.lang.expand import expand
from insum.lang.expr import (
    Access,
    Expr,
    Statement,
    fresh,
    index_of,
    names_of,
    product,
    tensors_of,
    variables,
)
from insum.lang.problem import Kind


@dataclass(frozen=True, slots=True, eq=False)
class SubProblem:
    problem: Problem
    graph: Lowered

    def __call__(self, values: Mapping[str, Value]) -> Tensor:
        return self.graph(self.problem, values)


def sub_problem(
    whole: Problem,
    target: Access,
    factors: list[Expr],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    more: Mapping[str, Kind],
    extents: Mapping[str, int],
) -> Problem:
    """``target = factors`` as a problem of its own. ``more`` describes tensors, and ``extents``
    variables, that the whole has not got.
    """
    statement = Statement(target, "=", product(factors))
    reads = tensors_of(statement)
    kinds, sizes = {**whole.kinds, **more}, {**whole.extents, **extents}
    used = dict.fromkeys((*variables(target), *variables(statement.value)))
    return Problem(
        statement,
        expand(statement),
        {name: kinds[name] for name in reads},
        {v: sizes[v] for v in used},
        shape,
        dtype,
        whole.device,
        whole.padded & frozenset(reads),
    )


def extent_of(problem: Problem, vars: Iterable[str]) -> int:
    """How many points these variables have together."""
    return prod(int(problem.extents[v]) for v in vars)


def is_finite(result: Tensor, wide: torch.dtype) -> bool:
    """Whether all numbers are; asked of their sum in a wide dtype: one of many halves is more than
    they hold.
    """
    return isfinite(result.sum(dtype=wide).item())


def tensor_kind(shape: tuple[int, ...], dtype: torch.dtype) -> Kind:
    return Kind(dtype, shape, torch.device("cpu"), 2)


# --- what scales the points -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """One number for each point: a tensor (its dimensions in this order, where they are not yet),
    the value of a statement, or nothing, which is one.
    """

    name: str = ""
    order: tuple[int, ...] = ()
    part: SubProblem | None = None

    def __call__(self, call: HostCall, dtype: torch.dtype) -> Tensor | None:
        if self.part is not None:
            return cast(self.part(call.indices()).reshape(-1), dtype)
        if not self.name:
            return None
        found: Any = call.values[self.name]
        if self.order:
            found = found.permute(self.order)
        if found.dim() != 1:
            found = found.reshape(-1)
        return found if found.dtype is dtype else found.to(dtype)  # type: ignore[no-any-return]


def weights_of(roles: HostRoles) -> Weights:
    if not roles.narrow:
        return Weights()
    if len(roles.narrow) == 1:
        (factor,) = roles.narrow
        vars = plain_variables(factor)
        if isinstance(factor, Access) and _is_point(roles, factor):
            order = tuple(vars.index(v) for v in roles.points)
            return Weights(factor.tensor, () if vars == roles.points else order)
    target = Access(_free_name(roles, "scale"), tuple(index_of(v) for v in roles.points))
    problem = sub_problem(
        roles.problem, target, list(roles.narrow), roles.sizes, roles.dtype, {}, {}
    )
    return Weights(part=SubProblem(problem, lower_on_host(problem)))


@dataclass(frozen=True, slots=True, eq=False)
class Finish:
    """From one number a point to the result: scaled, and summed into the left side."""

    order: tuple[int, ...] = ()
    name: str = ""
    part: SubProblem | None = None

    def __call__(self, call: HostCall, found: Tensor) -> Tensor:
        if self.part is None:
            return found.permute(self.order).contiguous()
        return self.part({**call.indices(), self.name: found})


def finish_of(roles: HostRoles) -> Finish:
    left = plain_variables(roles.target.access)
    if not roles.narrow and _is_point(roles, roles.target.access):
        return Finish(tuple(roles.points.index(v) for v in left))
    name = _free_name(roles, "dots")
    factor = Access(name, tuple(index_of(v) for v in roles.points))
    problem = sub_problem(
        roles.problem,
        roles.problem.statement.target,
        [*roles.narrow, factor],
        roles.target.shape,
        roles.dtype,
        {name: tensor_kind(roles.sizes, roles.dtype)},
        {},
    )
    return Finish(name=name, part=SubProblem(problem, lower_on_host(problem)))


def _is_point(roles: HostRoles, access: Access) -> bool:
    """Whether an access has one place for each point: every variable is a dimension of its own."""
    vars = plain_variables(access)
    kind = roles.problem.kinds.get(access.tensor)
    is_number = kind is not None and kind.device is None
    return not is_number and len(access.indices) == len(set(vars)) == len(roles.points)


def _free_name(roles: HostRoles, wanted: str) -> str:
    return fresh(wanted, names_of(roles.problem.statement))
