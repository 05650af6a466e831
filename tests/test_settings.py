"""Settings: defaults, attributes, context manager, environment variables, and what they refuse."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import insum
from insum.errors import SettingsError
from insum.ops import eager
from insum.settings import Settings, SettingValues, _from_environment, settings

SOURCE = Path(__file__).parent.parent / "src"


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = settings.values
    yield
    assert settings.values == before, "a test left the settings changed"


@pytest.fixture
def own() -> Settings:
    return Settings(SettingValues())


def test_defaults(own: Settings) -> None:
    assert (own.check, own.backend, own.scatter, own.dot, own.log) == (
        "async",
        "auto",
        "auto",
        "auto",
        "",
    )
    assert (own.require_fused, own.swap, own.prefetch, own.lazy_broadcasting, own.effort) == (
        False,
        True,
        True,
        True,
        "none",
    )


def test_assignment(own: Settings) -> None:
    own.check = "never"
    own.swap = False
    assert own.check == "never" and own.values == SettingValues(check="never", swap=False)


def test_context_manager_restores_also_after_an_error(own: Settings) -> None:
    own.check = "always"
    with pytest.raises(KeyError), own(check="never", backend="graph") as inside:
        assert inside is own and (own.check, own.backend) == ("never", "graph")
        with own(check="async"):
            assert (own.check, own.backend) == ("async", "graph")
        own.log = "plan"
        raise KeyError
    assert own.values == SettingValues(check="always")


def test_a_block_belongs_to_its_thread(own: Settings) -> None:
    seen: list[str] = []
    with own(check="never"):
        thread = threading.Thread(target=lambda: seen.append(own.check))
        thread.start()
        thread.join()
    assert seen == ["async"]


def test_blocks_of_two_threads_that_end_in_any_order_leave_nothing(own: Settings) -> None:
    first, second, ended = threading.Event(), threading.Event(), threading.Event()

    def one() -> None:
        with own(check="never"):
            first.set()
            second.wait()
        ended.set()

    def other() -> None:
        first.wait()
        with own(dot="never"):
            second.set()
            ended.wait()

    threads = [threading.Thread(target=target) for target in (one, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert own.values == SettingValues()


def test_an_assignment_outside_of_blocks_holds_for_all_threads(own: Settings) -> None:
    own.check = "always"
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.append(own.check))
    thread.start()
    thread.join()
    assert seen == ["always"]


def test_settings_of_a_call_reach_its_backward_pass_in_another_thread() -> None:
    x = torch.ones(3, requires_grad=True)
    bad = torch.tensor([0, 1, 2])
    with settings(backend="graph", dot="never"):
        y = insum.insum("y[i] = x[p[i]] * x[i]", x=x, p=bad)
    held: list[object] = []
    y.register_hook(lambda g: held.append(settings.dot))
    seen: list[object] = []
    original = eager.gradients

    def spied(*arguments: object) -> object:
        seen.append(settings.dot)
        return original(*arguments)  # type: ignore[arg-type]

    eager.gradients = spied  # type: ignore[assignment]
    try:
        thread = threading.Thread(target=lambda: y.sum().backward())
        thread.start()
        thread.join()
    finally:
        eager.gradients = original
    assert seen == ["never"] and held == ["auto"] and x.grad is not None


def test_values_are_frozen_and_hashable(own: Settings) -> None:
    assert hash(own.values) == hash(SettingValues())
    with pytest.raises(AttributeError):
        own.values.check = "never"  # type: ignore[misc]


def test_equal_values_are_one_object(own: Settings) -> None:
    """So that what is remembered for settings can be told by identity, and a block in a loop costs
    nothing.
    """
    seen = []
    for _ in range(2):
        with own(check="never", effort="quick"):
            seen.append(own.values)
    assert seen[0] is seen[1]


def test_it_shows_itself(own: Settings) -> None:
    assert repr(own).startswith("insum.settings(check='async', backend='auto'") and set(
        dir(own)
    ) >= {"check", "log", "values"}


def test_copies_are_the_one_object() -> None:
    assert (
        copy.deepcopy(settings)
        is settings
        is copy.copy(settings)
        is pickle.loads(pickle.dumps(settings))
    )


@pytest.mark.parametrize(
    ("name", "value", "fact", "expected"),
    [
        (
            "check",
            "sometimes",
            "settings.check cannot be 'sometimes'",
            "one of 'async', 'always', 'never'",
        ),
        ("backend", None, "settings.backend cannot be None", "one of 'auto', 'graph', 'fused'"),
        ("scatter", [], "settings.scatter cannot be []", "one of 'auto', 'segment'"),
        ("swap", 1, "settings.swap cannot be 1", "True or False"),
        ("log", 3, "settings.log cannot be 3", "a string"),
        ("effort", "some", "settings.effort cannot be 'some'", "one of 'none', 'quick', 'full'"),
        ("chekc", "never", "there is no setting 'chekc'", "check, backend"),
        ("values", SettingValues(), "there is no setting 'values'", "check, backend"),
    ],
)
def test_refuses(own: Settings, name: str, value: object, fact: str, expected: str) -> None:
    with pytest.raises(SettingsError) as caught:
        setattr(own, name, value)
    assert caught.value.fact == fact and expected in str(caught.value)
    with pytest.raises(SettingsError), own(**{name: value}):
        pass
    assert own.values == SettingValues()


def test_an_unknown_name_lists_the_known_ones(own: Settings) -> None:
    with pytest.raises(
        AttributeError, match=r"insum\.settings has no 'chekc'; it has check, backend"
    ):
        _ = own.chekc


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, SettingValues()),
        ({"INSUM_CHECK": "never", "CHECK": "always"}, SettingValues(check="never")),
        ({"INSUM_CHECK": " Always "}, SettingValues(check="always")),
        (
            {"INSUM_REQUIRE_FUSED": "1", "INSUM_SWAP": "off"},
            SettingValues(require_fused=True, swap=False),
        ),
        (
            {"INSUM_PREFETCH": "No", "INSUM_LOG": "plan,kernel"},
            SettingValues(prefetch=False, log="plan,kernel"),
        ),
        ({"INSUM_EFFORT": "Quick"}, SettingValues(effort="quick")),
        ({"INSUM_UNKNOWN": "1"}, SettingValues()),
    ],
)
def test_environment(environment: dict[str, str], expected: SettingValues) -> None:
    assert _from_environment(environment) == expected


@pytest.mark.parametrize(
    ("name", "text"), [("INSUM_CHECK", "maybe"), ("INSUM_SWAP", "2"), ("INSUM_REQUIRE_FUSED", "")]
)
def test_environment_refuses(name: str, text: str) -> None:
    with pytest.raises(SettingsError):
        _from_environment({name: text})


def test_environment_is_read_at_import() -> None:
    command = [
        sys.executable,
        "-c",
        "import insum; print(insum.settings.check, insum.settings.swap)",
    ]
    environment = {
        **os.environ,
        "INSUM_CHECK": "never",
        "INSUM_SWAP": "0",
        "PYTHONPATH": str(SOURCE),
    }
    assert subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=600
    ).stdout.split() == ["never", "False"]
