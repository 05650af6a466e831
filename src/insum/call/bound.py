"""One call of certain sizes and strides: whether its indices are in range, and which way it runs:
in kernels, as a CPU has it, as a graph, or as several statements, one after the other.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from insum.call import in_kernels, on_graph, on_host
from insum.call.request import Request
from insum.call.stages import Stage
from insum.compat.calls import is_profiled, is_undisturbed
from insum.lang.bind import Problem, Value
from insum.lang.problem import resized
from insum.plan.sizes import BASE
from insum.plan.uses import Use
from insum.runtime.check import in_range, live_uses, ranges_of, verify

if TYPE_CHECKING:
    from insum.call.prepared import Kinds, PreparedCall
    from insum.host.joint import JointGraph
    from insum.host.places import Lowering
    from insum.runtime.fused import FusedCall


@dataclass(frozen=True, slots=True, eq=False)
class FilledBuffer:
    """A buffer, and what it was filled from: tensors by weak references, for those that were not
    kept are gone, and others may be where they were.
    """

    buffer: Tensor
    sources: tuple[Any, ...]

    def is_from(self, values: Iterable[Value]) -> bool:
        found = (one() if isinstance(one, weakref.ref) else one for one in self.sources)
        return all(one is value for one, value in zip(found, values, strict=True))


#: Buffers of several statements on the same tensors, by what fills them, and from which tensors.
FilledBuffers: TypeAlias = dict[tuple[object, ...], FilledBuffer]
#: Bytes of buffers that are kept for the next of these statements.
MOST_FILLED = 1 << 26


@dataclass(frozen=True, slots=True, eq=False)
class BoundStage:
    """One statement of several, and its sizes in a call."""

    kinds: Kinds
    stage: Stage
    sizes: tuple[Any, ...]

    def given(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """Of all values and buffers, those that it reads."""
        return {name: values[name] for name in self.stage.reads}

    def fill(self, given: Mapping[str, Value], filled: FilledBuffers | None) -> Tensor:
        """Its buffer: that of another statement on the same tensors, where there is one."""
        if filled is None:
            return self.kinds.find(given, self.sizes).run("new", given, None)
        before = self.filled(given, filled)
        if before is not None:
            return before
        found = self.kinds.find(given, self.sizes).run("new", given, None)
        if found.nbytes + sum(one.buffer.nbytes for one in filled.values()) <= MOST_FILLED:
            self.add(found, given, filled)
        return found

    def filled(self, given: Mapping[str, Value], filled: FilledBuffers) -> Tensor | None:
        """Its buffer, where it has been filled from these very tensors."""
        before = filled.get(self._key(given))
        return before.buffer if before is not None and before.is_from(given.values()) else None

    def add(self, buffer: Tensor, given: Mapping[str, Value], filled: FilledBuffers) -> None:
        """Its buffer, for other statements on the same tensors."""
        sources = (weakref.ref(v) if isinstance(v, Tensor) else v for v in given.values())
        filled[self._key(given)] = FilledBuffer(buffer, tuple(sources))

    def _key(self, given: Mapping[str, Value]) -> tuple[object, ...]:
        return self.kinds, self.sizes, *map(id, given.values())


def _run_stages(
    stages: tuple[BoundStage, ...],
    mode: str,
    values: Mapping[str, Value],
    target: Tensor | None,
    filled: FilledBuffers | None,
) -> Tensor:
    """Fill one buffer after the other, then run the last statement as the whole was to be run."""
    *before, last = stages
    known = dict(values)
    for one in before:
        known[one.stage.fills] = one.fill(one.given(known), filled)
    given = last.given(known)
    return last.kinds.find(given, last.sizes, target).run(mode, given, target)


class BoundCall:
    """A call of certain sizes and strides."""

    __slots__ = (
        *("_problem", "_staged", "_uses", "based", "checked", "count", "derived", "extents"),
        *("forward", "fused", "graphs", "joints", "little", "lowerings", "prepared", "ranges"),
        *("recorded", "shape", "sizes", "spans", "waits"),
    )

    def __init__(
        self,
        prepared: PreparedCall,
        spans: tuple[int, ...],
        shape: tuple[int, ...],
        extents: Mapping[str, int],
        sizes: tuple[int, ...],
    ) -> None:
        """``spans`` are the ``extents``, in the order of the problem's, ``shape`` that of the
        output, ``sizes`` those that were given.
        """
        self.prepared, self.sizes = prepared, sizes
        self.spans, self.shape, self.extents = spans, shape, extents
        self.count = 1
        #: By layouts and by derived statement, the calls that its backward passes have found.
        self.derived: dict[object, dict[Any, BoundCall]] = {}
        #: What autograd records of it, and what its gradients are derived from (`ops.eager`).
        self.recorded: Any = None
        self.forward: Any = None
        self._problem: Problem | None = None
        self._uses: tuple[Use, ...] | None = None
        #: Of the indexed dimensions that have a point, the least and the largest value.
        self.ranges: tuple[tuple[str, int, int], ...] = ()
        self._staged: dict[bool, tuple[BoundStage, ...]] = {}
        self.fused: FusedCall | None = (
            prepared.fused.call(spans, shape, extents) if prepared.is_fused else None
        )
        #: The same for results that are accumulated from a tensor.
        self.based: FusedCall | None = None
        #: By mode, and whether with operations of a CPU's own.
        self.graphs: dict[tuple[str, bool], on_graph.SizedGraph] = {}
        #: How a CPU runs this call, by whether the result is new or accumulated.
        self.lowerings: dict[bool, Lowering | None] = {}
        #: With others, in this order, those that a CPU runs as one graph, and which these are.
        self.joints: dict[tuple[BoundCall, ...], tuple[JointGraph, tuple[int, ...]] | None] = {}
        #: The index tensors that a CPU has found in range last, by the numbers of their entries.
        self.checked: tuple[int, ...] = ()
        #: Whether a CPU takes the graph until index tensors come back; and while nothing is known
        #: of one.
        self.waits: bool | None = None
        self.little = False

    @property
    def request(self) -> Request:
        """The request of this call, sizes included."""
        return self.prepared.form.request(self.sizes)

    def problem(self, values: Mapping[str, Value]) -> Problem:
        """The problem with the sizes of this call."""
        if self._problem is None:
            shapes = {n: v.shape for n, v in values.items() if isinstance(v, Tensor)}
            self._problem = resized(self.prepared.problem, self.extents, self.shape, shapes)
        return self._problem

    def needs_gradient(self, values: Mapping[str, Value]) -> bool:
        return self.prepared.needs_gradient(values)

    # --- checks ---

    def verify(self, values: Mapping[str, Value]) -> None:
        """Index values against their range, before anything is written; where kernels look
        themselves, they do.
        """
        if self.prepared.looks_first:
            self.look(values)

    def look(self, values: Mapping[str, Value]) -> None:
        """The same, unless a CPU looks when this call is run: at what is remembered of them, where
        something is. Where it is several statements, none of them knows what all of them read.
        """
        prepared = self.prepared
        staged = prepared.orderable and self.staged(values, in_place=False)
        if staged or not prepared.on_host:
            self.look_now(values)

    def look_now(self, values: Mapping[str, Value]) -> None:
        uses = self.uses(values)
        if uses and not in_range(self.ranges, values):
            verify(self.problem(values), uses, values)

    def uses(self, values: Mapping[str, Value]) -> tuple[Use, ...]:
        """The indexed dimensions that have a point."""
        if self._uses is None:
            problem = self.problem(values)
            self._uses = live_uses(problem, self.prepared.uses)
            self.ranges = ranges_of(problem, self._uses)
        return self._uses

    def wrapped(self, values: Mapping[str, Value]) -> Mapping[str, Value]:
        """Negative values counted from the end, where they do: the graph takes places as they
        are.
        """
        found, problem = dict(values), self.problem(values)
        for use in self.uses(values):
            index = values.get(use.tensor)
            if use.wraps and isinstance(index, Tensor):
                wide = index.to(torch.promote_types(index.dtype, torch.int32))
                found[use.tensor] = torch.where(wide < 0, wide + use.limit(problem), wide)
        return found

    # --- running ---

    def run(
        self,
        mode: str,
        values: Mapping[str, Value],
        target: Tensor | None,
        named: bool = False,
        filled: FilledBuffers | None = None,
    ) -> Tensor:
        """Run generated kernels where there are some, else the graph. ``mode``: ``new``, ``from``
        (a given value), ``into`` (in place). ``named``: profilers have been told the statement.
        ``filled``: buffers of statements that were run before on some of these very tensors, which
        live on, and to which this adds.
        """
        if is_profiled() and not named:
            with torch.profiler.record_function(f"insum: {self.prepared.form.statement}"):
                return self.run(mode, values, target, True, filled)
        if self.prepared.orderable:
            stages = self.staged(values, in_place=mode == "into")
            if stages:
                if mode == "into" and self.prepared.kernels_look and self.prepared.on_path:
                    self.look(values)
                return _run_stages(stages, mode, values, self.whole(target), filled)
        if self.prepared.fusable:
            fused = self.fused or in_kernels.kernels_of(self, values, target)
            if fused is not None:
                if target is None:
                    found = fused(values, None)
                elif mode == "into":
                    found = in_kernels.run_into(self, fused, values, target)
                else:  # what it starts from is one more tensor that kernels read
                    based = self.based or self.started_from()
                    found = based({**values, BASE: target}, None)
                if isinstance(found, Tensor):
                    return found
                in_kernels.fall_back(self, values, found.reason)
            if self.prepared.kernels_look:
                # torch's own kernels would end the process' use of the device
                self.look_now(values)
        undisturbed = self.prepared.on_host and is_undisturbed()
        if undisturbed:
            result = on_host.run(self, mode, values, target)
            if result is not None:
                return result
        if self.prepared.on_host:
            self.look_now(values)
        if self.prepared.form.wraps:
            values = self.wrapped(values)
        return on_graph.run(self, mode, values, self.whole(target), undisturbed)

    def buffers(
        self, values: Mapping[str, Value], filled: FilledBuffers
    ) -> list[tuple[BoundStage, Tensor]]:
        """Of the statements that this call is made of those that read nothing but its values, with
        their buffers, where those have been filled.
        """
        found = []
        for one in self.staged(values, in_place=False)[:-1]:
            if values.keys() >= {*one.stage.reads}:
                buffer = one.filled(one.given(values), filled)
                if buffer is not None:
                    found.append((one, buffer))
        return found

    def started_from(self) -> FusedCall:
        """The generated kernels of a new result that is accumulated from a tensor."""
        self.based = found = self.prepared.based.call(self.spans, self.shape, self.extents)
        return found

    def whole(self, target: Tensor | None) -> Tensor | None:
        """What is accumulated from or into, in the shape of the result: it may be broadcast."""
        shape = self.shape
        return target if target is None or target.shape == shape else target.expand(shape)

    def staged(self, values: Mapping[str, Value], *, in_place: bool) -> tuple[BoundStage, ...]:
        """The statements that this call is made of, with their sizes; none where it is one."""
        found = self._staged.get(in_place)
        if found is None:
            found = self._staged[in_place] = self.prepared.stages(self, values, in_place=in_place)
        return found
