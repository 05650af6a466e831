"""Finding the call of a statement on tensors.

    Kinds          one statement with its options; which kinds of tensors it was called with
    PreparedCall   one kind: dtypes, ranks, device, modes. Bound once; sizes are symbols
    BoundCall      the same with the sizes and strides of a call, which runs (`running`)
    BoundStage     one of the statements that it is made of, where it is several

Eager calls, compiled statements, layers, gradients and fused programs all come here: a call finds
its `PreparedCall` by one guard, its `BoundCall` by its sizes, and the program by what is known of
its index tensors.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from insum.bounded import keep
from insum.call.filled import FilledBuffer, FilledBuffers
from insum.call.request import Form, Request, head
from insum.call.stages import (
    Stage,
    along_path,
    is_copyable,
    is_orderable,
    layouts_of,
    size_key,
    stages_of,
)
from insum.compat.calls import modes_now
from insum.compat.tensors import kinds_guard
from insum.lang.bind import Problem, Value
from insum.lang.expr import Access, accesses, tensors_of
from insum.lang.measure import Measure, measure_of
from insum.lang.problem import resized
from insum.plan.library import is_left_to_library, may_be_left_to_library
from insum.plan.order import Path
from insum.plan.path import is_path
from insum.plan.uses import Use, uses_of
from insum.runtime.check import in_range, live_uses, ranges_of, verify
from insum.settings import SettingValues, settings

if TYPE_CHECKING:
    from insum.graph.lower import SizedGraph
    from insum.host.joint import JointGraph
    from insum.host.places import Lowering
    from insum.runtime.fused import FusedCall
    from insum.runtime.fused_kind import FusedKind

MakeFused: TypeAlias = "Callable[[tuple[int, ...], tuple[int, ...], Mapping[str, int]], FusedCall]"
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

    __slots__ = ("accumulating", "calls", "form", "means", "placed", "shelves")

    def __init__(self, form: Form) -> None:
        self.form = form
        #: Of a sum with ``=``, the kinds of the same sum with ``+=``, where it was asked for.
        self.accumulating: Kinds | None = None
        self.calls: list[PreparedCall] = []
        #: Of a mean, the kinds of sums that its calls are (`ops.mean`).
        self.means: list[Any] = []
        #: By dtypes and device, the programs that kinds with other settings share.
        self.shelves: dict[object, Any] = {}
        #: By placements and sizes of DTensors, how a call over them is run.
        self.placed: dict[object, Any] = {}

    def accumulate(self) -> Kinds:
        """Ask for `accumulating`."""
        statement = self.form.statement.replace("=", "+=", 1)
        self.accumulating = found = kinds_of(replace(self.form, statement=statement))
        return found

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
            found = self.known(values, sizes, initial)
        return call.bound_to(values, sizes, initial) if found is None else found

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
                    layouts: list[Any] = [sizes]  # a loop: a comprehension may be a call
                    for value in given:
                        if isinstance(value, Tensor):
                            layouts += value.shape, value.stride()
                    key = tuple(layouts)
                    bound = call.bound.get(key)
                    if bound is None:
                        bound = call.bound_to(values, sizes, initial)
                        return keep(call.bound, key, bound, MOST_SIZES)
                    bound.count += 1
                    if bound.count == OFTEN and len(call.bound) <= FEW_SIZES:
                        call.remember(bound, sizes, given)
                    return bound
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
    #: Of gradients, paths along that of the product, by that and by sizes.
    paths: dict[object, Path] = field(default_factory=dict)
    #: What `insum.ops.gradients` has derived for the gradients of this kind of call.
    adjoints: dict[object, Any] = field(default_factory=dict)
    #: Those of its statements whose buffers its backward passes have filled again.
    kept: set[Kinds] = field(default_factory=set)

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
    def is_fused(self) -> bool:
        """Whether calls are generated kernels whatever their sizes, and nothing is looked for
        first.
        """
        may_be_several = self.orderable or self.settings.backend == "graph"
        return self.fusable and not (may_be_several or self.searches)

    @functools.cached_property
    def fused(self) -> FusedKind:
        """This kind of call as generated kernels."""
        return self._fused_kind(based=False)

    @functools.cached_property
    def fused_call(self) -> MakeFused:
        """Makes the generated kernels of certain sizes."""
        from insum.runtime.fused import FusedCall  # which takes a while to import

        return functools.partial(FusedCall, self.fused)

    @functools.cached_property
    def based_call(self) -> MakeFused:
        """The same, of results that are accumulated from a tensor."""
        from insum.runtime.fused import FusedCall

        return functools.partial(FusedCall, self._fused_kind(based=True))

    def _fused_kind(self, *, based: bool) -> FusedKind:
        from insum.runtime.fused_kind import fused_kind
        from insum.runtime.shelf import Shelf

        form, problem = self.form, self.problem
        dtypes = tuple((n, k.dtype, k.device, k.strength) for n, k in problem.kinds.items())
        shelf = keep(self.shelves, (dtypes, problem.dtype, problem.device), Shelf(), MOST_KINDS)
        rest = form.wraps, form.config, self.negated, shelf
        return fused_kind(problem, self.uses, *rest, based=based)

    def bound_to(
        self, values: Mapping[str, Value], sizes: tuple[int, ...], initial: Tensor | None
    ) -> BoundCall:
        """The call for these sizes and strides; where they do not fit together, binding says so."""
        target, named = self.problem.statement.target.tensor, values
        if initial is not None and target not in values:
            named = {**values, target: self.form.spread(initial, sizes)}
        measured = self.measure(named, sizes)
        if measured is None:
            self.form.request(sizes).bind(values, initial)  # says what is wrong
            raise AssertionError("sizes that bind and are not measured")
        extents = dict(zip(self.problem.extents, measured[0]))
        return BoundCall(self, *measured, extents, sizes)

    def stages(
        self, call: BoundCall, values: Mapping[str, Value], *, in_place: bool
    ) -> tuple[BoundStage, ...]:
        """The statements that a call of these sizes is made of; none where it is one. The same for
        all sizes and layouts of a class, whichever came first.

        A call in place must change nothing where an index is out of range. Kernels find that out
        on the way, the last statement for itself alone: the others then have no indices, unless a
        path was asked for.
        """
        may_index = not (in_place and self.kernels_look) or self.on_path
        layouts = layouts_of(self.problem, values) if self.copyable else ()
        shapes = [v.shape for v in values.values() if isinstance(v, Tensor)]
        sizes = [*call.spans, *call.shape, *[size for shape in shapes for size in shape]]
        key = (*size_key(sizes), may_index, layouts)
        found = self.orders.get(key)
        if found is None:
            problem = call.problem(values)
            stages = stages_of(problem, self.form, may_index=may_index, layouts=layouts)
            found = keep(self.orders, key, stages, MOST_ORDERS)
        if not found:
            return ()
        problem = call.problem(values)
        return tuple(BoundStage(kinds_of(s.form), s, s.size_values(problem)) for s in found)

    def path_along(
        self, call: BoundCall, values: Mapping[str, Value], path: Path, factors: tuple[str, ...]
    ) -> Path:
        """The ``path`` of a product of ``factors`` as that of a gradient of it, which this is,
        where that is a good one; the same for all sizes of a class.
        """
        key = path, factors, *size_key((*call.spans, *call.shape))
        found = self.paths.get(key)
        if found is None:
            found = along_path(call.problem(values), self.form, path, factors)
            keep(self.paths, key, found, MOST_ORDERS)
        return found

    def remember(self, call: BoundCall, sizes: tuple[int, ...], given: tuple[Any, ...]) -> None:
        """From now on calls like this one are recognised by one comparison."""
        guard = kinds_guard(given, exact=True)
        self.recent.insert(0, (guard, sizes, call))
        del self.recent[MOST_RECENT:]

    def needs_gradient(self, values: Mapping[str, Value]) -> bool:
        for name in self.sources:  # noqa: SIM110  # on the path of every call
            if values[name].requires_grad:  # type: ignore[union-attr]
                return True
        return False


# --- one call ---


class BoundCall:
    """A call of certain sizes and strides."""

    __slots__ = (
        *("_problem", "_uses", "based", "checked", "count", "derived", "extents", "forward"),
        *("fused", "graphs", "joints", "little", "lowerings", "ordered", "prepared", "ranges"),
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
        #: What `staged` has found, by whether the call is in place.
        self.ordered: dict[bool, tuple[BoundStage, ...]] = {}
        self.fused: FusedCall | None = (
            prepared.fused_call(spans, shape, extents) if prepared.is_fused else None
        )
        #: The same for results that are accumulated from a tensor.
        self.based: FusedCall | None = None
        #: By mode, and whether with operations of a CPU's own.
        self.graphs: dict[tuple[str, bool], SizedGraph] = {}
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

    def started_from(self) -> FusedCall:
        """The generated kernels of a new result that is accumulated from a tensor."""
        self.based = found = self.prepared.based_call(self.spans, self.shape, self.extents)
        return found

    def whole(self, target: Tensor | None) -> Tensor | None:
        """What is accumulated from or into, in the shape of the result: it may be broadcast."""
        shape = self.shape
        return target if target is None or target.shape == shape else target.expand(shape)

    def staged(self, values: Mapping[str, Value], *, in_place: bool) -> tuple[BoundStage, ...]:
        """The statements that this call is made of, with their sizes; none where it is one."""
        found = self.ordered.get(in_place)
        if found is None:
            found = self.ordered[in_place] = self.prepared.stages(self, values, in_place=in_place)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class BoundStage:
    """One statement of several, and its sizes in a call."""

    kinds: Kinds
    stage: Stage
    sizes: tuple[Any, ...]

    def given(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """Of all values and buffers, those that it reads."""
        return {name: values[name] for name in self.stage.reads}

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


# --- preparing ---


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
    copyable = copyable and not may_be_left_to_library(problem, accumulates=accumulates)
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
