"""The command line: every command, and what it says where something is missing."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from insum import cli, doctor
from insum.plan.config import Config
from insum.runtime import cache

pytest.importorskip("typer")
pytest.importorskip("rich")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INSUM_CACHE_DIR", str(tmp_path / "cache"))
    cache.forget()
    return tmp_path


def insum(*arguments: str, code: int = 0) -> str:
    from typer.testing import CliRunner

    result = CliRunner().invoke(cli.application(), list(arguments), prog_name="insum")
    assert result.exit_code == code, result.output
    return result.output


def remember(sizes: str = "i:8", torch_version: str | None = None) -> None:
    now = cache.versions()
    key = cache.Key("plan", sizes, "a GPU", torch_version or now[0], *now[1:])
    cache.remember(cache.CachedChoice(key, "C[i] = A[i]", (Config(m=4, n=32),), 3.25, 4.5, "full"))


def test_without_a_command_it_shows_them() -> None:
    text = insum("--help")
    assert all(name in text for name in ("bench", "cache", "doctor", "explain", "demo"))
    assert all(name in insum("cache", "--help") for name in ("list", "clear", "export", "import"))


def test_the_cache_commands(tmp_path: Path) -> None:
    assert "0 entries" in insum("cache", "list")
    remember("i:8")
    remember("i:16")
    listed = insum("cache", "list")
    assert (
        "2 entries" in listed
        and "C[i] = A[i]" in listed
        and "3.2" in listed
        and "insum.Config(" in listed
    )
    file = tmp_path / "shipped.json"
    assert "2 entries" in insum("cache", "export", str(file))
    assert "2 files removed" in insum("cache", "clear")
    assert "2 entries taken over" in insum("cache", "import", str(file))
    assert "2 entries" in insum("cache", "list")


def test_importing_other_versions(tmp_path: Path) -> None:
    remember(torch_version="0.1")
    insum("cache", "export", str(tmp_path / "old.json"))
    insum("cache", "clear")
    assert "0 entries taken over, 1 of other versions left out" in insum(
        "cache", "import", str(tmp_path / "old.json")
    )
    assert "1 entries taken over" in insum(
        "cache", "import", "--any-version", str(tmp_path / "old.json")
    )


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 1, "entries": [{}]}'])
def test_importing_what_is_no_export(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    insum("cache", "import", str(tmp_path / "other.json"), code=1)
    insum("cache", "import", str(tmp_path / "missing.json"), code=1)


def test_doctor_says_what_is_usable_and_why() -> None:
    text = insum("doctor")
    assert all(
        word in text
        for word in ("torch", "triton", "GPU", "cache folder", "interpreter", "numpy", "scipy")
    )
    findings = {one.what: one for one in doctor.report()}
    assert findings["torch"].why == torch.__version__
    assert all(one.why for one in findings.values())
    if not torch.cuda.is_available():
        assert not findings["GPU"].usable and "graphs of torch operations" in findings["GPU"].why


def test_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    assert {one.what for one in doctor.report() if "not installed" in one.why} >= set(
        doctor.OPTIONAL
    )


def test_explain_shows_plan_model_and_kernel() -> None:
    shapes = ["AM=100:int32<64", "AK=100:int32<64", "AV=100,32,32:float16", "B=64,32,256:float16"]
    text = insum(
        "explain",
        "C[AM[p],m,n] = AV[p,m,k] * B[AK[p],k,n]",
        *[a for s in shapes for a in ("--shape", s)],
        "--size",
        "0=64",
    )
    assert all(
        word in text
        for word in ("strategy", "segment", "model", "µs", "HBM", "config", "@triton.jit", "tl.dot")
    )


def test_explain_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    insum("explain", "y[i] = A[i,j] * x[j]", "--shape", "A=3,4", "--shape", "x=5", code=1)
    insum("explain", "y[i] = A[i", "--shape", "A=3", code=1)
    insum("explain", "y[i] = A[i]", "--shape", "A=3:float99", code=1)
    text = insum("explain", "y[i] = A[i]", "--shape", "A=3:complex64")
    assert "no fused kernel" in text


def test_explain_for_other_gpus() -> None:
    text = insum("explain", "y[i] = A[i,j] * x[j]", "--shape", "A=64,64:float16", "--shape",
                 "x=64:float16", "--gpu", "sm_80")  # fmt: skip
    assert "@triton.jit" in text
    insum("explain", "y[i] = A[i]", "--shape", "A=3", "--gpu", "hopper", code=1)


def test_the_version() -> None:
    import insum as package

    assert insum("--version").strip() == f"insum {package.__version__}"
    assert metadata_version() == package.__version__


def metadata_version() -> str:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    return text.partition('version = "')[2].partition('"')[0]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize("module", ["insum", "insum.cli"])
def test_python_m(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["insum", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("insum 0.")


DESCRIBED = [
    ("A=3,4", (3, 4), torch.float32),
    ("b=:float64", (), torch.float64),
    ("I=2,2:int64<4", (2, 2), torch.int64),
]


@pytest.mark.parametrize(("text", "shape", "dtype"), DESCRIBED)
def test_described_tensors(text: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    name, tensor = cli.tensor_of(text)
    assert name == text[0] and tuple(tensor.shape) == shape and tensor.dtype == dtype


def test_the_demo_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import insum.demo

    seen: list[Any] = []
    monkeypatch.setattr(insum.demo, "main", lambda arguments: seen.append(arguments) or 0)
    globals()["insum"]("demo", "--anything", "3")
    assert seen == [["--anything", "3"]]


def test_the_help_names_everything_that_is_measured() -> None:
    from insum.bench import main

    callbacks = [command.callback for command in cli.application().registered_commands]
    (told,) = [one.__doc__ or "" for one in callbacks if one and one.__name__ == "bench"]
    assert not [name for name in (*main.BENCHMARKS, *main.MORE, *main.STUDIES) if name not in told]


def test_bench_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import insum.bench.main

    seen: list[Any] = []
    monkeypatch.setattr(insum.bench.main, "main", lambda arguments: seen.append(arguments) or 2)
    globals()["insum"]("bench", "spmm", "--quick", "--help", code=2)
    assert seen == [["spmm", "--quick", "--help"]]


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_a_missing_package_gives_a_clear_message(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["explain", "y[i] = x[i]"])
    told = capsys.readouterr().err
    assert ended.value.code == 1 and "insum[cli]" in told and missing in told


def test_what_is_here_is_told_without_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    for command, words in (("--version", ["insum 0."]), ("doctor", ["torch", "GPU", "typer"])):
        with pytest.raises(SystemExit) as ended:
            cli.main([command])
        told = capsys.readouterr().out
        assert ended.value.code == 0 and all(word in told for word in words)
