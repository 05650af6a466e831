"""Drawn statements: the library against the oracle in value, and against finite differences in
first and second derivatives.

The draws are the same in every run unless INSUM_FUZZ is set, which makes them new each time.
"""

from __future__ import annotations

import os
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.overrides import TorchFunctionMode

import insum
from insum.lang.bind import bind
from insum.lang.expr import accesses, variables
from insum.lang.parser import parse
from insum.testing import Case, assert_close, draw_cases, statements
from insum.testing.cases import COMPLEX, FLOATS, HALVES, INTEGERS

FUZZ = bool(os.environ.get("INSUM_FUZZ"))

#: How many statements of which kind; at least 500 in value, at least 100 in derivatives.
VALUES: dict[str, tuple[int, dict[str, Any]]] = {
    "floats": (200, {"dtypes": FLOATS}),
    "halves": (80, {"dtypes": HALVES}),
    "integers": (80, {"dtypes": INTEGERS}),
    "booleans": (40, {"dtypes": (torch.bool,)}),
    "complex": (60, {"dtypes": (*COMPLEX, *FLOATS)}),
    "every dtype": (80, {"dtypes": (*FLOATS, *HALVES, *COMPLEX, *INTEGERS, torch.bool)}),
    "products": (80, {"dtypes": (*FLOATS, *HALVES), "product_only": True}),
}
_SMALL = {"differentiable": True, "max_points": 32, "max_elements": 16, "max_extent": 3}
DERIVATIVES: dict[str, tuple[int, dict[str, Any]]] = {
    "real": (45, {**_SMALL, "dtypes": (torch.float64,)}),
    "real products": (30, {**_SMALL, "dtypes": (torch.float64,), "product_only": True}),
    "complex": (30, {**_SMALL, "dtypes": (torch.complex128, torch.float64)}),
}

EVERYWHERE = {f"rank {n}" for n in range(6)} | {
    "repeated index",
    "shared index tensor",
    "zero extent",
    "strided",
    "nested indirection",
    "affine index",
}
EVERYWHERE |= {
    "literal index",
    "scatter",
    "Python number",
    "padding",
    "target passed",
    "broadcast",
    "reduction",
    "same tensor twice",
    "several factors",
}


def test_there_are_enough() -> None:
    assert sum(n for n, _ in VALUES.values()) >= 500
    assert sum(n for n, _ in DERIVATIVES.values()) >= 100


def failed(check: Callable[[Case], None], case: Case) -> str | None:
    try:
        check(case)
    except Exception as error:
        return "".join(traceback.format_exception(error))
    return None


def drawn(
    count: int,
    options: dict[str, Any],
    check: Callable[[Case], None],
    suitable: Callable[[Case], bool] = lambda case: True,
) -> Counter[str]:
    """Check ``count`` drawn cases and say what they held."""
    seen: Counter[str] = Counter()

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=not FUZZ,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(statements(**options))
    def run(case: Case) -> None:
        assume(suitable(case))
        failure = failed(check, case)
        # Raised here whatever went wrong: for hypothesis every generated graph would be another
        # place, hence another bug to shrink.
        assert failure is None, failure
        seen.update({"cases", *case.features})

    run()
    assert seen["cases"] >= count, f"{seen['cases']} statements were checked, not {count}"
    return seen


# --- values ---------------------------------------------------------------------------------------


def check_value(case: Case) -> None:
    statement = parse(case.statement)
    arguments = case.clone().values
    result = insum.insum(
        case.statement, sizes=dict(case.sizes) or None, padded=case.padded, **arguments
    )
    problem = bind(statement, case.values, sizes=dict(case.sizes), padded=case.padded)
    assert result.dtype == problem.dtype and result.device == problem.device
    assert_close(result, case.expected(), case.precision)
    check_arguments(
        case, arguments, result, statement.target.tensor if statement.operator != "=" else ""
    )


def check_arguments(case: Case, arguments: Any, result: Tensor, written: str) -> None:
    """Only the target of an accumulating statement is written to, and it is what comes back."""
    if written in arguments:
        assert result is arguments[written]
    else:
        assert all(
            result.untyped_storage().data_ptr() != t.untyped_storage().data_ptr()
            for t in case.tensors.values()
            if t.numel()
        )
    for name, before in case.tensors.items():
        if name != written:
            assert torch.equal(before.isnan(), arguments[name].isnan()) and torch.equal(
                before.nan_to_num(), arguments[name].nan_to_num()
            ), name


@pytest.mark.parametrize("family", VALUES)
def test_values(family: str) -> None:
    count, options = VALUES[family]
    seen = drawn(count, options, check_value)
    missing = EVERYWHERE - set(seen) if count >= 80 else set()
    assert not missing, f"the draws of this family never held: {missing}"


def test_values_from_a_seed() -> None:
    """The same through `draw_cases`, which chooses evenly where hypothesis prefers corners."""
    for case in draw_cases(300, seed=2026, dtypes=(*FLOATS, *HALVES, *INTEGERS)):
        check_value(case)


class Passing(TorchFunctionMode):
    """Takes a call off the short way past the dispatcher, and changes nothing else."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


def test_values_through_the_dispatcher() -> None:
    """The registered ops, which tracers and transforms see, against the short way past them."""
    for case in draw_cases(200, seed=7, dtypes=(*FLOATS, *HALVES, *COMPLEX, torch.int32)):
        with Passing():
            through = case.run()
        torch.testing.assert_close(
            through, case.run(), equal_nan=True, msg=lambda text, case=case: f"{text}\n{case}"
        )


def test_absent_points_contribute_nothing_not_even_zero_times_infinity() -> None:
    """Whatever stands where a clamped -1 would read must not be seen, however it is reduced."""
    checked = 0
    options: dict[str, Any] = {
        "dtypes": (torch.float32,),
        "functions": ("abs", "relu"),
        "max_points": 24,
        "max_elements": 16,
        "differentiable": True,
    }
    for number, case in enumerate(draw_cases(400, seed=1, **options)):
        spoiled = at_absent(case, (float("inf"), float("nan"))[number % 2])
        if spoiled is not None:
            assert_close(spoiled.run(), case.expected(), torch.float32)
            checked += 1
    assert checked >= 20, checked


def at_absent(case: Case, bad: float) -> Case | None:
    """The case with ``bad`` in the elements that no point reads, in factors that see which points
    are absent.
    """
    if "padding" not in case.features:
        return None
    values, statement = dict(case.clone().values), parse(case.statement)
    reads = [
        *(a for i in statement.target.indices for a in accesses(i)),
        *accesses(statement.value),
    ]
    masked = {v for access in reads if access.tensor in case.padded for v in variables(access)}
    for name in case.inputs:
        if name != case.target and all(
            masked <= set(variables(a)) for a in reads if a.tensor == name
        ):
            unread = ~elements_read(case, name)
            values[name] = torch.where(unread, bad, values[name].detach())
    changed = any(not torch.equal(case.tensors[n], values[n]) for n in case.inputs)
    return replace(case, values=values) if changed else None


def elements_read(case: Case, name: str) -> Tensor:
    """Where a tensor is read at a point that is not absent: mark an element, see whether the
    oracle's result changes.
    """
    tensor = case.tensors[name]
    read = torch.zeros(tensor.numel(), dtype=torch.bool)
    expected = case.expected()
    for k in range(tensor.numel()):
        marked = tensor.flatten().clone()
        marked[k] = float("nan")
        read[k] = not np.array_equal(
            replace(case, values={**case.values, name: marked.reshape(tensor.shape)}).expected(),
            expected,
        )
    return read.reshape(tensor.shape)


# --- derivatives ----------------------------------------------------------------------------------


def inputs_of(case: Case) -> list[str]:
    statement = parse(case.statement)
    read = {a.tensor for a in accesses(statement.value)} | (
        {statement.target.tensor} if statement.operator != "=" else set()
    )
    return [name for name in case.inputs if name in read and case.tensors[name].numel()]


def differentiable(case: Case) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """The call as a function of its floating arguments, and those arguments."""
    statement, names = parse(case.statement), inputs_of(case)

    def function(*inputs: Tensor) -> Tensor:
        values = {**case.values, **dict(zip(names, inputs, strict=True))}
        if statement.operator != "=" and statement.target.tensor in values:
            # the call writes into it
            values[statement.target.tensor] = values[statement.target.tensor].clone()
        return insum.insum(
            case.statement, sizes=dict(case.sizes) or None, padded=case.padded, **values
        )

    return function, [case.clone().tensors[name].requires_grad_() for name in names]


#: Functions whose derivative is zero.
FLAT = {f"{name}()" for name in ("sign", "step", "eq", "ne", "lt", "le", "ones", "where")}


def check_derivatives(case: Case) -> None:
    function, inputs = differentiable(case)
    assert gradcheck(function, inputs)
    # The fast mode of gradgradcheck, here as with torch's own functions, takes a gradient that is
    # constantly zero for another output's.
    assert gradgradcheck(function, inputs, fast_mode=not case.features & FLAT)


@pytest.mark.parametrize("family", DERIVATIVES)
def test_derivatives(family: str) -> None:
    count, options = DERIVATIVES[family]
    seen = drawn(count, options, check_derivatives, suitable=lambda case: bool(inputs_of(case)))
    assert {
        "repeated index",
        "shared index tensor",
        "strided",
        "scatter",
        "padding",
        "rank 0",
        "rank 4",
    } <= set(seen)


def test_derivatives_through_the_dispatcher() -> None:
    checked = 0
    for case in draw_cases(
        15,
        seed=15,
        **{
            **_SMALL,
            "max_elements": 12,
            "max_points": 24,
            "dtypes": (torch.float64, torch.complex128),
        },
    ):
        if inputs_of(case):
            with Passing():
                check_derivatives(case)
            checked += 1
    assert checked >= 10
