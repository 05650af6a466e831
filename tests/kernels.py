"""What tests of generated kernels share: settings that allow nothing else, plans by statement,
memory that holds NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import insum
from insum.compat import calls
from insum.lang.bind import Problem, bind
from insum.lang.parser import parse
from insum.plan.plan import Plan
from insum.runtime import fused

#: Only generated kernels, whatever the device.
ONLY_FUSED: dict[str, Any] = {"backend": "fused", "require_fused": True}
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
    return [step.prepared.plan for step in fused.plan_only(problem, values, target).steps]


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


def poisoned(empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.empty` whose memory holds NaN, or a number that would show."""

    def make(*args: Any, **options: Any) -> Tensor:
        out = empty(*args, **options)
        return (
            out.fill_(float("nan") if out.is_floating_point() or out.is_complex() else 77)
            if out.numel() and out.device.type != "meta"
            else out
        )

    return make


def poison_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor that is made without values starts as NaN, or as a number that stands out,
    whichever way it is made.
    """
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_strided", poisoned(torch.empty_strided))
    quick = {kind: poisoned(make) for kind, make in calls._strided().items()}
    monkeypatch.setattr(calls, "_strided", lambda: quick)


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
