"""A hundred trials of the soak test, and that it finds what is wrong."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import insum
from insum.testing import soak


def test_a_while_of_everything() -> None:
    counts = soak.soak(math.inf, seed=1000, trials=100)
    assert not counts.found and set(counts.tried) == set(soak.TRIALS), str(counts)


def test_a_number_of_trials_or_the_time_is_the_end() -> None:
    counts = soak.soak(math.inf, seed=1000, names=("runs",), trials=3)
    assert not counts.found and counts.tried == {"runs": 3}
    assert not soak.soak(0, trials=3).tried


def test_what_is_wrong_is_found_and_made_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = insum.insum
    monkeypatch.setattr(insum, "insum", lambda *a, **k: right(*a, **k) + 1)
    counts = soak.soak(math.inf, names=("rewritten",), out=tmp_path, trials=3)
    assert len(counts.found) == 3 and all(f.startswith("rewritten:") for f in counts.found)
    assert counts.found[0].endswith(":0.1"), "also at the smallest scale"
    script = next(tmp_path.glob("rewritten_*.py")).read_text()
    assert "trial('rewritten'" in script
    assert "FOUND" in capsys.readouterr().out
    assert "rewritten" in str(counts)


#: Indices written to between calls, where programs for tensors never seen hold what they derived.
@pytest.mark.interpreter
@pytest.mark.parametrize("seed", [7000274, 21000152, 21000404])
def test_what_was_found_on_a_gpu(seed: int) -> None:
    soak.trial("rewritten", seed, 0.1, as_on_a_gpu=True)


@pytest.mark.interpreter
def test_a_while_as_on_a_gpu() -> None:
    names = ("rewritten", "in_place", "aliases", "repeated", "extrema")
    counts = soak.soak(
        math.inf, seed=3000, where=soak.Where(as_on_a_gpu=True), names=names, trials=15
    )
    assert not counts.found and set(counts.tried) == set(names), str(counts)


def test_scripts_say_where_a_trial_ran() -> None:
    call = soak.Where("cpu", as_on_a_gpu=True).call("in_place", 3, 0.5)
    assert call == "trial('in_place', 3, 0.5, 'cpu', True)"


def test_a_trial_is_decided_by_its_seed() -> None:
    soak.trial("formats", seed=5)
    before = torch.random.get_rng_state()
    soak.trial("formats", seed=5)
    assert torch.equal(before, torch.random.get_rng_state())


def test_one_trial_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["soak", "--again", "in_place:3:0.5"])
    assert soak.main() == 0
