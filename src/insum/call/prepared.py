"""One call, from tensors to its result.

    Kinds          one statement with its options; which kinds of tensors it was called with
    PreparedCall   one kind: dtypes, ranks, device, modes. Bound once; sizes are symbols
    BoundCall      the same with the sizes and strides of a call: extents, shape, what is launched

Eager calls, compiled statements, layers, gradients and fused programs all come here: a call finds
its `PreparedCall` by one guard, its `BoundCall` by its sizes, and the program by what is known of
its index tensors.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from insum import memory
from insum.bounded import is_first, keep
from insum.call.overlap import shares_memory, written_to
from insum.call.request import Form, Request, head
from insum.call.stages import Stage, is_copyable, is_orderable, layouts_of, size_key, stages_of
from insum.compat.calls import is_profiled, is_undisturbed, kinds_guard, modes_now
from insum.errors import NotFusedError
from insum.graph.lower import lower
from insum.lang.bind import Problem, Value
from insum.lang.expr import Access, accesses, tensors_of
from insum.lang.measure import Measure, measure_of
from insum.lang.problem import Sized
from insum.plan.library import is_left_to_library
from insum.plan.path import is_path
from insum.plan.uses import Use, uses_of
from insum.runtime.check import bounds_of, in_range, live_uses, ranges_of, verify
from insum.settings import SettingValues, settings

if TYPE_CHECKING:
    from insum.host.places import IndexEntries, Lowering
    from insum.runtime.fused import FusedCall, FusedKind

#: Statements with their options, kinds of tensors of one, sizes of one kind, and those of them that
#: are recognised by one comparison.
MOST_FORMS, MOST_KINDS, MOST_SIZES, MOST_RECENT = 4096, 64, 40, 4
#: Classes of sizes of one kind for which the order of contraction is kept.
MOST_ORDERS = 64
#: Calls of the same sizes before they are recognised by one comparison.
OFTEN = 2
#: Sizes of one kind above which that is not tried.
FEW_SIZES = 16


# --- kinds ----------------------------------------------------------------------------------------


class Kinds:
    """The kinds of calls of one statement with its options."""

    __slots__ = ("calls", "form", "placed", "shelves")

    def __init__(self, form: Form) -> None:
        self.form = form
        self.calls: list[PreparedCall] = []
        #: By dtypes and device, the programs that kinds with other settings share.
        self.shelves: dict[object, Any] = {}
        #: By placements and sizes of DTensors, how a call over them is run.
        self.placed: dict[object, Any] = {}

    def find(
        self, values: Mapping[str, Value], sizes: tuple[Any, ...], initial: Tensor | None = None
    ) -> BoundCall:
        """The call for values of these kinds and sizes; ``initial`` is what is accumulated into,
        where it is not among the values.
        """
        found = self.known(values, sizes, initial)
        if found is not None:
            return found
        call = _prepare(self, values, sizes, initial)
        given = (*values.values(),) if initial is None else (*values.values(), initial)
        if any(isinstance(v, Tensor) for v in given):  # without one the default device decides
            self.calls.insert(0, call)
            del self.calls[MOST_KINDS:]
        return call.bind(values, sizes, initial, given)

    def known(
        self, values: Mapping[str, Value], sizes: tuple[Any, ...], initial: Tensor | None = None
    ) -> BoundCall | None:
        """The same, where a call of this kind was made before."""
        for size in sizes:
            if type(size) is not int:  # which binding refuses
                return None
        names, modes = tuple(values), modes_now(settings)
        given = (*values.values(),) if initial is None else (*values.values(), initial)
        for value in given:  # torch's guards end the process at one
            if type(value) is Tensor and value.is_nested:
                return None
        count = len(given)
        for call in self.calls:
            if call.names == names and call.count == count and call.modes == modes:
                # of many sizes the last ones are not likely to be meant
                for exactly, wanted, found in call.recent if len(call.bound) <= FEW_SIZES else ():
                    if wanted == sizes and exactly(*given):
                        return found
                if call.alike(*given):
                    return call.bind(values, sizes, initial, given)
        return None


_forms: dict[Form, Kinds] = {}


def kinds_of(form: Form) -> Kinds:
    """What is known of the calls of a statement with its options."""
    found = _forms.get(form)
    if found is None:
        found = keep(_forms, form, Kinds(form), MOST_FORMS)
    return found


def prepare(
    request: Request, values: Mapping[str, Value], initial: Tensor | None = None
) -> BoundCall:
    """The call of a request on these values."""
    return kinds_of(request.form).find(values, request.size_values, initial)


@dataclass(eq=False)
class PreparedCall:
    """A kind of call, ready to run on tensors of any sizes.

    Attributes:
        names: of the values, in the order in which they are passed; ``count`` counts what is
            accumulated into, too, where it is not among them.
        alike: whether other values are of this kind.
        modes: what decides besides the values.
        sources: tensors that are read as values and can have a gradient.
        target: the output's name where it was passed and is to be accumulated into, or ''.
        reads: every tensor that is read; ``indices``: those that stand in an index.
        fusable: whether generated kernels are to be tried.
        orderable: whether several statements may be better than one; ``orders`` are those, by
            sizes; ``copyable``: also because kernels read tensors better in other layouts.
        on_host: whether a CPU may go its own ways (`insum.host`).
        recent: calls of the same sizes that were made more than once, the last first.
    """

    form: Form
    shelves: dict[object, Any]
    problem: Problem  # with the sizes of the first call
    names: tuple[str, ...]
    count: int
    alike: Callable[..., bool]
    modes: tuple[Any, ...]
    settings: SettingValues
    uses: tuple[Use, ...]
    sources: tuple[str, ...]
    target: str
    reads: tuple[str, ...]
    fusable: bool
    orderable: bool
    copyable: bool
    on_host: bool
    kernels_look: bool
    looks_first: bool  # at index values, before a call runs
    negated: bool  # some tensor is to be read as its negative
    scalars: bool  # some value is a Python number
    measure: Measure
    indices: tuple[str, ...]
    recent: list[tuple[Callable[..., bool], tuple[int, ...], BoundCall]] = field(
        default_factory=list
    )
    bound: dict[object, BoundCall] = field(default_factory=dict)
    orders: dict[object, tuple[Stage, ...]] = field(default_factory=dict)
    #: What `insum.ops.gradients` has derived for the gradients of this kind of call.
    adjoints: dict[object, Any] = field(default_factory=dict)

    @functools.cached_property
    def on_path(self) -> bool:
        """Whether a path was asked for, rather than looked for."""
        return is_path(self.form.optimize)

    @functools.cached_property
    def is_extremum(self) -> bool:
        return self.form.is_extremum

    @functools.cached_property
    def searches(self) -> bool:
        """Whether a first call looks for the best config."""
        return self.settings.effort != "none" and self.form.config is None

    @functools.cached_property
    def fused(self) -> FusedKind:
        """This kind of call as generated kernels."""
        from insum.runtime.fused import fused_kind  # which takes a while to import
        from insum.runtime.shelf import Shelf

        form, problem = self.form, self.problem
        dtypes = tuple((n, k.dtype, k.device, k.strength) for n, k in problem.kinds.items())
        shelf = keep(self.shelves, (dtypes, problem.dtype, problem.device), Shelf(), MOST_KINDS)
        return fused_kind(problem, self.uses, form.wraps, form.config, self.negated, shelf)

    def bind(
        self,
        values: Mapping[str, Value],
        sizes: tuple[int, ...],
        initial: Tensor | None,
        given: tuple[Any, ...],
    ) -> BoundCall:
        """The call for these sizes and strides; where they do not fit together, binding says so."""
        key = (sizes, *[(v.shape, v.stride()) for v in given if isinstance(v, Tensor)])
        found = self.bound.get(key)
        if found is None:
            bound = BoundCall(self, self.measured(values, sizes, initial), sizes)
            return keep(self.bound, key, bound, MOST_SIZES)
        found.count += 1
        if found.count == OFTEN and len(self.bound) <= FEW_SIZES:
            self.remember(found, sizes, given)
        return found

    def stages(
        self, problem: Problem, values: Mapping[str, Value], *, in_place: bool
    ) -> tuple[Stage, ...]:
        """The statements that a call of these sizes is made of; none where it is one. The same for
        all sizes and layouts of a class, whichever came first.

        A call in place must change nothing where an index is out of range. Kernels find that out
        on the way, the last statement for itself alone: the others then have no indices, unless a
        path was asked for.
        """
        may_index = not (in_place and self.kernels_look) or self.on_path
        layouts = layouts_of(problem, values) if self.copyable else ()
        key = (*size_key(problem), may_index, layouts)
        found = self.orders.get(key)
        if found is None:
            stages = stages_of(problem, self.form, may_index=may_index, layouts=layouts)
            found = keep(self.orders, key, stages, MOST_ORDERS)
        return found

    def remember(self, call: BoundCall, sizes: tuple[int, ...], given: tuple[Any, ...]) -> None:
        """From now on calls like this one are recognised by one comparison."""
        guard = kinds_guard(given, exact=True)
        self.recent.insert(0, (guard, sizes, call))
        del self.recent[MOST_RECENT:]

    def measured(
        self, values: Mapping[str, Value], sizes: tuple[int, ...], initial: Tensor | None
    ) -> Sized:
        target = self.problem.statement.target.tensor
        named = values
        if initial is not None and target not in values:
            named = {**values, target: initial}
        found = self.measure(named, sizes)
        if found is None:
            self.form.request(sizes).bind(values, initial)  # says what is wrong
            raise AssertionError("sizes that bind and are not measured")
        return Sized(self.problem, *found, dict(zip(self.problem.extents, found[0])))

    def needs_gradient(self, values: Mapping[str, Value]) -> bool:
        for name in self.sources:  # noqa: SIM110  # on the path of every call
            if values[name].requires_grad:  # type: ignore[union-attr]
                return True
        return False


def _prepare(
    kinds: Kinds,
    values: Mapping[str, Value],
    sizes: tuple[Any, ...],
    initial: Tensor | None,
) -> PreparedCall:
    form = kinds.form
    problem = form.request(sizes).bind(values, initial)
    left, now = head(form.statement), settings.values
    assert left.operator != "mean=", "a mean runs as the sum that it is"
    in_place = left.operator != "=" and isinstance(values.get(left.target), Tensor)
    accumulates = left.operator != "=" and (in_place or initial is not None)
    fusable = is_fusable(problem, now, form.config is not None, accumulates=accumulates)
    copyable = fusable and is_copyable(problem, form)
    uses = uses_of(problem, form.wraps)
    orderable = copyable or is_orderable(problem, form)
    on_host = now.backend == "auto" and not fusable and problem.device.type == "cpu"
    kernels_look = fusable and kernels_look_on(problem.device) and now.check == "async"
    given = (*values.values(),) if initial is None else (*values.values(), initial)
    return PreparedCall(
        form,
        kinds.shelves,
        problem,
        tuple(values),
        len(given),
        kinds_guard(given, exact=False),
        modes_now(settings),
        now,
        uses,
        _sources(problem),
        left.target if in_place else "",
        tensors_of(problem.statement),
        fusable,
        orderable,
        copyable,
        on_host,
        kernels_look,
        bool(uses) and not kernels_look and (orderable or not on_host),
        any(isinstance(v, Tensor) and v.is_neg() for v in given),
        not all(isinstance(v, Tensor) for v in given),
        measure_of(problem, form.size_keys),
        problem.index_names(),
    )


def is_fusable(problem: Problem, now: SettingValues, chosen: bool, *, accumulates: bool) -> bool:
    """Whether generated kernels are to be tried; ``chosen``: a config was given for one."""
    if now.backend == "fused" or now.require_fused and now.backend != "inductor":
        return True
    return (
        now.backend == "auto"
        and problem.device.type == "cuda"
        and (chosen or not is_left_to_library(problem, accumulates=accumulates))
    )


def kernels_look_on(device: torch.device) -> bool:
    """Whether looking at index values would wait, so that kernels do it."""
    return device.type == "cuda"


def _sources(problem: Problem) -> tuple[str, ...]:
    reads: list[Access] = list(accesses(problem.statement.value, nested=False))
    names = dict.fromkeys(a.tensor for a in reads)
    return tuple(
        n
        for n in names
        if (k := problem.kinds[n]).device is not None
        and (k.dtype.is_floating_point or k.dtype.is_complex)
    )


# --- calls ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _SizedGraph:
    """A graph of torch operations, and the sizes to call it with."""

    forward: Callable[..., Tensor]
    inputs: tuple[str, ...]
    sizes: tuple[Any, ...]
    late: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class BoundStage:
    """One statement of several, and its sizes in a call."""

    kinds: Kinds
    stage: Stage
    sizes: tuple[Any, ...]

    def given(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """Of all values and buffers, those that it reads."""
        return {name: values[name] for name in self.stage.reads}


def _run_stages(
    stages: tuple[BoundStage, ...], mode: str, values: Mapping[str, Value], target: Tensor | None
) -> Tensor:
    """Fill one buffer after the other, then run the last statement as the whole was to be run."""
    *before, last = stages
    known = dict(values)
    for one in before:
        given = one.given(known)
        known[one.stage.fills] = one.kinds.find(given, one.sizes).run("new", given, None)
    given = last.given(known)
    return last.kinds.find(given, last.sizes, target).run(mode, given, target)


class BoundCall:
    """A call of certain sizes and strides."""

    __slots__ = (
        *("_fused", "_graphs", "_lowerings", "_problem", "_ranges", "_staged", "_uses", "_waits"),
        *("count", "derived", "prepared", "sized", "sizes"),
    )

    def __init__(self, prepared: PreparedCall, sized: Sized, sizes: tuple[int, ...]) -> None:
        """``sizes`` are those that were given."""
        self.prepared, self.sized, self.sizes = prepared, sized, sizes
        self.count = 1
        #: What backward passes of this call have run, by statement and layouts.
        self.derived: dict[object, BoundCall] = {}
        self._problem: Problem | None = None
        self._uses: tuple[Use, ...] | None = None
        self._ranges: tuple[tuple[str, int, int], ...] = ()
        self._graphs: dict[str, _SizedGraph] = {}
        self._fused: FusedCall | None = None
        self._staged: dict[bool, tuple[BoundStage, ...]] = {}
        #: By whether the result is new or accumulated.
        self._lowerings: dict[bool, Lowering | None] = {}
        #: Whether a CPU takes the graph until index tensors come back.
        self._waits: bool | None = None

    @property
    def request(self) -> Request:
        """The request of this call, sizes included."""
        return self.prepared.form.request(self.sizes)

    @property
    def extents(self) -> Mapping[str, int]:
        return self.sized.extents

    def problem(self, values: Mapping[str, Value]) -> Problem:
        """The problem with the sizes of this call."""
        if self._problem is None:
            shapes = {n: v.shape for n, v in values.items() if isinstance(v, Tensor)}
            self._problem = self.sized.problem(shapes)
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
        if uses and not in_range(self._ranges, values):
            verify(self.problem(values), uses, values)

    def uses(self, values: Mapping[str, Value]) -> tuple[Use, ...]:
        """The indexed dimensions that have a point."""
        if self._uses is None:
            problem = self.problem(values)
            self._uses = live_uses(problem, self.prepared.uses)
            self._ranges = ranges_of(problem, self._uses)
        return self._uses

    # --- running ---

    def run(
        self, mode: str, values: Mapping[str, Value], target: Tensor | None, named: bool = False
    ) -> Tensor:
        """Run generated kernels where there are some, else the graph. ``mode``: ``new``, ``from``
        (a given value), ``into`` (in place). ``named``: profilers have been told the statement.
        """
        if is_profiled() and not named:
            with torch.profiler.record_function(f"insum: {self.prepared.form.statement}"):
                return self.run(mode, values, target, True)
        if self.prepared.orderable:
            stages = self.staged(values, in_place=mode == "into")
            if stages:
                if mode == "into" and self.prepared.kernels_look and self.prepared.on_path:
                    self.look(values)
                return _run_stages(stages, mode, values, target)
        if self.prepared.fusable:
            result = self.run_fused(mode, values, target)
            if result is not None:
                return result
            if self.prepared.kernels_look:
                # torch's own kernels would end the process' use of the device
                self.look_now(values)
        elif self.prepared.on_host:
            result = self.run_on_host(mode, values, target) if is_undisturbed() else None
            if result is not None:
                return result
            self.look_now(values)
        if self.prepared.form.wraps:
            values = self.wrapped(values)
        return self.run_graph(mode, values, target)

    def staged(self, values: Mapping[str, Value], *, in_place: bool) -> tuple[BoundStage, ...]:
        """The statements that this call is made of, with their sizes; none where it is one."""
        found = self._staged.get(in_place)
        if found is None:
            problem = self.problem(values)
            stages = self.prepared.stages(problem, values, in_place=in_place)
            found = self._staged[in_place] = tuple(
                BoundStage(kinds_of(one.form), one, one.size_values(problem)) for one in stages
            )
        return found

    # --- on a CPU ---

    def lowering(self, mode: str, values: Mapping[str, Value]) -> Lowering | None:
        """How a CPU runs this call; None: as one graph."""
        new = mode == "new"
        if new not in self._lowerings:
            # takes a while to import, and GPUs need none of it
            from insum.host.choose import choose

            self._lowerings[new] = choose(self.problem(values), new=new)
        return self._lowerings[new]

    def run_on_host(
        self, mode: str, values: Mapping[str, Value], target: Tensor | None
    ) -> Tensor | None:
        """The result of the way that a CPU takes, or None where that is the graph."""
        from insum.host.places import HostCall  # which GPUs need none of

        if self._waits is None:
            from insum.host.choose import waits

            self._waits = waits(self.problem(values), self.prepared.indices)
        lowering = self._lowerings.get(mode == "new")
        if lowering is None and not self._waits:
            lowering = self.lowering(mode, values)
            if lowering is None:
                return None
        entries = {}
        for name in self.prepared.indices:
            index: Any = values[name]
            entries[name] = memory.known(index) or memory.made(index)
        call = HostCall(values, entries, self.wrapped if self.prepared.form.wraps else None)
        if self._waits and not call.comes_back(self.prepared.form.statement):
            return None
        if lowering is None:
            lowering = self.lowering(mode, values)
        if lowering is None:
            self._waits = False
            return None
        self.check(entries, values)
        result = lowering(call)
        if target is None:
            return result
        return target.add_(result) if mode == "into" else (target + result).to(target.dtype)

    def check(self, entries: IndexEntries, values: Mapping[str, Value]) -> None:
        """Index values against their range, by what is remembered of them."""
        uses = self.uses(values) if self._uses is None else self._uses
        if not uses or self.prepared.settings.check == "never":
            return
        for name, low, high in self._ranges:
            bounds = entries[name].things.get("bounds")
            if bounds is None:
                look = functools.partial(bounds_of, values[name])
                bounds = entries[name].remembered("bounds", look)
            if bounds is None or bounds[0] < low or bounds[1] > high:
                break
        else:
            if self._ranges:
                return
        verify(self.problem(values), uses, values)

    def run_graph(self, mode: str, values: Mapping[str, Value], target: Tensor | None) -> Tensor:
        graph = self._graphs.get(mode) or self.lowered(mode, values)
        inputs = [values[name] for name in graph.inputs]
        if target is None:
            return graph.forward(*inputs, *graph.sizes)
        shared = graph.late and shares_memory(target, map(values.get, graph.late))
        if mode == "into" and (shared or self.must_copy(target)):
            return target.copy_(self.run_graph("from", values, target))
        return graph.forward(target, *inputs, *graph.sizes)

    def lowered(self, mode: str, values: Mapping[str, Value]) -> _SizedGraph:
        problem = self.problem(values)
        lowered = lower(problem, mode)
        forward: Callable[..., Tensor] = lowered.module.forward
        if self.prepared.settings.backend == "inductor":
            from insum.graph.inductor import forward_of  # which loads a good deal of torch

            forward = forward_of(lowered, problem)
        sizes = lowered.size_arguments(problem)
        found = self._graphs[mode] = _SizedGraph(forward, lowered.inputs, sizes, lowered.late)
        return found

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

    def must_copy(self, target: Tensor) -> bool:
        """torch.compile takes a float64 tensor without dimensions on the CPU for a number, and
        forgets to write it.
        """
        return self.prepared.settings.backend == "inductor" and target.dim() == 0

    def run_fused(
        self, mode: str, values: Mapping[str, Value], target: Tensor | None
    ) -> Tensor | None:
        """The result of generated kernels, or None where there are none."""
        fused = self._fused
        if fused is None:
            if self.prepared.settings.backend == "graph":
                self.fall_back(values, 'settings.backend is "graph"')
                return None
            fused = self._fused = self.prepared.fused.call(self.sized)
            if self.prepared.searches:
                self.search(values, target)
        into = target
        if target is not None and (
            mode == "from" or shares_memory(target, map(values.get, self.prepared.reads))
        ):
            into = target.clone()
        result = fused(values, into)
        if not isinstance(result, Tensor):
            self.fall_back(values, result.reason)
            return None
        if target is None or mode == "from":
            return result
        if into is not target:
            return target.copy_(result)
        return written_to(target)

    def fused_alone(
        self, values: Mapping[str, Value], *, in_place: bool = False
    ) -> FusedCall | None:
        """The generated kernels of this call, where it is one statement and nothing is looked for
        first; None where it is not.
        """
        prepared = self.prepared
        if not prepared.fusable or prepared.searches or prepared.settings.backend == "graph":
            return None
        if prepared.orderable and self.staged(values, in_place=in_place):
            return None
        if self._fused is None:
            self._fused = prepared.fused.call(self.sized)
        return self._fused

    def search(self, values: Mapping[str, Value], target: Tensor | None) -> None:
        """What ``settings.effort`` asks for at the first call."""
        from insum.runtime import search  # which takes a while to import

        effort = self.prepared.settings.effort
        search.on_first_call(self.problem(values), values, target, effort)

    def fall_back(self, values: Mapping[str, Value], why: str) -> None:
        problem, now = self.problem(values), self.prepared.settings
        if now.require_fused:
            raise problem.complain(
                NotFusedError,
                f"no fused kernel: {why}",
                expected="a statement that a kernel can express",
                remedy="settings.require_fused = False runs it as a graph of torch operations",
            )
        if now.backend == "fused" or "fallback" in now.log:
            text = problem.statement.text or str(problem.statement)
            message = f"insum: {text!r} runs as a graph of torch operations: {why}"
            if is_first(f"fallback of {text}"):
                warnings.warn(message, stacklevel=5)
