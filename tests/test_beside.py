"""Several results of the same points, written by one kernel: which statements are, and what the
kernel is.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from insum.call.request import request_of
from insum.nn import Irreps, TensorProductConv
from insum.nn.multilinear import Multilinear
from insum.nn.patterns import arrays_of
from insum.plan.beside import beside_each_other, together
from insum.plan.draft import Planned
from insum.runtime import compiling, inspection, launch, workers
from insum.runtime.bound_launch import BoundLaunch, CallNumbers, compile_at_once
from insum.runtime.build import first_choice, step_of
from insum.runtime.program import Program
from insum.together import AskedResult, results_of

EDGES, NODES = 400, 30


def product_of(lmax: int, channels: int) -> tuple[Multilinear, dict[str, torch.Tensor]]:
    """The convolution along edges, and tensors for its gradients of both orders."""
    y = " + ".join(f"{l}y" for l in range(lmax + 1))
    x = " + ".join(f"{channels}x{l}y" for l in range(lmax + 1))
    terms = Irreps.of(y)
    paths = [
        (a, b, c, "uvu", True)
        for a, (_, one) in enumerate(terms)
        for b, (_, two) in enumerate(terms)
        for c, (_, three) in enumerate(terms)
        if three in one * two
    ]
    conv = TensorProductConv(x, y, x, paths, layout="ir_mul")
    group, size = conv._plan.groups[0], (lmax + 1) ** 2
    shapes = {"X": (NODES, size, channels), "Y": (EDGES, size), "Z": (NODES, size, channels)}
    shapes["W"] = EDGES, len(paths), channels
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    tensors |= {f"{name}_": torch.randn(shapes[name]) for name in "XYW"}
    ends = {name: torch.randint(NODES, (EDGES,), dtype=torch.int32) for name in ("src", "dst")}
    return group.over_edges(), {**arrays_of(conv, 0), **tensors, **ends}


def look_of(
    statement: str, shape: tuple[int, ...], every: dict[str, torch.Tensor]
) -> inspection.Look:
    used = {n: t for n, t in every.items() if f"{n}[" in statement}
    return inspection.elsewhere(request_of(statement, shape, None, ()).bind(used), used)


def looks_of(
    product: Multilinear, every: dict[str, torch.Tensor], names: str, second: bool = False
) -> list[inspection.Look]:
    derived = product.second if second else product.gradient
    return [look_of(derived(n), tuple(every[n].shape), every) for n in names]


def planned_of(looks: list[inspection.Look]) -> list[Planned]:
    found = [look.planned() for look in looks]
    assert all(len(one) == 1 for one in found)
    return [one[0] for one in found]


def joined(planned: list[Planned]) -> Planned:
    first, *others = beside_each_other(dict(enumerate(planned)))
    found = together(planned[first], [planned[k] for k in others])
    assert found is not None
    return found


@pytest.mark.parametrize("second", [False, True])
def test_gradients_of_a_product_along_edges(second: bool) -> None:
    product, every = product_of(1, 8)
    planned = planned_of(looks_of(product, every, "YXW", second))
    assert beside_each_other(dict(enumerate(planned))) == [1, 0, 2]
    plan = joined(planned).plan
    assert plan.segment is not None and [one.tensor for one in plan.beside] == ["<out1>", "<out2>"]
    target, factors = plan.beside[0].pattern.points[0]
    assert str(target) == "D[order[slot],0]"
    assert {str(f) for f in factors} >= {"Z[dst_sorted[slot],0,u]"}
    assert any(str(f).startswith("X") and "[row," in str(f) for f in factors)  # read once for a row
    assert "beside" in plan.describe({})


def test_without_one_that_sums_rows() -> None:
    product, every = product_of(1, 8)
    planned = planned_of(looks_of(product, every, "YW"))
    assert beside_each_other(dict(enumerate(planned))) == [1, 0]
    assert joined(planned).plan.segment is None


def test_what_registers_do_not_hold_is_left_apart() -> None:
    product, every = product_of(2, 8)
    for second in (False, True):
        planned = planned_of(looks_of(product, every, "XYW", second))
        assert beside_each_other(dict(enumerate(planned))) == [0, 1, 2]
    product, every = product_of(3, 8)
    planned = planned_of(looks_of(product, every, "XYW"))
    assert beside_each_other(dict(enumerate(planned))) == []


def test_what_is_not_walked_alike_is_left_alone() -> None:
    product, every = product_of(1, 8)
    (rows,) = planned_of(looks_of(product, every, "X"))
    other = look_of(
        "D[e,K[p]] = V[p] * X[far[e],J[p],u] * Q[q[e],u] * Y[e,K[p]]",
        (EDGES, 4),
        {**every, "far": every["dst"].flip(0), "q": every["src"], "Q": torch.randn(NODES, 8)},
    ).planned()
    assert together(rows, other) is not None  # through the order, where there is no sorted copy
    double = planned_of(
        looks_of(
            product, {n: t.double() if t.is_floating_point() else t for n, t in every.items()}, "Y"
        )
    )
    assert together(rows, double) is None
    assert together(rows, [rows]) is None
    assert beside_each_other({}) == []


def test_results_that_are_differentiated_are_statements() -> None:
    """One launch has no gradient: third derivatives would lose all that goes through it."""
    x = torch.randn(3, requires_grad=True)
    asked = [AskedResult(f"y[i] = {k} * x[i] * x[i]", (3,), {"x": x}) for k in (1, 2)]
    with mock.patch("insum.together.in_kernels.at_once", return_value=[None, None]) as launch:
        one, two = results_of(asked)
        assert not launch.called
        (gradient,) = torch.autograd.grad((one + two).sum(), x)
        with torch.no_grad():
            results_of(asked)
        assert launch.called
    torch.testing.assert_close(gradient, 6 * x.detach())


@pytest.mark.compile_only
def test_nothing_is_spilled() -> None:
    product, every = product_of(1, 64)
    looks = looks_of(product, every, "XYW")
    planned = joined(planned_of(looks))
    look, wishes = looks[0], looks[0].wishes
    step = step_of(planned, wishes, first_choice(planned, wishes), None)
    made = {recipe: look.prologue.made(recipe) for recipe in step.recipes()}
    outputs = {f"<out{k}>": torch.empty(looks[k].shape, device="meta") for k in (1, 2)}
    numbers = CallNumbers({**every, **outputs}, look.extents, look.shape, made)  # type: ignore[arg-type]
    (one,) = step.launches
    types = BoundLaunch(one, one.plan, numbers, torch.float32).types
    report = compiling.compile_for(one.function, types, "sm_90", warps=one.config.warps, stages=1)
    assert report.stack == 0 and report.registers <= 168
    assert one.config.warps == 1  # a row of columns is one warp's


def test_long_kernels_are_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that nobody has compiled; a single one is left to its launch."""
    product, every = product_of(1, 8)
    bound = []
    for look in looks_of(product, every, "XYWY", second=True):
        program = look.program(anywhere=True)
        assert isinstance(program, Program)
        bound += look.ready(program).launches
    asked: list[list[compiling.Job]] = []
    monkeypatch.setattr(launch, "interpreting", lambda: False)
    monkeypatch.setattr(launch, "current_target", lambda: ["cuda", 90, 32])
    monkeypatch.setattr(workers, "compile_ahead", lambda jobs, target: asked.append(jobs))
    monkeypatch.setattr("insum.runtime.bound_launch.LONG_TEXT", 0)
    compile_at_once(bound)
    assert [len(jobs) for jobs in asked] == [3]
    compile_at_once(bound[:1])
    for one in bound:
        one.variants[0] = print
    compile_at_once(bound)
    assert len(asked) == 1
