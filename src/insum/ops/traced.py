"""What a tracer sees of a call: lists are put together and one op is called. Nothing is parsed in
traced code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from insum.compat.placed import has_placements, while_tracing
from insum.lang.bind import Size, Value
from insum.ops.encoding import size_name
from insum.ops.mean import mean_plan
from insum.plan.config import Config, choice_text
from insum.plan.path import Optimize, optimize_text

_HALVES = (torch.float16, torch.bfloat16)


def left_side(statement: str) -> tuple[str, str, bool]:
    """The output's name, the operator, and whether the right side reads the output. String methods
    only, which a tracer folds.

    >>> left_side("C[D[y],x] += A[y,E[r]] * C[r,x]")
    ('C', '+=', True)
    """
    left, _, right = statement.partition("=")
    left, operator = left.strip(), "="
    for mark in ("+", "-", "max", "min", "mean"):
        rest = left.removesuffix(mark)
        if rest != left and (mark in "+-" or rest[-1:] in ("]", " ", "\n", "\t")):
            left, operator = rest, "+=" if mark == "-" else f"{mark}="
    name = left.partition("[")[0].strip()
    for mark in "[](),+-*/<>!=":
        left, right = left.replace(mark, " "), right.replace(mark, " ")
    return name, operator, name in left.split()[1:] or name in right.split()


@while_tracing
def _rules_are_there() -> bool:
    """Let the ops know of DTensors, where there can be some."""
    if has_placements():
        from insum.distributed import dispatch  # noqa: F401  # which registers them
    return True


def traced(
    statement: str,
    out_shape: Sequence[Size] | None,
    sizes: Mapping[str | int, Size | Sequence[Size]] | None,
    padded: Sequence[str],
    config: Config | Sequence[Config] | None,
    optimize: Optimize,
    values: dict[str, Value],
) -> Tensor:
    _rules_are_there()
    target, operator, reads_target = left_side(statement)
    given: list[tuple[str, Any]] = [] if out_shape is None else [(target, out_shape)]
    if sizes is not None:
        given += [(str(key), size) for key, size in sizes.items()]
    padded_names = padded if isinstance(padded, str) else ",".join(padded)
    chosen = (
        ""
        if config is None
        else choice_text((config,) if isinstance(config, Config) else tuple(config))
    )
    wished = optimize_text(optimize)
    output = values.get(target)
    if operator == "mean=":
        return _traced_mean(statement, given, padded_names, values, chosen, wished)
    if operator == "=" or not isinstance(output, Tensor):
        result: Tensor = torch.ops.insum.contract(
            *_arguments(statement, given, padded_names, values, None, chosen, wished)
        )
        return result
    reads = (
        values
        if reads_target
        else {name: value for name, value in values.items() if name != target}
    )
    differentiable = torch.is_grad_enabled() and (
        output.requires_grad
        or any(isinstance(v, Tensor) and v.requires_grad for v in reads.values())
    )
    if not differentiable:
        torch.ops.insum.accumulate_(
            output, *_arguments(statement, given, padded_names, reads, None, chosen, wished)
        )
        return output
    if operator == "+=":
        wide = torch.float32 if output.dtype in _HALVES else output.dtype
        given = [(target, output.shape), *[(key, size) for key, size in given if key != target]]
        return output.add_(
            torch.ops.insum.contract(
                *_arguments(statement, given, padded_names, reads, wide, chosen, wished)
            )
        )
    return output.copy_(
        torch.ops.insum.accumulate(
            output, *_arguments(statement, given, padded_names, reads, None, chosen, wished)
        )
    )


def _traced_mean(
    statement: str,
    given: list[tuple[str, Any]],
    padded: str,
    values: dict[str, Value],
    config: str,
    optimize: str,
) -> Tensor:
    """A sum divided by how many points there are. The compiler makes the division part of what
    comes next, and `fusion` takes out what depends on indices alone.
    """
    total_text, counting, dims, times, counted, reads, padded_counts, read = mean_plan(
        statement, padded
    )
    kinds = [values[name] for name in read if name in values]
    dtypes = {t.dtype for t in kinds if isinstance(t, Tensor) and t.dim() and t.is_floating_point()}
    halves = [dtype for dtype in _HALVES if dtypes == {dtype}]
    wide = torch.float32 if halves else None
    total = torch.ops.insum.contract(
        *_arguments(total_text, given, padded, values, wide, config, optimize)
    )
    if left_side(statement)[0] in values or not (total.is_floating_point() or total.is_complex()):
        # which says what is wrong
        arguments = _arguments(statement, given, padded, values, None, config, optimize)
        return torch.ops.insum.contract(*arguments)  # type: ignore[no-any-return]
    known = {**values, "": total}
    count: Any = 1
    for name, places in times:
        count = count * _extent(name, places, given, known)
    if counting:
        sizes = [(str(d), total.shape[dim]) for d, dim in enumerate(dims)]
        sizes += [(v, _extent(v, places, given, known)) for v, places in counted]
        indices = {name: values[name] for name in reads}
        arguments = _arguments(counting, sizes, padded_counts, indices, torch.float64, "", "auto")
        shape = [total.shape[d] if d in dims else 1 for d in range(total.dim())]
        count = (count * torch.ops.insum.contract(*arguments)).reshape(shape)
        count = count.clamp(min=1).to(total)
    else:
        count = torch.sym_max(count, 1)  # type: ignore[no-untyped-call]
    result: Tensor = (total / count).to(halves[0] if halves else total.dtype)
    return result


def _extent(
    name: str,
    places: tuple[tuple[str, int], ...],
    given: list[tuple[str, Any]],
    values: Mapping[str, Value],
) -> Any:
    """The extent of a variable: that of a dimension where it stands alone, or what was given."""
    for tensor, dim in places:
        value = values.get(tensor)
        if isinstance(value, Tensor):
            return value.shape[dim]
    return dict(given)[name]


def _arguments(
    statement: str,
    given: list[tuple[str, Any]],
    padded: str,
    values: Mapping[str, Value],
    dtype: torch.dtype | None,
    config: str,
    optimize: str,
) -> tuple[Any, ...]:
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    numbers = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
    keys: list[str] = []
    sizes: list[Size] = []
    for key, size in given:
        if isinstance(size, tuple | list):
            keys.append(size_name(key, len(size)))
            sizes.extend(size)
        else:
            keys.append(size_name(key, None))
            sizes.append(size)
    return (
        statement,
        ",".join(tensors),
        list(tensors.values()),
        ",".join(numbers),
        list(numbers.values()) or None,
        ";".join(keys),
        sizes or None,
        padded,
        dtype,
        config,
        optimize,
    )
