"""Drawn statements through generated kernels in Triton's interpreter, against the oracle: every
strategy forced in turn.

What is drawn is the same in every run unless INSUM_FUZZ is set to a number, which is then the seed.
The counts at the end say that each strategy, and each kind of contraction, was really used.
"""

from __future__ import annotations

import functools
import os
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import insum
from insum.lang.expr import Access, Call, Product, Statement, accesses, product
from insum.lang.parser import parse
from insum.runtime.ready import Ready
from insum.testing import Case, draw_cases
from kernels import ONLY_FUSED, STRATEGIES, poison_new_memory
from scatters import draw_scatters

pytestmark = pytest.mark.interpreter

SEED = int(os.environ.get("INSUM_FUZZ") or 2026)
#: The interpreter's dot and atomics do not know bfloat16, and kernels do not take wide unsigned
#: indices.
DTYPES = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32)
INDICES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
#: How many of which kind, for each strategy.
FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {
    "anything": (40, {}),
    "larger products": (
        30,
        {
            "product_only": True,
            "max_rank": 3,
            "affine": False,
            "max_indirection": 1,
            "max_extent": 9,
            "zero_extents": False,
        },
    ),
    "extrema": (20, {"operators": ("max=", "min=")}),
}
SCATTERS = 20


@pytest.fixture(autouse=True)
def new_memory_is_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """What the kernels that ran were like."""
    found: Counter[str] = Counter()
    launch = Ready.__call__

    def watched(ready: Ready, *rest: Any) -> Tensor:
        for step, (_, launches) in zip(ready.program.steps, ready.work, strict=True):
            plan = step.planned.plan
            found.update(
                [
                    plan.strategy,
                    f"{plan.strategy}, {'dot' if plan.roles.dot else 'sum'}",
                    "dot" if plan.roles.dot else "sum",
                    plan.reduce,
                ]
            )
            found.update(label for label, holds in _labels(launches, plan).items() if holds)
        return launch(ready, *rest)

    monkeypatch.setattr(Ready, "__call__", watched)
    yield found


def _labels(launches: Any, plan: Any) -> dict[str, bool]:
    return {
        "accumulate": plan.accumulate,
        "padded": bool(plan.padded),
        "sorted once": any("was sorted once" in why for why in plan.why),
        "nothing to do": not launches,
        "outer loop": bool(plan.roles.outer),
        "flattened": len(plan.roles.m) > 1 or len(plan.roles.n) > 1,
        "several rows per tile": bool(plan.segment and plan.segment.tiled),
        "one row per tile": bool(plan.segment and not plan.segment.tiled),
    }


def failure(case: Case, changes: dict[str, Any]) -> str:
    """Empty where the case passes, or has no kernel."""
    try:
        with insum.settings(**ONLY_FUSED, **changes), warnings.catch_warnings():
            # NumPy, inside the interpreter, about infinities
            warnings.simplefilter("ignore", RuntimeWarning)
            case.check()
    except insum.NotFusedError:
        return ""
    except Exception as error:
        return f"{changes}\n{case!r}\n{''.join(traceback.format_exception(error))}"
    return ""


class Shared(Case):
    """Of several strategies, which have one result."""

    @functools.cached_property
    def found(self) -> np.ndarray[Any, Any]:
        return super().expected()

    def expected(self) -> np.ndarray[Any, Any]:
        return self.found


@functools.cache
def drawn() -> list[Shared]:
    kinds: dict[str, Any] = {"dtypes": DTYPES, "index_dtypes": INDICES}
    cases = [
        case
        for count, options in FAMILIES.values()
        for case in draw_cases(count, seed=SEED, **{**kinds, **options})
    ]
    every = [*cases, *draw_scatters(SCATTERS, seed=SEED)]
    return [Shared(**{field.name: getattr(c, field.name) for field in fields(c)}) for c in every]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_statements(strategy: str, used: Counter[str]) -> None:
    failures = []
    for number, case in enumerate(drawn()):
        options = {"scatter": strategy, "dot": ("always", "auto", "never", "always")[number % 4]}
        options |= {"swap": number % 5 != 0, "prefetch": number % 7 != 0}
        failures += filter(None, [failure(case, options)])
    assert not failures, f"{len(failures)} failed, the shortest of them:\n{min(failures, key=len)}"
    wanted = {"sum", "dot", "max", "min", "store", "accumulate", "padded", "nothing to do"}
    if strategy != "auto":
        wanted |= {strategy, f"{strategy}, dot", f"{strategy}, sum"} - {"unrolled, dot"}
    else:
        wanted |= {"segment", "atomic"}
    if strategy == "segment":
        wanted |= {"sorted once", "several rows per tile", "one row per tile"}
    assert SEED != 2026 or not wanted - set(used), (
        f"never used: {sorted(wanted - set(used))}, but {dict(used)}"
    )


def functions_of_factors(case: Case, number: int) -> Case:
    """The same product of functions that make something else of zero: what lies beyond the end of a
    tensor must not count.
    """
    statement = parse(case.statement)
    factors = (
        list(statement.value.factors) if isinstance(statement.value, Product) else [statement.value]
    )
    wrapped = [
        Call(("sigmoid", "exp")[k % 2], (f,)) if (number + k) % 3 and isinstance(f, Access) else f
        for k, f in enumerate(factors)
    ]
    return replace(
        case, statement=str(Statement(statement.target, statement.operator, product(wrapped)))
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_functions_of_factors(strategy: str, used: Counter[str]) -> None:
    options = {
        "product_only": True,
        "max_rank": 3,
        "affine": False,
        "max_indirection": 1,
        "max_extent": 9,
        "zero_extents": False,
        "dtypes": (torch.float32,),
    }
    failures = []
    for number, case in enumerate(
        [
            *draw_cases(30, seed=SEED + 7, index_dtypes=INDICES, **options),
            *draw_scatters(15, seed=SEED + 7),
        ]
    ):
        if case.precision is torch.float32:
            choices = {"scatter": strategy, "dot": ("always", "auto")[number % 2]}
            failures += filter(None, [failure(functions_of_factors(case, number), choices)])
    assert not failures, f"{len(failures)} failed, the shortest of them:\n{min(failures, key=len)}"
    assert SEED != 2026 or used["dot"] and used["sum"]


def large(case: Case) -> Case:
    """The same with integers whose products need more than 32 bits; what indexes stays as it is."""
    statement = parse(case.statement)
    read = [*accesses(statement.value), *accesses(statement.target)]
    indexing = {
        inner.tensor for access in read for index in access.indices for inner in accesses(index)
    }
    factors = {
        name: 70_001 if isinstance(value, int) else 30_011 for name, value in case.values.items()
    }
    return replace(
        case,
        values={
            name: value if name in indexing else value * factors[name]
            for name, value in case.values.items()
        },
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_large_integers(strategy: str) -> None:
    options = {
        "dtypes": (torch.int64,),
        "index_dtypes": INDICES,
        "functions": ("abs", "relu", "sign", "eq"),
        "max_rank": 3,
    }
    failures = []
    for number, case in enumerate(draw_cases(60, seed=SEED + 9, **options)):
        failures += filter(
            None, [failure(large(case), {"scatter": strategy, "swap": number % 5 != 0})]
        )
    assert not failures, f"{len(failures)} failed, the shortest of them:\n{min(failures, key=len)}"


def test_statements_in_deterministic_mode(used: Counter[str]) -> None:
    """Nothing is left to the order in which programs run."""
    failures = []
    torch.use_deterministic_algorithms(True)
    try:
        for case in draw_scatters(SCATTERS, seed=SEED + 1):
            failures += filter(None, [failure(case, {})])
    finally:
        torch.use_deterministic_algorithms(False)
    assert not failures, f"{len(failures)} failed, the shortest of them:\n{min(failures, key=len)}"
    assert used["segment"] and not used["atomic"]
