"""Configs: what is legal, what the search may try, and that every candidate computes the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import insum
from applications import Application, tiny
from insum.errors import SettingsError
from insum.plan import cost, legal, space, tiling
from insum.plan.config import Choice, Config, choice_from, choice_of, choice_text, shown
from insum.plan.draft import CannotFuse, Planned
from insum.plan.orientation import oriented
from insum.runtime import inspection
from insum.runtime.build import first_choice
from insum.runtime.inspection import Look
from insum.settings import settings
from insum.testing import draw_cases
from kernels import bound

APPLICATIONS = tiny()
DEVICE = cost.Device()


def look_at(application: Application) -> Look:
    return Look(application.forward.problem(), application.values)


def prepared(application: Application) -> Planned:
    (one,) = look_at(application).planned()
    return one


def limits(application: Application, count: int = 40, **changes: Any) -> space.SpaceLimits:
    look = look_at(application)
    (one,) = look.planned()
    return space.SpaceLimits(dataclasses.replace(DEVICE, **changes), look.load(one), count)


def guess(application: Application) -> Choice:
    look = look_at(application)
    (one,) = look.planned()
    return first_choice(one, look.wishes)


def candidates(application: Application, count: int = 40, **changes: Any) -> list[Choice]:
    one, limited = prepared(application), limits(application, count, **changes)
    return space.candidates(one.plan, one.extents, limited, guess(application))


def turned(one: Planned, choice: Choice) -> Any:
    return oriented(one.plan, one.extents, choice[0].swap)


each_application = pytest.mark.parametrize("application", APPLICATIONS, ids=lambda a: a.name)


# --- Config ---------------------------------------------------------------------------------------


def test_configs_print_as_they_are_written() -> None:
    config = Config(m=64, n=16, k=32, warps=8, stages=3, split=4, group=8, swap=1)
    assert eval(repr(config)) == config and eval(repr(Config())) == Config()
    assert "swap" not in repr(Config()) and eval(shown((config, Config())), {"insum": insum}) == (
        config,
        Config(),
    )


WRONG = [
    {"m": 3},
    {"n": 0},
    {"k": -1},
    {"warps": 64},
    {"stages": 0},
    {"split": -1},
    {"swap": 2},
    {"swap": -2},
    {"m": 16.0},
    {"m": True},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_configs_refuse(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        Config(**wrong)


def test_choices() -> None:
    one, two = Config(m=16), Config(n=32, swap=0)
    assert (
        choice_of(None) is None and choice_of(one) == (one,) and choice_of([one, two]) == (one, two)
    )
    assert (
        choice_from(choice_text((one, two))) == (one, two)
        and choice_from(choice_text(None)) is None
    )
    for wrong in ("m=16", (), (one, 3), {"m": 16}):
        with pytest.raises(SettingsError, match=r"insum\.Config"):
            choice_of(wrong)  # type: ignore[arg-type]


# --- the space ------------------------------------------------------------------------------------


@each_application
def test_candidates_are_legal_and_start_with_the_first_guess(application: Application) -> None:
    one, found = prepared(application), candidates(application)
    assert found[0] == guess(application)
    assert len(set(found)) == len(found) <= 40
    for choice in found:
        assert legal.broken(turned(one, choice), one.extents, choice) == ""


def test_the_first_guess_is_legal_for_whatever_is_drawn() -> None:
    planned = 0
    for case in draw_cases(300, seed=5, max_extent=40, max_points=40_000, max_elements=4000):
        look = Look(bound(case.statement, case.values, case.sizes, case.padded), case.values)
        try:
            products = look.planned()
        except CannotFuse:
            continue
        for one in products:
            choice = first_choice(one, look.wishes)
            assert legal.broken(turned(one, choice), one.extents, choice) == "", case
            planned += 1
    assert planned > 100


@each_application
def test_quick_is_a_handful(application: Application) -> None:
    assert len(candidates(application, 8)) <= 8


def block_product() -> Application:
    from applications import block_spmm

    return block_spmm(rows=32, columns=32, block=32, n=1024, density=0.2, dtype=torch.float16)


def test_products_are_tried_both_ways_round_and_with_several_depths() -> None:
    found = candidates(block_product(), 200)
    assert {c[0].swap for c in found} >= {0, 1}
    assert (
        len({c[0].k for c in found}) > 1
        and len({(c[0].m, c[0].n) for c in found}) > 3
        and len({c[0].stages for c in found}) > 1
    )
    assert all(c[0].k % 32 == 0 for c in found), "whole blocks"


def test_rows_are_tried_with_several_splits() -> None:
    from applications import spmm

    found = candidates(
        spmm(rows=2000, columns=2000, n=128, entries=20_000, heavy=1500, dtype=torch.float32), 400
    )
    assert (
        len({c[0].split for c in found}) > 2
        and len({c[1] for c in found}) > 3
        and len({c[0].m for c in found}) > 2
    )


def test_shared_memory_and_registers_prune() -> None:
    application = block_product()
    one = prepared(application)
    for shared in (48 * 1024, 227 * 1024):
        for choice in candidates(application, 500, shared=shared)[1:]:
            (part,) = cost.parts_of(
                turned(one, choice), one.extents, choice, limits(application).load
            )
            assert part.shared <= shared and part.registers <= space.MOST_REGISTERS


def test_neighbours_differ_in_one_number() -> None:
    application = block_product()
    one = prepared(application)
    centre = candidates(application)[3]
    found = space.neighbours(one.plan, one.extents, limits(application), centre)
    assert found
    for choice in found:
        assert (
            sum(
                a != b
                for a, b in zip(dataclasses.astuple(choice[0]), dataclasses.astuple(centre[0]))
            )
            == 1
        )


def test_crossed_takes_the_best_of_each_kind() -> None:
    base = (Config(m=4, split=128), Config(k=16))
    faster_short, faster_long, faster_split = (
        Config(m=8, split=128),
        Config(k=32),
        Config(m=4, split=64),
    )
    timed = [
        (base, 10.0),
        ((faster_short, base[1]), 9.0),
        ((base[0], faster_long), 8.0),
        ((faster_split, base[1]), 7.0),
    ]
    assert space.crossed(timed) == (Config(m=8, split=64), faster_long)
    assert space.crossed([((Config(),), 1.0)]) is None


# --- what users may give --------------------------------------------------------------------------


def given(application: Application, config: Any) -> Any:
    return inspection.plan_only(
        application.forward.problem(), application.values, config=choice_of(config)
    )


def by_strategy(name: str, dot: bool | None = None) -> Application:
    for application in APPLICATIONS:
        plan = prepared(application).plan
        if plan.strategy == name and (dot is None or plan.roles.dot == dot):
            return application
    raise AssertionError(name)


@each_application
def test_the_config_that_was_chosen_can_be_given(application: Application) -> None:
    chosen = given(application, None).steps[0].choice
    program = given(application, chosen)
    assert program.steps[0].choice == chosen
    assert [one.kernel.source for one in program.steps[0].launches] == [
        one.kernel.source for one in given(application, None).steps[0].launches
    ]


@pytest.mark.parametrize(
    ("application", "config", "rule"),
    [
        (block_product(), Config(m=8, n=64, k=32), "sides of tl.dot are at least 16"),
        (block_product(), Config(m=64, n=32, k=16), "k is a multiple of 32"),
        (block_product(), Config(m=1024, n=2048, k=32), "at most 1048576 elements"),
        (block_product(), (Config(m=64, n=32, k=32), Config(m=64, n=32, k=32)), "2 config"),
    ],
)
def test_what_cannot_be_is_refused_with_the_rule(
    application: Application, config: Any, rule: str
) -> None:
    with pytest.raises(SettingsError, match=rule):
        given(application, config)


def test_rows_take_two_configs() -> None:
    from applications import spmm

    application = spmm(rows=64, columns=64, n=32, entries=500, dtype=torch.float32)
    assert tiling.in_rows(prepared(application).plan)
    with pytest.raises(SettingsError, match="short rows, long rows"):
        given(application, Config(m=4, n=32, k=2))
    program = given(
        application,
        (
            Config(m=2, n=32, k=4, warps=1, stages=1, split=16),
            Config(m=1, n=32, k=16, warps=1, stages=1),
        ),
    )
    assert {one.config.k for one in program.steps[0].launches if one.config.m == 2} == {4}
    assert program.steps[0].workspace, "rows longer than 16 were cut"


def test_a_config_takes_part_in_the_public_calls() -> None:
    tensors = {"A": torch.ones(2, 3), "x": torch.ones(3)}
    config = Config(m=1, n=2, k=4)
    assert insum.insum("y[i] = A[i,j] * x[j]", config=config, **tensors).tolist() == [3.0, 3.0]
    compiled = insum.compile("y[i] = A[i,j] * x[j]", config=config)
    assert compiled(**tensors).tolist() == [3.0, 3.0] and "Config(" in repr(compiled)
    insum.explain("y[i] = A[i,j] * x[j]", config=config, **tensors)
    with pytest.raises(SettingsError, match="config is 3"):
        insum.insum("y[i] = A[i,j] * x[j]", config=3, **tensors)


def test_a_config_passes_through_torch_compile() -> None:
    def call(A: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return insum.insum("y[i] = A[i,j] * x[j]", config=insum.Config(m=1, n=2, k=4), A=A, x=x)

    A, x = torch.ones(2, 3), torch.ones(3)
    assert torch.compile(call, backend="eager", fullgraph=True)(A, x).tolist() == [3.0, 3.0]


# --- every candidate computes the same ------------------------------------------------------------


@pytest.mark.interpreter
@each_application
def test_candidates_give_one_result(application: Application) -> None:
    expected = application.formula(
        {n: v.double() if v.is_floating_point() else v for n, v in application.values.items()}
    )
    every = candidates(application, 60)
    with insum.settings(backend="fused", require_fused=True):
        for choice in every[:: max(1, len(every) // 6)]:
            got = insum.insum(
                application.statement,
                sizes=dict(application.sizes),
                padded=application.padded,
                config=choice,
                **application.values,
            )
            assert torch.allclose(got.double(), expected, atol=2e-2, rtol=2e-2), choice


@pytest.mark.interpreter
@pytest.mark.parametrize("group", [1, 2, 3, 8])
def test_groups_visit_every_tile_once(group: int) -> None:
    A, B = torch.randn(3, 80, 32), torch.randn(3, 32, 112)
    with insum.settings(backend="fused", require_fused=True):
        got = insum.insum(
            "C[b,i,j] = A[b,i,k] * B[b,k,j]", config=Config(m=16, n=16, k=16, group=group), A=A, B=B
        )
    assert torch.allclose(got, A @ B, atol=1e-4)


@pytest.mark.interpreter
@pytest.mark.parametrize("swap", [0, 1])
@pytest.mark.parametrize("split", [0, 1, 3])
def test_swap_and_pieces(swap: int, split: int) -> None:
    A, B = torch.randn(20, 130), torch.randn(130, 40)
    with insum.settings(backend="fused", require_fused=True):
        got = insum.insum(
            "C[i,j] = A[i,k] * B[k,j]",
            config=Config(m=16, n=32, k=16, split=split, swap=swap),
            A=A,
            B=B,
        )
    assert torch.allclose(got, A @ B, atol=1e-4)


@pytest.mark.interpreter
def test_rows_that_might_have_been_cut_and_are_not() -> None:
    """How long the longest row is, is known as a power of two: there may be nothing to cut."""
    AM, AK = torch.arange(4).repeat_interleave(5), torch.randint(0, 7, (20, 5))
    AV, B = torch.randn(20, 5), torch.randn(7, 8)
    config = Config(m=2, n=8, k=4, split=32), Config(m=1, n=8, k=16)
    with insum.settings(backend="fused", require_fused=True):
        got = insum.insum(
            "C[AM[p],n] += AV[p,q] * B[AK[p,q],n]",
            sizes={0: 4},
            config=config,
            AM=AM,
            AV=AV,
            AK=AK,
            B=B,
        )
    expected = torch.zeros(4, 8).index_add(0, AM, (AV[:, :, None] * B[AK]).sum(1))
    assert torch.allclose(got, expected, atol=1e-5)


def test_the_settings_are_as_before() -> None:
    assert settings.effort == "none"
