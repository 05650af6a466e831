"""Kernels that know nothing of index values: planned from symbols, run at sizes of every kind, and
used inside CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import applications
import insum
from applications import Application, relative_error
from insum import facts, memory
from insum.compat import sizes, streams
from insum.runtime import compiling, fused, fused_kind, symbolic, which_program
from insum.runtime.bound_launch import BoundLaunch, CallNumbers
from insum.runtime.classify import TYPICAL, example
from insum.runtime.program import Program
from insum.runtime.prologue import prologue
from insum.runtime.symbolic import CannotFuse
from kernels import ONLY_FUSED, bound, strategy_of, watch_programs


def made(name: str, n: int, dtype: torch.dtype = torch.float32) -> Application:
    kind: dict[str, Any] = {"dtype": dtype}
    match name:
        case "block SpMM":
            return applications.block_spmm(
                rows=4, columns=n, block=16, n=16 + n, density=0.6, group=2, **kind
            )
        case "SpMM":
            return applications.spmm(
                rows=20, columns=3 * n, n=10 + n, entries=10 * n, group=3, **kind
            )
        case "convolution":
            return applications.convolution(
                voxels=8 * n, offsets=3, inputs=16 + n, outputs=20, layout="by voxel", **kind
            )
        case _:
            return applications.tensor_product(batch=n, channels=16, constant=False, **kind)


NAMES = ("block SpMM", "SpMM", "convolution", "tensor product")


def symbols(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stand-ins whose every size is a symbol, as a tracer with dynamic shapes has them."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = lambda t: StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * t.dim())
    return {name: mode.from_tensor(v, symbolic_context=context(v)) for name, v in values.items()}


def programmed(application: Application) -> Program:
    """The program of an application all of whose sizes are symbols."""
    values = symbols(dict(application.values))
    return symbolic.program_of(application.forward.request.bind(values), values)


def numbers_of(application: Application) -> CallNumbers:
    problem = application.forward.problem()
    return CallNumbers(application.values, problem.extents, tuple(problem.shape), {})  # type: ignore[arg-type]


def plainly(function: Any) -> Any:
    """Kernels are launched as they are, where nobody traces."""
    return function


@pytest.mark.parametrize("name", NAMES)
def test_plans_hold_no_size_that_may_change(name: str) -> None:
    (step,) = programmed(made(name, 6)).steps
    plan = step.planned.plan
    assert plan.wide and plan.strategy in ("store", "atomic")
    for n in (6, 9):
        other = numbers_of(made(name, n))
        for one in step.launches:
            assert isinstance(other.programs(one, other.counts(one)), int)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", NAMES)
def test_one_plan_serves_every_size(name: str) -> None:
    program = programmed(made(name, 4))
    for n in (3, 4, 7):
        application = made(name, n)
        got = symbolic.run(program, application.forward.problem(), application.values, plainly)
        assert relative_error(got, application.expected()) < 1e-6


@pytest.mark.interpreter
def test_a_reduction_may_grow_past_one_tile() -> None:
    """That it fits one in the example says nothing of the sizes to come."""
    statement = "C[i,j] = A[i,k] * B[k,j]"
    small = symbols({"A": torch.randn(5, 6), "B": torch.randn(6, 7)})
    program = symbolic.program_of(bound(statement, small), small)
    for k in (3, 6, 40, 150):
        values = {"A": torch.randn(5, k), "B": torch.randn(k, 7)}
        got = symbolic.run(program, bound(statement, values), values, plainly)
        torch.testing.assert_close(got, values["A"] @ values["B"], rtol=1e-5, atol=1e-4)


@pytest.mark.interpreter
def test_pieces_of_a_maximum_have_a_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("insum.plan.draft.BUFFER_SHARE", 1)
    statement = "y[i,j] max= a[s[k],i] * b[s[k],j]"
    values = {
        "a": torch.randn(10, 12),
        "b": torch.randn(10, 20),
        "s": torch.randint(0, 10, (3000,), dtype=torch.int32),
    }
    program = symbolic.program_of(bound(statement, values), values)
    assert program.steps[0].workspace
    got = symbolic.run(program, bound(statement, values), values, plainly)
    pairs = values["a"][:, :, None] * values["b"][:, None]
    torch.testing.assert_close(got, pairs[values["s"].unique().long()].amax(0))


@pytest.mark.interpreter
def test_half_precision_is_rounded_once_and_several_products_meet() -> None:
    application = made("SpMM", 5, torch.float16)
    program = programmed(application)
    assert program.buffer == torch.float32
    got = symbolic.run(program, application.forward.problem(), application.values, plainly)
    assert got.dtype == torch.float16 and relative_error(got, application.expected()) < 1e-3
    problem = bound(
        "y[D[i]] = a[i] * b[i] + 2 * a[i]",
        values := {"a": torch.randn(9), "b": torch.randn(9), "D": torch.randint(4, (9,))},
        {0: 4},
    )
    got = symbolic.run(symbolic.program_of(problem, values), problem, values, plainly)
    torch.testing.assert_close(
        got, torch.zeros(4).index_add(0, values["D"], values["a"] * (values["b"] + 2))
    )


def test_what_has_no_such_kernel() -> None:
    values = {"a": torch.randn(9), "D": torch.randint(4, (9,))}
    problem = bound("y[D[i]] = a[i]", values, {0: 4})
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(CannotFuse, match="deterministic"):
            symbolic.program_of(problem, values)
    finally:
        torch.use_deterministic_algorithms(False)
    empty = {"a": torch.randn(0), "D": torch.randint(4, (0,))}
    with pytest.raises(CannotFuse, match="nothing to compute"):
        symbolic.program_of(bound("y[D[i]] = a[i]", empty, {0: 4}), empty)


def test_examples_of_sizes() -> None:
    (size,) = symbols({"x": torch.empty(7)})["x"].shape
    assert example(5) == 5 and example(size) == 7

    class Unknown:
        node = None

    assert sizes.size_or(Unknown(), 0) == 0 and example(Unknown()) == TYPICAL


@pytest.mark.compile_only
@pytest.mark.parametrize("name", NAMES)
def test_they_compile_for_gpus(name: str) -> None:
    """With 64-bit offsets and nothing known to divide evenly they still fit, and matrix products
    stay on the matrix units.
    """
    application = made(name, 6, torch.float16 if name != "tensor product" else torch.float32)
    program = programmed(application)
    (step,) = program.steps
    (one,) = step.launches
    ready = BoundLaunch(
        one, one.plan, numbers_of(application), program.buffer or program.problem.dtype
    )
    for target in ("sm_80", "sm_90"):
        compiled = compiling.compile_for(
            one.function, ready.types, target, warps=one.config.warps, stages=one.config.stages
        )
        assert compiled.stack == 0 and (not one.plan.roles.dot or compiled.uses("mma"))


# --- inside CUDA graphs ---------------------------------------------------------------------------


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Calls behave as on a GPU, and while the list says so, as if a CUDA graph were recorded."""
    now = [True]
    monkeypatch.setattr(memory, "can_look", lambda tensor: False)
    monkeypatch.setattr("insum.call.prepared.kernels_look_on", lambda device: True)
    monkeypatch.setattr("insum.call.prepared._forms", {})
    monkeypatch.setattr("insum.call.lookup._fronts", {})
    for module in (facts, fused, which_program):
        monkeypatch.setattr(module, "is_recorded", lambda device: now[0])
    monkeypatch.setattr(fused_kind.FusedKind, "on_gpu", True)
    monkeypatch.setattr(fused, "is_capturing", lambda: now[0])
    monkeypatch.setattr(fused_kind, "stream_getter", lambda device: lambda: 0)
    memory.forget()
    with insum.settings(**ONLY_FUSED):
        yield now
    insum.synchronize()


def no_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is asked nothing about index values, now or for later."""

    def refuse(*anything: object) -> None:
        raise AssertionError("the device was asked about index values")

    monkeypatch.setattr(facts, "compute", refuse)
    monkeypatch.setattr(facts, "Coming", refuse)


def undeclared(application: Application) -> Application:
    """With index tensors that come from no format."""
    return replace(application, values={n: v.clone() for n, v in application.values.items()})


def call(application: Application, **more: Tensor) -> Tensor:
    sized = {} if more else {"sizes": dict(application.sizes)}
    return insum.insum(
        application.statement, padded=application.padded, **sized, **application.values, **more
    )


@pytest.mark.interpreter
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_asked_while_recording(
    recording: list[bool], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    no_facts(monkeypatch)
    application = undeclared(made(name, 4))
    for _ in range(facts.SEEN_AGAIN + 2):  # however often a tensor has come back
        got = call(application)
        assert relative_error(got, application.expected()) < 1e-6
    target = torch.zeros_like(got)
    call(application, **{application.forward.problem().statement.target.tensor: target})
    assert relative_error(target, application.expected()) < 1e-6


@pytest.mark.interpreter
def test_what_formats_know_stays_known(
    recording: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A format's arrays do not change: the program of the warm-up, which rests on facts, is the one
    that is recorded.
    """
    seen = watch_programs(monkeypatch)
    dense = torch.randn(6, 5) * (torch.rand(6, 5) < 0.5)
    A, B = (
        insum.formats.GroupCOO.from_dense(dense, group_dims=(0,), group_size=2),
        torch.randn(5, 4),
    )
    for now in (False, True):
        recording[0] = now
        torch.testing.assert_close(A @ B, dense @ B)
    assert len(seen) == 2 and seen[0] is seen[1] and strategy_of(seen[0]) == "segment"


@pytest.mark.interpreter
def test_what_a_recorded_graph_does_not_use(
    recording: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is replayed on other values, so that what is known of tensors which nobody has declared
    does not count.
    """
    application, seen = undeclared(made("SpMM", 4)), watch_programs(monkeypatch)
    recording[0] = False
    for _ in range(facts.SEEN_AGAIN + 3):
        assert relative_error(call(application), application.expected()) < 1e-6
    assert strategy_of(seen[-1]) == "segment"
    recording[0] = True
    no_facts(monkeypatch)
    assert relative_error(call(application), application.expected()) < 1e-6
    assert strategy_of(seen[-1]) == "atomic"
    recording[0] = False
    assert relative_error(call(application), application.expected()) < 1e-6
    assert strategy_of(seen[-1]) == "segment", "what was known is known again"


@pytest.mark.interpreter
def test_what_a_graph_derives_from_index_tensors_is_recorded(
    recording: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In deterministic mode too: the order is found at every replay, once."""
    application, sorts = undeclared(made("SpMM", 4)), []
    original = prologue.in_order
    monkeypatch.setattr(prologue, "in_order", lambda *given: (sorts.append(1), original(*given))[1])
    torch.use_deterministic_algorithms(True)
    try:
        for now, wanted in ((False, 1), (False, 1), (True, 2), (True, 3), (False, 3)):
            recording[0] = now
            assert relative_error(call(application), application.expected()) < 1e-6
            assert len(sorts) == wanted
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_state_of_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import SimpleNamespace

    device = torch.device("cuda", 0)
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)
    assert streams.cudagraph_state(device) == ""
    stream = object()
    manager = SimpleNamespace(stream=stream)
    monkeypatch.setitem(
        sys.modules,
        "torch._inductor.cudagraph_trees",
        SimpleNamespace(get_manager=lambda index, create_if_none_exists: manager),
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    number = [0]
    monkeypatch.setattr(streams, "current_stream", lambda device: number[0])
    assert streams.cudagraph_state(device) == "", "nobody records on the default stream"
    number[0] = 7
    for capturing, expected in ((True, "recording"), (False, "warmup")):
        monkeypatch.setattr(
            torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing
        )
        assert streams.cudagraph_state(device) == expected
    local = SimpleNamespace(tree_manager_containers={})
    trees = SimpleNamespace(local=local)
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    assert streams.cudagraph_state(device) == "", "nobody has recorded in this thread"
    local.tree_manager_containers[0] = SimpleNamespace(tree_manager=manager)
    assert streams.cudagraph_state(device) == "warmup"
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: object())
    assert streams.cudagraph_state(device) == ""
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", SimpleNamespace())
    assert streams.cudagraph_state(device) == ""
