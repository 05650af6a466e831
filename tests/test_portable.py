"""Kernels that know nothing of index values: planned from symbols, run at sizes of every kind, and
used inside CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import applications
import insum
from applications import Application, relative_error
from insum.compat import calls, sizes
from insum.lang.bind import Problem
from insum.plan import facts
from insum.plan.prepare import CannotFuse
from insum.runtime import capture, fused, launch
from insum.runtime.portable import TYPICAL, Portable, _argument, example, portable

CPU = torch.device("cpu")


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


def symbolic(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stand-ins whose every size is a symbol, as a tracer with dynamic shapes has them."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = lambda t: StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * t.dim())
    return {name: mode.from_tensor(v, symbolic_context=context(v)) for name, v in values.items()}


def planned(application: Application, values: dict[str, Tensor]) -> Portable:
    return portable(application.forward.request.bind(values), values, fused.wishes_of(False, CPU))


@pytest.mark.parametrize("name", NAMES)
def test_plans_hold_no_size_that_may_change(name: str) -> None:
    application = made(name, 6)
    values = symbolic(dict(application.values))
    found = planned(application, values)
    (part,) = found.parts
    assert part.plan.wide and part.plan.strategy in ("store", "atomic")
    other = made(name, 9).forward.problem()
    assert isinstance(part.grid(other.extents), int)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", NAMES)
def test_one_plan_serves_every_size(name: str) -> None:
    found = planned(made(name, 4), symbolic(dict(made(name, 4).values)))
    for n in (3, 4, 7):
        application = made(name, n)
        got = found.run(
            application.forward.problem(), application.values, lambda function: function
        )
        assert relative_error(got, application.expected()) < 1e-6


@pytest.mark.interpreter
def test_half_precision_is_rounded_once_and_several_products_meet() -> None:
    application = made("SpMM", 5, torch.float16)
    target = torch.ones(20, 15, dtype=torch.float16)
    got = planned(application, dict(application.values)).run(
        application.forward.problem(), application.values, lambda f: f, target
    )
    assert got is target and relative_error(got, application.expected() + 1) < 1e-3
    problem = bound(
        "y[D[i]] = a[i] * b[i] + 2 * a[i]",
        values := {"a": torch.randn(9), "b": torch.randn(9), "D": torch.randint(4, (9,))},
        {0: 4},
    )
    got = portable(problem, values, fused.wishes_of(False, CPU)).run(problem, values, lambda f: f)
    torch.testing.assert_close(
        got, torch.zeros(4).index_add(0, values["D"], values["a"] * (values["b"] + 2))
    )


def bound(statement: str, values: dict[str, Tensor], sizes: dict[str | int, int]) -> Problem:
    return applications.request_of(statement, None, sizes, ()).bind(values)


def test_what_has_no_such_kernel() -> None:
    values = {"a": torch.randn(9), "D": torch.randint(4, (9,))}
    problem = bound("y[D[i]] = a[i]", values, {0: 4})
    wishes = fused.wishes_of(False, CPU)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(CannotFuse, match="deterministic"):
            portable(problem, values, fused.wishes_of(False, CPU))
    finally:
        torch.use_deterministic_algorithms(False)
    empty = {"a": torch.randn(0), "D": torch.randint(4, (0,))}
    with pytest.raises(CannotFuse, match="nothing to compute"):
        portable(bound("y[D[i]] = a[i]", empty, {0: 4}), empty, wishes)


def test_examples_of_sizes() -> None:
    (size,) = symbolic({"x": torch.empty(7)})["x"].shape
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
    problem = application.forward.problem()
    (part,) = planned(application, symbolic(dict(application.values))).parts
    out = torch.empty(
        [int(s) for s in problem.shape],
        dtype=torch.float32 if part.plan.strategy == "atomic" else problem.dtype,
    )
    arguments = [_argument(n, problem, application.values, out) for n in part.kernel.arguments]
    for target in ("sm_80", "sm_90"):
        function = launch.load(part.kernel, part.header)
        compiled = launch.compile_for(
            function, arguments, target, warps=part.config.warps, stages=part.config.stages
        )
        assert compiled.stack == 0 and (not part.plan.roles.dot or compiled.uses("mma"))


# --- inside CUDA graphs ---------------------------------------------------------------------------


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Calls behave as if a CUDA graph were recorded; the list says how."""
    how = ["recording"]
    monkeypatch.setattr(capture, "_elsewhere", lambda device, function: function())
    monkeypatch.setattr(
        fused,
        "run",
        lambda problem, values, target, config=None: capture.run(
            problem, values, target, config, how[0]
        ),
    )
    with insum.settings(backend="fused"):
        yield how


def no_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tensor: Tensor) -> None:
        raise AssertionError("the device was asked about index values")

    monkeypatch.setattr(facts, "_compute", refuse)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_asked_while_recording(
    recording: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    no_facts(monkeypatch)
    application = made(name, 4)
    values = {n: v.clone() for n, v in application.values.items()}
    got = insum.insum(
        application.statement, sizes=dict(application.sizes), padded=application.padded, **values
    )
    assert relative_error(got, application.expected()) < 1e-6
    values = {n: v.clone() for n, v in application.values.items()}
    target = torch.zeros_like(got)
    insum.insum(
        application.statement,
        padded=application.padded,
        **{application.forward.problem().statement.target.tensor: target},
        **values,
    )
    assert relative_error(target, application.expected()) < 1e-6


@pytest.mark.interpreter
def test_what_formats_know_stays_known(
    recording: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A format's arrays do not change: the program of the warm-up, which rests on facts, is the one
    that is recorded.
    """
    seen = []
    execute = fused.execute
    monkeypatch.setattr(
        fused,
        "execute",
        lambda program, values, target: seen.append(program) or execute(program, values, target),
    )
    dense = torch.randn(6, 5) * (torch.rand(6, 5) < 0.5)
    A, B = (
        insum.formats.GroupCOO.from_dense(dense, group_dims=(0,), group_size=2),
        torch.randn(5, 4),
    )
    for how in ("warmup", "recording"):
        recording[0] = how
        torch.testing.assert_close(A @ B, dense @ B)
    assert (
        len(seen) == 2
        and seen[0] is seen[1]
        and seen[0].steps[0].prepared.plan.strategy == "segment"
    )


@pytest.mark.interpreter
def test_a_graph_recorded_by_hand_uses_what_the_warm_up_found(
    recording: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recording[0] = "capturing"
    application = made("SpMM", 4)
    for tensor in application.values.values():
        if not tensor.is_floating_point():
            facts.facts_of(tensor)
    problem = application.forward.problem()
    fused.lookup(problem, application.values, None)
    no_facts(monkeypatch)
    seen = []
    execute = fused.execute
    monkeypatch.setattr(
        fused,
        "execute",
        lambda program, values, target: seen.append(program) or execute(program, values, target),
    )
    got = capture.run(problem, application.values, None, None, "capturing")
    assert got is not None and relative_error(got, application.expected()) < 1e-6 and len(seen) == 1


def test_the_state_of_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import SimpleNamespace

    device = torch.device("cuda", 0)
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)
    assert calls.cudagraph_state(device) == ""
    stream = object()
    manager = SimpleNamespace(stream=stream)
    monkeypatch.setitem(
        sys.modules,
        "torch._inductor.cudagraph_trees",
        SimpleNamespace(get_manager=lambda index, create_if_none_exists: manager),
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    for capturing, expected in ((True, "recording"), (False, "warmup")):
        monkeypatch.setattr(
            torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing
        )
        assert calls.cudagraph_state(device) == expected
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: object())
    assert calls.cudagraph_state(device) == ""
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", SimpleNamespace())
    assert calls.cudagraph_state(device) == ""
