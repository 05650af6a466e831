"""Studies of `insum bench` on the CPU, small: each runs, is right, and leaves a record."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import insum
from insum.bench import (
    batches,
    compare,
    data,
    first_process,
    formats,
    fusion,
    machine,
    measure,
    memory,
    models,
    overhead,
    programs,
    tuning,
    unet,
)
from insum.bench.main import STUDIES, main, parser, store, study_of
from insum.bench.records import Row, Section
from insum.bench.study import Study
from insum.errors import BenchError
from insum.lang.bind import bind
from insum.lang.parser import parse
from insum.runtime import search

ABOUT = {"command", "date", "device", "versions"}
CPU = torch.device("cpu")


def record_of(tmp_path: Path, name: str, *more: str, status: int = 0) -> dict[str, Any]:
    given = [name, *more, "--quick", "--device", "cpu", "--data", "", "--out", str(tmp_path)]
    assert main(given) == status
    record: dict[str, Any] = json.loads((tmp_path / f"{name.replace('-', '_')}.json").read_text())
    assert set(record) >= ABOUT
    assert record["command"].startswith(f"insum bench {name}")
    return record


def test_every_study_has_its_own_options() -> None:
    for name in STUDIES:
        assert parser(name).parse_args([name]).what == name
    assert parser("cpu").parse_args(["cpu", "--threads", "2"]).threads == 2
    with pytest.raises(SystemExit):
        parser("fresh").parse_args(["fresh", "--threads", "2"])


def test_folders_are_for_those_that_take_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overhead", "somewhere"]) == 2
    assert "somewhere was given to a benchmark" in capsys.readouterr().out


def test_parts_that_are_not_there() -> None:
    assert main(["cpu", "--only", "nothing", "--device", "cpu"]) == 2


def test_cpu(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    record = record_of(tmp_path, "cpu", "--turns", "2", "--only", "spmm,tensor-product")
    assert torch.get_num_threads() == threads
    assert record["turns"] == 2 and record["threads"] == 1
    assert {row["application"] for row in record["rows"]} <= {"SpMM", "tensor product"}
    assert all(row["insum_ms"] > 0 and row["error"] < 1e-5 for row in record["rows"])


def test_overhead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "WARM", 2)
    monkeypatch.setattr(overhead, "PROFILED", 2)
    record = record_of(tmp_path, "overhead", "--profile")
    assert set(record["microseconds"]) == set(overhead.on_cpu())
    assert all(taken > 0 for taken in record["microseconds"].values())


def test_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "SECONDS", 0.0)
    record = record_of(tmp_path, "formats", "--only", "cora")
    (row,) = record["graphs"]
    assert row["graph"] == "cora" and row["milliseconds"]["insum GroupCOO"] > 0
    assert record["group_size"]["best"] >= 1


def test_another_matrix_is_told_from_the_same() -> None:
    csr = formats.csr_of(data.graph("cora", None, CPU))
    made = formats.GroupCOO.from_torch(csr)
    assert formats.is_same(csr, made) and not formats.is_same(csr * 2, made)


def test_memory_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "--device", "cpu"]) == 2
    assert "expected: a GPU" in capsys.readouterr().out


def test_what_memory_measures_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Binding reads no numbers, and they are many: none are drawn."""
    undrawn = lambda self, *shape, scale=1.0: torch.empty(shape, dtype=self.dtype)
    monkeypatch.setattr(data.RandomTensors, "normal", undrawn)
    for case in (
        memory.block_spmm(CPU),
        memory.spmm(data.graph("cora", None, CPU)),
        memory.convolution(data.cloud("pc-pcl-room_scan1", None, CPU, 100)),
        memory.tensor_product(CPU),
    ):
        bind(parse(case.statement), case.values, **case.options)
        assert set(case.leaves) < set(case.values)


def test_unet(tmp_path: Path) -> None:
    record = record_of(tmp_path, "unet", "--dtypes", "fp32")
    one, both = record["rows"]
    assert (one["direction"], both["direction"]) == ("forward", "forward+backward")
    assert one["error"] < 1e-5 and one["steady_ms"] > 0 and both["fresh_ms"] > 0
    assert {m["name"] for m in record["missing"]} == {"FlexGEMM", "spconv", "WarpConvNet"}
    again = record_of(tmp_path, "unet", "--dtypes", "fp32")
    assert again["rows"] == record["rows"], "what the record has is not measured again"


def flexgemm_on_a_cpu(asked: list[torch.Size]) -> SimpleNamespace:
    """FlexGEMM's call with its arguments and what it insists on, of which nothing is left but the
    centre of the kernel.
    """

    def sparse_submanifold_conv3d(
        feats: Tensor,
        coords: Tensor,
        shape: torch.Size,
        weight: Tensor,
        bias: Tensor,
        neighbor_cache: object = None,
        dilation: tuple[int, ...] = (1, 1, 1),
    ) -> tuple[Tensor, object]:
        assert coords.dtype is torch.int32 and coords.is_contiguous() and feats.is_contiguous()
        assert weight.shape[-1] == feats.shape[1] and weight.dtype is feats.dtype is bias.dtype
        extents = torch.tensor([shape[0], *shape[2:]])
        assert bool(((coords >= 0) & (coords < extents)).all())
        asked.append(shape)
        return feats @ weight[:, 1, 1, 1].t() + bias, neighbor_cache or "cache"

    algorithm = SimpleNamespace(MASKED_IMPLICIT_GEMM="masked")
    return SimpleNamespace(
        sparse_submanifold_conv3d=sparse_submanifold_conv3d,
        Algorithm=algorithm,
        set_algorithm=lambda name: None,
    )


@pytest.mark.parametrize("narrow", [False, True])
def test_unet_of_flexgemm(narrow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.Size] = []
    monkeypatch.setattr(unet, "module", lambda name: flexgemm_on_a_cpu(asked))
    base = data.cloud("pc-pcl-room_scan1", None, CPU, 60)
    dtype = torch.float16 if narrow else torch.float32
    case = unet.UNetCase("a scene", base - base.amin(0), 2, dtype)
    network = unet.FlexGemmUNet(unet.CHANNELS, unet.CLASSES, **unet.NARROW)
    theirs = unet.UNetContender("FlexGEMM", network, unet._ours)
    (row,) = unet.measured(case, [theirs], "forward+backward", 1)
    assert row.steady_ms > 0 and row.fresh_ms > 0 and asked
    assert all(p.grad is not None for p in network.parameters())


def test_a_rival_of_the_unet_that_fails_is_told_of_and_hides_nobody() -> None:
    base = data.cloud("pc-pcl-room_scan1", None, CPU, 60)
    case = unet.UNetCase("a scene", base - base.amin(0), 1, torch.float32)

    def refused(*_: object) -> object:
        raise ValueError("no voxels for me\nand more of that")

    every = list(unet.contenders(CPU, lambda name: True))
    every.append(unet.UNetContender("theirs", torch.nn.Identity(), refused))
    ours, theirs = unet.measured(case, every, "forward", 1)
    assert ours.steady_ms > 0 and ours.error is not None and ours.error < 1e-5
    assert theirs.failed == "ValueError: no voxels for me"
    assert unet._cells(theirs)[5] == theirs.failed


def test_unet_of_a_scene_too_wide_for_rivals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unet, "EXTENT", unet.MOVED + 1)
    given = ["unet", "--quick", "--device", "cpu", "--data", "", "--out", str(tmp_path)]
    with pytest.raises(BenchError, match="is wider than 1 voxels"):
        unet.run(study_of(parser("unet").parse_args(given), given))


class TinyPotential(torch.nn.Module):
    """A model of a package: energies by e3nn's product along edges."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        o3 = pytest.importorskip("e3nn.o3", reason="e3nn is not installed: no layer to swap")
        self.product = o3.FullyConnectedTensorProduct("0e+1o", "0e+1o", "0e").to(dtype)

    def forward(self, at: Tensor, ends: Tensor) -> Tensor:
        apart = at[ends[1]] - at[ends[0]]
        y = torch.cat([apart.norm(dim=1, keepdim=True), apart], 1)
        energy: Tensor = self.product(y, y).sum()
        return energy


def tiny_results(model: Any, given: Any, training: bool) -> tuple[Tensor, Tensor, Tensor]:
    energy = model(given["at"], given["edge_index"])
    (forces,) = torch.autograd.grad(energy, given["at"], create_graph=training)
    return energy, forces, forces.T @ given["at"]


TINY = models.Package(
    *("tiny", ("torch",), lambda dtype, small: TinyPotential(dtype)),
    lambda atoms: {"at": atoms.positions.requires_grad_(), "edge_index": atoms.edge_index},
    *(tiny_results, False),
)


def test_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = models.Package("absent", ("no_such_package",), *[None] * 3, False)  # type: ignore[arg-type]
    monkeypatch.setattr(models, "PACKAGES", {"tiny": TINY, "absent": absent})
    record = record_of(tmp_path, "models")
    rows = {(row["contender"], row["step"]): row for row in record["rows"]}
    assert set(rows) == {(who, s) for who in ("tiny", "insum") for s in ("training", "evaluation")}
    assert rows["insum", "training"]["error"] < models.TOLERANCE
    assert all(row["ms"] > 0 and not row["failed"] for row in rows.values())
    assert "No module named 'no_such_package'" in capsys.readouterr().out
    assert torch.get_default_dtype() == torch.float32


def test_batches_are_not_alike() -> None:
    one, other = models.drawn(2, 3, 0), models.drawn(2, 3, 1)
    assert one.edge_index.shape != other.edge_index.shape
    for atoms in (one, other):
        src, dst = atoms.edge_index
        assert torch.equal(atoms.structure[src], atoms.structure[dst])
        far = (atoms.positions[src] - atoms.positions[dst]).norm(dim=1)
        assert far.min() > 0 and far.max() < models.CUTOFF


def test_voxels(tmp_path: Path) -> None:
    record = record_of(tmp_path, "voxels")
    assert {row["layer"] for row in record["layers"]} >= {"depthwise 3", "largest 2 / 2"}
    assert all(row["us"] > 0 and row["pairs"] > 0 for row in record["layers"])
    assert [row["order"] for row in record["maps"]] == ["as scanned", "shuffled"]


def test_first_call(tmp_path: Path) -> None:
    record = record_of(tmp_path, "first-call", "--only", "spmm", "--repeat", "1")
    cold, warm = record["rows"]
    assert (cold["kind"], warm["kind"]) == ("cold", "warm")
    for row in (cold, warm):
        counted = row["import insum"] + row["convert"] + row["first call"]
        assert row["total"] == pytest.approx(counted)


@pytest.mark.parametrize("name", ["spmm", "tensor-product"])
def test_what_a_first_call_computes_is_what_its_rival_does(name: str) -> None:
    torch.manual_seed(0)
    given = first_process.OPERANDS[name]("cpu", torch.float32)
    want = first_process.BY_HAND[name](given)()
    got = first_process.called(name, first_process.converted(name, given))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


class Done:
    """A process that has run."""

    def wait(self) -> int:
        return 0


def test_two_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([9.0, 9.0, 3.0, 2.0, 2.0, 4.0])  # warm, then old and new in each of two rounds

    def started(source: Path, case: str, study: Study, out: Path) -> Done:
        rows = [
            Row("spmm", "cora", "float32", "forward", "insum", "ok", next(times)),
            Row("spmm", "cora", "float32", "forward", "rival", "ok", 1.0),
        ]
        about = {**machine.about("", CPU), "limits": {}, "data": "", "quick": True}
        store([Section("spmm", "SpMM", "", "", **about, rows=rows)], out)
        return Done()

    monkeypatch.setattr(compare, "started", started)
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    folders = [str(tmp_path / name) for name in ("old", "new")]
    (row,) = record_of(tmp_path, "compare", *folders, "--only", "spmm")["rows"]
    assert (row["contender"], row["old_ms"], row["new_ms"]) == ("insum", 2.0, 2.0)


@pytest.mark.parametrize("folders", [(), ("not-there", "nor-this")])
def test_two_versions_need_two_folders(folders: tuple[str, ...]) -> None:
    assert main(["compare", *folders, "--device", "cpu"]) == 2


def test_searches_are_watched_and_their_caches_are_their_own() -> None:
    before, usual = os.environ.get("INSUM_CACHE_DIR"), search.EFFORTS["quick"]
    with tuning.empty_cache(), tuning.limited("quick", 3, 1.5), tuning.watched() as found:
        assert os.environ["INSUM_CACHE_DIR"] != before
        assert search.EFFORTS["quick"] == search.Effort(3, usual.refine, 1.5)
        insum.tune("y[i] = A[i,j] * x[j]", A=torch.ones(2, 3), x=torch.ones(3))
    assert len(found) == 1 and search.EFFORTS["quick"] == usual
    assert os.environ.get("INSUM_CACHE_DIR") == before
    assert tuning._told(found[0])["ratio"] == 1.0
    assert tuning.summary([], "quick") == "nothing was tuned"


def test_tuning_takes_the_forward_cases_of_all_applications() -> None:
    asked = parser("tuning").parse_args(["tuning", "--quick", "--device", "cpu", "--data", ""])
    study = study_of(asked, ["tuning"])
    found = [(name, case) for name, case in tuning.cases(study)]
    assert {name for name, _ in found} == set(tuning.APPLICATIONS)
    assert {case.direction for _, case in found} == {"forward"}
    # on a CPU there is no kernel to search for; what is run is right all the same
    ((name, case),) = [one for one in found if one[0] == "tensor-product"][:1]
    assert list(tuning.tuned(name, case, "quick")) == []


@pytest.mark.parametrize("more", [(), ("--fresh", "--breaks")])
def test_fusion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]) -> None:
    keep = {"insum.fuse": "always", "insum.rest": "eager"}  # TorchInductor takes a minute
    quick = lambda model, fuse: {
        "eager": model,
        "torch.compile": torch.compile(model, backend="eager"),
        "insum": torch.compile(model, backend="insum", options=keep),
    }
    monkeypatch.setattr(fusion, "ways", quick)
    monkeypatch.setattr(programs, "SMALL_CLOUD", 30)
    record = record_of(tmp_path, "fusion", "--only", "convolution", "--columns", "4", *more)
    (row,) = record["rows"]
    assert row["program"] == "convolution" and row["insum"]["error"] < 1e-5
    assert bool(row["insum"]["fused"]) and "failed" not in row
    for way in ("eager", "torch.compile", "insum"):
        assert row[way]["both_row_ms"] > 0 and row[way]["forward_ms"] > 0


def test_a_program_that_fails_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*arguments: object) -> torch.Tensor:
        raise ValueError("not today")

    ways = {"torch.compile": refuses, "insum": refuses}
    monkeypatch.setattr(fusion, "ways", lambda model, fuse: {"eager": model, **ways})
    monkeypatch.setattr(programs, "SMALL_CLOUD", 30)
    (row,) = record_of(tmp_path, "fusion", "--only", "convolution", "--columns", "4")["rows"]
    assert row["failed"] == "ValueError: not today (and so does torch.compile alone)"
    assert row["eager"]["error"] < 1e-5


def test_what_fails_while_it_is_measured_costs_no_other_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails_once(*arguments: object) -> None:
        monkeypatch.setattr(fusion, "measure_quietly", lambda way, program, study: None)
        raise RuntimeError("no graph")

    plain = lambda model, fuse: dict.fromkeys(("eager", "torch.compile", "insum"), model)
    monkeypatch.setattr(fusion, "ways", plain)
    monkeypatch.setattr(fusion, "measure_quietly", fails_once)
    monkeypatch.setattr(programs, "SMALL_CLOUD", 30)
    monkeypatch.setattr(fusion, "_lines", lambda row: [])  # of bytes that nobody measured
    monkeypatch.setattr(fusion, "told", lambda rows: [])
    given = ("--only", "convolution", "--columns", "4", "--skip", "eager")
    (row,) = record_of(tmp_path, "fusion", *given)["rows"]
    assert "eager" not in row and row["torch.compile"]["failed"] == "RuntimeError: no graph"
    assert row["insum"]["both_row_ms"] > 0 and not fusion.is_compared(row)


def test_a_program_that_cannot_be_made_is_a_row_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")

    monkeypatch.setattr(fusion, "made", broken)
    (row,) = record_of(tmp_path, "fusion", "--only", "convolution", status=1)["rows"]
    assert row["failed"].startswith("RuntimeError: Offset increment") and fusion.told([row]) == []


def test_fusion_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = lambda model, fuse: dict.fromkeys(("eager", "torch.compile", "insum"), model)
    monkeypatch.setattr(fusion, "ways", plain)
    monkeypatch.setattr(programs, "SMALL_CLOUD", 30)
    monkeypatch.setitem(measure.SECONDS, "cpu", 0.001)
    given = ("--only", "convolution", "--columns", "4", "--dtypes")
    (first,) = record_of(tmp_path, "fusion", *given, "fp32")["rows"]
    rows = record_of(tmp_path, "fusion", *given, "fp32,bf16")["rows"]
    assert rows[0] == first and [row["dtype"] for row in rows] == ["float32", "bfloat16"]
    lines = fusion.told(rows)
    assert any(line.startswith("both row_ms: median") for line in lines)


def test_training_on_sampled_neighbourhoods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch_geometric")
    plain = lambda model, fuse: dict.fromkeys(("eager", "torch.compile", "insum"), model)
    monkeypatch.setattr(batches, "ways", plain)
    monkeypatch.setattr(batches, "WARM_STEPS", 2)
    given = ("--batches", "--steps", "2", "--columns", "8", "--only", "SAGEConv")
    (row,) = record_of(tmp_path, "fusion", *given)["rows"]
    assert row["ways"]["insum"]["error"] == 0 and row["ways"]["eager"]["step_ms"] > 0


def test_neighbourhoods_are_of_the_graph() -> None:
    pointers, columns = torch.tensor([0, 3, 3, 5]), torch.tensor([0, 1, 2, 0, 1])
    graph = data.CsrPattern("small", pointers, columns, (3, 3))
    draw = torch.Generator().manual_seed(0)
    batch = batches.sampled(graph, torch.tensor([2]), (1, 2), draw)
    source, target = batch.nodes[batch.edges]
    assert batch.nodes[0] == 2 and (batch.edges[1].diff() >= 0).all()
    there = {(2, 0), (2, 1), (0, 0), (0, 1), (0, 2)}
    assert set(zip(target.tolist(), source.tolist(), strict=True)) <= there
    assert (batch.edges[1] == 0).sum() == 1  # as many as were asked for


def test_distributed_keeps_the_parts_of_earlier_runs(tmp_path: Path) -> None:
    """Rows that travel are counted, calls timed, and a model says that it is one."""
    few = record_of(tmp_path, "distributed", "--only", "volume", "--ranks", "2")["parts"]
    given = {(row["order"], row["send"]): row["share"] for row in few["volume"]["rows"]}
    assert all(given[order, "fewest"] <= given[order, "rows"] <= 1 for order in ("given", "rcm"))
    more = record_of(tmp_path, "distributed", "--only", "host,model", "--ranks", "2")["parts"]
    assert more["volume"] == few["volume"]
    assert [row["call"] for row in more["host"]["rows"]] == ["forward", "forward and backward"]
    assert [row["ranks"] for row in more["model"]["rows"]] == [1, 2]
    assert more["model"]["rows"][0]["speedup"] == 1
