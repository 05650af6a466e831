"""The example scripts run at a small size, learn something, and say what they measured."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
#: Few steps of small models; the defaults of each script stay below a minute on a CPU.
SMALL = {
    "gcn": "--nodes 300 --epochs 15",
    "pruned_mlp": "--width 64 --block 8 --steps 20",
    "tensor_parallel_mlp": "--width 32 --block 4 --steps 3",
    "sparse_unet": "--points 2000 --width 4 --steps 5",
    "minkunet": "--points 3000 --radius 1 --width 2 --batch 1 --steps 3 --voxel 0.2",
    "second": "--points 2000 --side 16 --voxel 0.5 --width 2 --cars 3 --steps 6",
    "molecular_dynamics": "--side 2 --channels 2 --lmax 1 --steps 6",
    "equivariant_forces": "--clusters 3 --atoms 3 --channels 4 --steps 8",
}

pytestmark = pytest.mark.skipif(
    not EXAMPLES.is_dir(), reason="there is no folder of examples beside the tests"
)


def run(
    name: str, options: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *options.split(), "--device", "cpu"])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize("name", SMALL)
def test_example(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = run(name, SMALL[name], monkeypatch, capsys)
    losses = [float(number) for number in re.findall(r"loss (\d+\.\d+)", text)]
    assert not losses or losses[-1] < losses[0]
    assert losses or "fine-tuned: accuracy" in text or "drift" in text
    assert re.search(r"insum \d+\.\d+ ms", text)
    for number in re.findall(
        r"(?:difference from [\w ]+|differ by|forces by):? (\d\.\de[+-]\d\d)", text
    ):
        assert float(number) < 1e-4


def test_every_example_is_run() -> None:
    elsewhere = {"timing", "full_graph_gnn"}  # the latter on several ranks, in tests/distributed
    assert {path.stem for path in EXAMPLES.glob("*.py")} - elsewhere == set(SMALL)


def test_the_gcn_reads_a_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import numpy as np

    np.savez(
        tmp_path / "ring.npz",
        indptr=np.arange(0, 42, 2),
        indices=np.array([[(i + 1) % 20, (i - 1) % 20] for i in range(20)]).reshape(-1),
        shape=np.array([20, 20]),
    )
    assert "20 nodes, 40 edges" in run(
        "gcn", f"--data {tmp_path} --graph ring --epochs 2", monkeypatch, capsys
    )
