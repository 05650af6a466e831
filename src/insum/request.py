"""A request and the kinds of its values -> a prepared call: bound, lowered, with its checks; made
once and remembered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from insum.errors import BindingError, NotFusedError
from insum.graph import Lowered, lower
from insum.lang.bind import Problem, Size, Value, bind
from insum.lang.expr import Access, accesses, tensors_of
from insum.lang.parser import parse
from insum.plan.config import Choice, Config, choice_of
from insum.runtime.check import Use, in_range, ranges_of, uses_of, verify
from insum.settings import Values, settings

if TYPE_CHECKING:
    from insum.runtime.site import Site

SizesArgument: TypeAlias = Mapping[str | int, Size | Sequence[Size]] | None
Sizes: TypeAlias = tuple[tuple[str | int, Size | tuple[Size, ...]], ...]
_MAX_PREPARED = 4096
#: Short ways that one statement may have at a time.
MOST_SITES = 8


@dataclass(frozen=True, slots=True)
class Request:
    """A statement and the options it is called with. ``dtype`` overrides that of the result (for
    gradients, which must have their input's).
    """

    statement: str
    sizes: Sizes = ()
    padded: tuple[str, ...] = ()
    dtype: torch.dtype | None = None
    config: Choice | None = None

    @property
    def is_extremum(self) -> bool:
        return head(self.statement).operator in ("max=", "min=")

    def bind(self, values: Mapping[str, Value], initial: Tensor | None = None) -> Problem:
        statement = parse(self.statement)
        if initial is not None and statement.target.tensor not in values:
            values = {**values, statement.target.tensor: initial}
        problem = bind(statement, values, sizes=dict(self.sizes), padded=self.padded)
        return problem if self.dtype is None else replace(problem, dtype=self.dtype)


def request_of(
    statement: str,
    out_shape: Sequence[Size] | None,
    sizes: SizesArgument,
    padded: Sequence[str],
    config: Config | Sequence[Config] | None = None,
) -> Request:
    """A request from the options as users give them."""
    if not isinstance(statement, str):
        parse(statement)  # which says what a statement is
    given: Sizes = ()
    if out_shape is not None:
        given = ((head(statement).target, _shape(statement, "out_shape", out_shape)),)
    if sizes is not None:
        if not isinstance(sizes, Mapping):
            remedy = "the whole shape of the output is given as out_shape="
            raise BindingError(
                f"sizes is {sizes!r}",
                statement=statement,
                expected="a dict such as {'i': 8}",
                remedy=remedy,
            )
        given += tuple((key, _size(statement, key, size)) for key, size in sizes.items())
    if not isinstance(padded, Iterable):
        raise BindingError(
            f"padded is {padded!r}",
            statement=statement,
            expected="names of index tensors",
            remedy="padded=('D',)",
        )
    return Request(
        statement,
        given,
        (padded,) if isinstance(padded, str) else tuple(padded),
        None,
        choice_of(config),
    )


def _shape(statement: str, name: str, shape: Sequence[Size]) -> tuple[Size, ...]:
    if not isinstance(shape, Sequence) or isinstance(shape, str):
        raise BindingError(
            f"{name} is {shape!r}", statement=statement, expected="a shape: a tuple of integers"
        )
    return tuple(map(_integer, shape))


def _size(statement: str, key: str | int, size: Size | Sequence[Size]) -> Size | tuple[Size, ...]:
    return (
        _shape(statement, f"sizes[{key!r}]", size)
        if isinstance(size, Sequence) and not isinstance(size, str)
        else _integer(size)
    )


def _integer(size: Size) -> Size:
    """NumPy's integers as Python's; binding refuses what is none."""
    return int(size) if isinstance(size, Integral) and not isinstance(size, bool) else size


@dataclass(frozen=True, slots=True)
class Head:
    """What the left side tells before any tensor is known."""

    target: str
    operator: str
    reads_target: bool

    def arguments(self, tensors: Mapping[str, Value]) -> Mapping[str, Value]:
        """What is read: without the output, unless the right side reads it too."""
        return (
            tensors if self.reads_target else {n: v for n, v in tensors.items() if n != self.target}
        )


def head(statement: str) -> Head:
    # which says what a statement is
    return _head(statement) if isinstance(statement, str) else parse(statement)


@functools.lru_cache(maxsize=4096)
def _head(statement: str) -> Head:
    parsed = parse(statement)
    return Head(parsed.target.tensor, parsed.operator, parsed.target.tensor in tensors_of(parsed))


@dataclass(slots=True, eq=False)
class Prepared:
    """A problem that is ready to run on any values of the same kinds and shapes."""

    request: Request
    problem: Problem
    settings: Values
    uses: tuple[Use, ...]
    sources: tuple[str, ...]
    """Tensors that are read as values and can have a gradient."""
    target: str
    """The output's name where it was passed and is to be accumulated into, or ''."""
    reads: tuple[str, ...]
    """Every tensor that is read."""
    ranges: tuple[tuple[str, int, int], ...]
    (
        """Index tensors, and the range in which all of their values are valid wherever they are """
        """used."""
    )
    fusable: bool
    _graphs: dict[str, _Graph] = field(default_factory=dict)
    _calls: int = 0

    def verify(self, values: Mapping[str, Value]) -> None:
        """Index values against their range, before anything is written."""
        if self.uses and not in_range(self.ranges, values):
            verify(self.problem, self.uses, values)

    def is_frequent(self) -> bool:
        """Whether fused calls have come the long way for the 2nd, 4th, 8th ... time, so that a
        shorter way may pay.
        """
        self._calls += 1
        return self.fusable and self._calls > 1 and self._calls & (self._calls - 1) == 0

    def site(self, values: Mapping[str, Value]) -> Site | None:
        """The short way for calls like this one, which was just made."""
        from insum.runtime import build, fused, site

        if settings.backend in ("graph", "inductor") or not all(
            isinstance(v, Tensor) for v in values.values()
        ):
            return None
        indices = build.anchors(self.problem) if settings.check == "never" else self._indices()
        target = values[self.target] if self.target else None
        program = fused.lookup(self.problem, values, target, self.request.config)  # type: ignore[arg-type]
        return site.site_of(self.request, program, values, self.sources, indices, self.target)

    def _indices(self) -> tuple[str, ...]:
        statement = self.problem.statement
        every = (statement.target, *accesses(statement.value))
        return tuple(
            dict.fromkeys(
                inner.tensor
                for access in every
                for index in access.indices
                for inner in accesses(index)
            )
        )

    def needs_gradient(self, values: Mapping[str, Value]) -> bool:
        for name in self.sources:  # noqa: SIM110  # on the path of every call, where a generator would cost as much as all else here
            if values[name].requires_grad:  # type: ignore[union-attr]
                return True
        return False

    def run(self, mode: str, values: Mapping[str, Value], target: Tensor | None) -> Tensor:
        """Run the fused kernel where there is one, else the graph. ``mode``: ``new``, ``from`` (a
        given value), ``into`` (in place).
        """
        if self.fusable:
            result = self._run_fused(mode, values, target)
            if result is not None:
                return result
        graph = self._graphs.get(mode) or self._graph(mode)
        if target is None:
            return graph.forward(*[values[name] for name in graph.inputs], *graph.sizes)
        if mode == "into" and (
            graph.late and _shares_memory(target, values, graph.late) or self._must_copy(target)
        ):
            return target.copy_(self.run("from", values, target))
        return graph.forward(target, *[values[name] for name in graph.inputs], *graph.sizes)

    def _must_copy(self, target: Tensor) -> bool:
        """torch.compile takes a float64 tensor without dimensions on the CPU for a number, and
        forgets to write it.
        """
        return self.settings.backend == "inductor" and target.dim() == 0

    def _graph(self, mode: str) -> _Graph:
        lowered: Lowered = lower(self.problem, mode)
        forward: Callable[..., Tensor] = lowered.module.forward
        if settings.backend == "inductor":
            from insum.inductor import forward_of  # which loads a good deal of torch

            forward = forward_of(lowered, self.problem)
        graph = self._graphs[mode] = _Graph(
            forward, lowered.inputs, lowered.size_arguments(self.problem), lowered.late
        )
        return graph

    def _run_fused(
        self, mode: str, values: Mapping[str, Value], target: Tensor | None
    ) -> Tensor | None:
        if target is not None and (mode == "from" or _shares_memory(target, values, self.reads)):
            fresh = _fused(self.problem, values, target.clone(), self.request.config)
            return fresh if fresh is None or mode == "from" else target.copy_(fresh)
        return _fused(self.problem, values, target, self.request.config)


@dataclass(frozen=True, slots=True)
class _Graph:
    """A graph and what to call it with."""

    forward: Callable[..., Tensor]
    inputs: tuple[str, ...]
    sizes: tuple[object, ...]
    late: tuple[str, ...]


def _fused(
    problem: Problem, values: Mapping[str, Value], target: Tensor | None, config: Choice | None
) -> Tensor | None:
    """The fused kernel's result (in ``target``, where one is given), or None where there is none
    for this problem.
    """
    result: Tensor | None = None
    if settings.backend != "graph":
        try:
            from insum.runtime import fused  # type: ignore[attr-defined, unused-ignore]
        except ImportError:
            pass
        else:
            result = fused.run(problem, values, target, config)
    if result is None and settings.require_fused:
        fact, remedy = (
            f"there is no fused kernel for this statement on {problem.device}",
            "set insum.settings.require_fused = False to run it as a graph",
        )
        raise problem.complain(NotFusedError, fact, remedy=remedy)
    return result


def _shares_memory(target: Tensor, values: Mapping[str, Value], names: tuple[str, ...]) -> bool:
    """Whether one of the named arguments lies in the memory that is written to."""
    storage = target.untyped_storage().data_ptr()
    return any(
        isinstance(v := values[name], Tensor) and v.untyped_storage().data_ptr() == storage
        for name in names
        if name in values
    )


# --- remembering ----------------------------------------------------------------------------------

_prepared: dict[object, Prepared] = {}


def kind_key(value: Value) -> object:
    """What binding depends on; requires_grad, strides and data are left out."""
    return (
        (value.dtype, value.shape, value.device, value.layout)
        if isinstance(value, Tensor)
        else type(value)
    )


def prepare(
    request: Request, values: Mapping[str, Value], initial: Tensor | None = None
) -> Prepared:
    """The prepared call for values of these kinds."""
    key = (
        request,
        torch.get_default_dtype(),
        None if initial is None else kind_key(initial),
        *((n, kind_key(v)) for n, v in values.items()),
    )
    found = _prepared.get(key)
    if found is None or found.settings is not settings.values:
        found = _prepare(request, values, initial)
        # without a tensor the default device decides
        if any(kind.device is not None for kind in found.problem.kinds.values()):
            remember(key, found)
    return found


def remember(key: object, prepared: Prepared) -> None:
    if len(_prepared) >= _MAX_PREPARED:
        _prepared.clear()
    _prepared[key] = prepared


def _prepare(request: Request, values: Mapping[str, Value], initial: Tensor | None) -> Prepared:
    problem = request.bind(values, initial)
    left = head(request.statement)
    target = (
        left.target if left.operator != "=" and isinstance(values.get(left.target), Tensor) else ""
    )
    uses = uses_of(problem)
    fusable = (
        settings.backend == "fused" or settings.backend == "auto" and problem.device.type == "cuda"
    )
    fusable = fusable or settings.require_fused and settings.backend != "inductor"
    return Prepared(
        request,
        problem,
        settings.values,
        uses,
        _sources(problem),
        target,
        tensors_of(problem.statement),
        ranges_of(uses),
        fusable,
    )


def _sources(problem: Problem) -> tuple[str, ...]:
    reads: list[Access] = list(accesses(problem.statement.value, nested=False))
    names = dict.fromkeys(a.tensor for a in reads)
    return tuple(
        n
        for n in names
        if (k := problem.kinds[n]).device is not None
        and (k.dtype.is_floating_point or k.dtype.is_complex)
    )
