"""The memory of tuning on disk: many processes, half files, other versions, export and import."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from applications import tiny
from insum.plan.config import Config
from insum.runtime import cache
from insum.runtime.inspection import Look
from insum.settings import settings

SOURCE = Path(__file__).parent.parent / "src"
CHOICE = (Config(m=16, n=32, k=16, swap=1),)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INSUM_CACHE_DIR", str(tmp_path / "cache"))
    cache.forget()
    return tmp_path / "cache"


def key(**changes: str) -> cache.Key:
    application = tiny()[0]
    (one,) = Look(application.forward.problem(), application.values).planned()
    found = cache.key_of(one, torch.device("cpu"))
    return cache.Key(**{**{name: getattr(found, name) for name in cache.Key.__slots__}, **changes})


def entry(key: cache.Key, choice: tuple[Config, ...] = CHOICE) -> cache.CachedChoice:
    return cache.CachedChoice(key, "C[i] = A[i]", choice, 10.0, 12.5, "full")


def file_of(key: cache.Key) -> Path:
    return cache.entries_folder() / f"{key.name}.json"


# --- remembering ----------------------------------------------------------------------------------


def test_what_is_remembered_is_recalled_here_and_by_the_next_process() -> None:
    assert cache.recall(key()) is None
    before = cache.epoch()
    cache.remember(entry(key()))
    assert cache.recall(key()) == CHOICE and cache.epoch() > before
    cache.forget()
    assert cache.recall(key()) == CHOICE, "from the file"
    assert [path.name for path in cache.entries_folder().iterdir()] == [f"{key().name}.json"], (
        "nothing half-written is left"
    )


@pytest.mark.parametrize(
    "change", [{"swap": False}, {"prefetch": False}, {"lazy_broadcasting": False}]
)
def test_settings_that_change_the_kernel_have_entries_of_their_own(change: dict[str, bool]) -> None:
    cache.remember(entry(key()))
    with settings(**change):
        assert cache.recall(key()) is None
    assert cache.recall(key()) == CHOICE


@pytest.mark.parametrize(
    "change",
    [
        {"device": "another GPU"},
        {"sizes": "i:8"},
        {"torch": "9.9"},
        {"triton": "9.9"},
        {"insum": "9.9"},
        {"plan": "x"},
    ],
)
def test_everything_in_the_key_counts(change: dict[str, str]) -> None:
    cache.remember(entry(key()))
    assert cache.recall(key(**change)) is None


def test_the_key_knows_plan_sizes_and_versions() -> None:
    found = key()
    assert (
        "segment" in found.plan
        and "entries:" in found.sizes
        and found.torch == torch.__version__
        and found.device == "cpu"
    )
    assert all(int(size.partition(":")[2]).bit_count() == 1 for size in found.sizes.split())


def test_the_folder_falls_back_to_a_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("INSUM_CACHE_DIR", str(tmp_path / "file" / "below"))
    with caplog.at_level(logging.WARNING, "insum"):
        assert cache.folder().is_dir() and cache.folder() != tmp_path / "file" / "below"
    assert len(caplog.records) == 1, "said once"


# --- files that are no entries --------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage", ["half", "empty", "binary", "list", "format", "version", "illegal", "missing"]
)
def test_a_bad_entry_is_passed_over_with_one_line_and_written_anew(
    damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache.remember(entry(key()))
    path = file_of(key())
    held = json.loads(path.read_text())
    match damage:
        case "half":
            path.write_text(path.read_text()[: path.stat().st_size // 2])
        case "empty":
            path.write_text("")
        case "binary":
            path.write_bytes(bytes(range(256)))
        case "list":
            path.write_text("[]")
        case "format":
            path.write_text(json.dumps({**held, "format": 99}))
        case "version":
            path.write_text(json.dumps({**held, "key": {**held["key"], "torch": "1.0"}}))
        case "illegal":
            path.write_text(json.dumps({**held, "choice": [{"m": 3}]}))
        case "missing":
            path.write_text(json.dumps({k: v for k, v in held.items() if k != "choice"}))
    cache.forget()
    with caplog.at_level(logging.DEBUG, "insum"):
        assert cache.recall(key()) is None
    assert (
        len(caplog.records) == 1
        and path.name in caplog.text
        and caplog.records[0].levelno == logging.WARNING
    )
    cache.remember(entry(key()))
    cache.forget()
    assert cache.recall(key()) == CHOICE


# --- many processes -------------------------------------------------------------------------------

#: Tunes one statement with a clock that is not one, so that no GPU is needed; every process prefers
#: another config.
TUNE = """
import os, sys, torch
from insum.runtime import search
from insum.call.request import request_of
from insum.runtime.ready import Ready

torch.set_num_threads(1)
values = {"A": torch.ones(40, 32), "B": torch.ones(32, 48)}
problem = request_of("C[i,j] = A[i,k] * B[k,j]", None, None, ()).bind(values)
Ready.__call__ = lambda self, values, target=None: torch.zeros(40, 48)
sys.stdout.flush()
children = []
for favourite in range(8):  # each with all that was imported
    children.append(os.fork())
    if not children[-1]:
        break
else:
    ended = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(any(ended))
favourite %= 4
order = []

def timer(run, repeat):
    choice = run.func.program.steps[0].choice
    if choice not in order:
        order.append(choice)
    return 100.0 - (50.0 if order.index(choice) == 1 + favourite else 0.0)

for _ in range(3):
    found = search.tune(problem, values, None, "quick", timer=timer)
os.write(1, f"{found.config}\\n".encode())
os._exit(0)
"""


def test_eight_processes_at_once_leave_one_valid_cache(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    if not hasattr(os, "fork"):
        pytest.skip("processes cannot be forked here")
    done = subprocess.run(
        [sys.executable, "-c", TUNE], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")[:-1]
    printed = set(lines)
    assert len(lines) == 8 and len(printed) > 1, "they did not agree"
    files = list((folder / "tuned").iterdir())
    assert len(files) == 1 and files[0].suffix == ".json", "one entry, nothing half-written"
    (held,) = cache.entries()
    assert repr(held.choice[0]) in printed and held.microseconds == 50.0


# --- looking after the files ----------------------------------------------------------------------


def test_list_clear_export_import(tmp_path: Path) -> None:
    keys = [key(sizes=f"i:{2**n}") for n in range(3)]
    for one in keys:
        cache.remember(entry(one))
    assert {e.key for e in cache.entries()} == set(keys)
    assert cache.export_file(tmp_path / "shipped.json") == 3
    assert cache.clear() == 3 and list(cache.entries()) == [] and cache.recall(keys[0]) is None
    assert cache.import_file(tmp_path / "shipped.json") == (3, 0)
    assert cache.recall(keys[2]) == CHOICE and len(list(cache.entries())) == 3


def test_entries_of_other_versions_are_left_out_unless_asked_for(tmp_path: Path) -> None:
    cache.remember(entry(key()))
    cache.remember(entry(key(torch="1.0")))
    assert cache.export_file(tmp_path / "shipped.json") == 2
    cache.clear()
    assert cache.import_file(tmp_path / "shipped.json") == (1, 1)
    cache.clear()
    assert cache.import_file(tmp_path / "shipped.json", any_version=True) == (2, 0)


def test_what_is_no_export_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="no exported cache"):
        cache.import_file(tmp_path / "other.json")
