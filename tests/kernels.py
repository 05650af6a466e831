"""What tests of generated kernels share: settings that allow nothing else, plans by statement,
memory that holds NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import insum
from insum.lang.bind import Problem, bind
from insum.lang.parser import parse
from insum.plan.plan import Plan
from insum.runtime import inspection
from insum.runtime.program import Program, Refusal
from insum.runtime.ready import Ready
from insum.runtime.unseen import Unseen
from insum.testing.as_on_a_gpu import ONLY_FUSED, poisonous

STRATEGIES = ("auto", "segment", "onehot", "unrolled", "store", "atomic")


def bound(
    statement: str,
    values: Mapping[str, Any],
    sizes: Mapping[Any, Any] | None = None,
    padded: Sequence[str] = (),
) -> Problem:
    return bind(parse(statement), values, sizes=sizes, padded=padded)


def plans_of(
    problem: Problem, values: Mapping[str, Any], target: Tensor | None = None
) -> list[Plan]:
    """The plans of a statement, one for each product, as a GPU would get them. Runs nothing."""
    return [step.planned.plan for step in inspection.plan_only(problem, values, target).steps]


def lookup(problem: Problem, values: Mapping[str, Any], target: Tensor | None = None) -> Program:
    """The program that a call runs here."""
    found = inspection.Look(problem, values, target).program()
    assert not isinstance(found, Refusal), found.reason
    return found


def plan_of(
    statement: str,
    sizes: Mapping[Any, Any] | None = None,
    padded: Sequence[str] = (),
    **values: Any,
) -> Plan:
    (plan,) = plans_of(bound(statement, values, sizes, padded), values)
    return plan


def run(
    statement: str,
    sizes: Mapping[Any, Any] | None = None,
    padded: Sequence[str] = (),
    **values: Any,
) -> Tensor:
    """The statement through generated kernels and nothing else."""
    with insum.settings(**ONLY_FUSED):
        return insum.insum(statement, sizes=sizes, padded=padded, **values)


def poison_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor that is made without values starts as NaN, or as a number that stands out,
    whichever way it is made.
    """
    for owner, name, new in poisonous():
        monkeypatch.setattr(owner, name, new)


def watch_programs(
    monkeypatch: pytest.MonkeyPatch, looks: list[bool] | None = None
) -> list[Program]:
    """Every program that is launched from now on, and whether it looks at indices."""
    programs: list[Program] = []
    whole, code = Ready.__call__, Unseen.__dict__["run"]

    def noted(of: Ready | Unseen, look: bool) -> None:
        programs.append(of.program)
        if looks is not None:
            looks.append(look)

    def watched(self: Ready, *rest: Any, look: bool = False) -> Tensor:
        noted(self, look)
        return whole(self, *rest, look=look)

    def watched_code(self: Unseen) -> Any:
        def run(*rest: Any) -> Tensor:
            noted(self, rest[-1])
            result: Tensor = code.__get__(self)(*rest)
            return result

        return run

    monkeypatch.setattr(Ready, "__call__", watched)
    monkeypatch.setattr(Unseen, "run", property(watched_code, code.__set__))
    return programs


def strategy_of(program: Program) -> str:
    return program.steps[0].planned.plan.strategy


def error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, in units of the largest expected value; infinite where anything is NaN
    that should not be.
    """
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} and {tuple(expected.shape)}"
    if not actual.numel():
        return 0.0
    difference = (actual.double() - expected.double()).abs().max()
    return (
        float("inf")
        if bool(torch.isnan(difference))
        else float(difference / expected.double().abs().max().clamp(min=1.0))
    )
