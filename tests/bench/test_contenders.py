"""Contenders of the four applications, ours and the rivals that can be installed, against the float64 references; stand-ins and their statistics."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch

from insum.bench import block_spmm, conv, data, rivals, routes, spmm, tensor_product
from insum.bench.measure import Contender, relative_error
from insum.bench.options import Options
from insum.bench.records import BOTH, FORWARD

CPU = torch.device("cpu")


def inputs(name: str) -> Any:
    match name:
        case "block-spmm":
            return block_spmm.inputs(96, 0.5, torch.float32, CPU)
        case "spmm":
            return spmm.inputs(data.made_graph("citeseer", CPU), 8, torch.float32)
        case "conv":
            return conv.inputs(data.cloud("pc-pcl-room_scan1", None, CPU, 200), 8, torch.float32)
    return tensor_product.inputs(2, 4, 30, torch.float32, CPU)


MODULES: dict[str, Any] = {"block-spmm": block_spmm, "spmm": spmm, "conv": conv, "tensor-product": tensor_product}
#: Contenders that this torch on this machine may refuse, which is a result and no mistake.
MAY_FAIL = ("torch.sparse BSR",)


@pytest.mark.parametrize("direction", [FORWARD, BOTH])
@pytest.mark.parametrize("name", MODULES)
def test_every_quick_contender_agrees_with_the_reference(name: str, direction: str) -> None:
    given, module = inputs(name), MODULES[name]
    want = module.want(given, direction)
    found: list[Contender] = [c for c in module.contenders(given, direction) if not c.slow and c.name not in MAY_FAIL]
    assert len(found) >= 2 and found[0].name.startswith("insum") and found[0].lines == 1
    for contender in found:
        ready = contender.make()
        assert relative_error(ready.canonical(ready.run()), want) < 1e-5, contender.name


@pytest.mark.parametrize("name", MODULES)
def test_the_program_for_torch_compile_is_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(routes, "has_inductor", lambda: False)
    given, module = inputs(name), MODULES[name]
    ready = module.compiled(given)
    assert relative_error(ready.canonical(ready.run()), module.want(given, FORWARD)) < 1e-5 and "torch operations" in ready.note


def test_the_reference_of_the_product_is_e3nns() -> None:
    if importlib.util.find_spec("e3nn") is None:
        pytest.skip("e3nn is not installed: the comparison with e3nn is left out")
    given = inputs("tensor-product")
    ready = tensor_product.e3nn(given, BOTH)
    assert relative_error(ready.canonical(ready.run()), tensor_product.want(given, BOTH)) < 1e-6


def test_work_counts_what_has_to_be_done() -> None:
    block = inputs("block-spmm")
    assert block.work(FORWARD).flops == 2 * block.blocks * 32 * 32 * 96 and block.work(BOTH).flops == 3 * block.work(FORWARD).flops
    graph = inputs("spmm")
    assert graph.work(FORWARD).flops == 2 * graph.graph.nonzeros * 8
    cloud = inputs("conv")
    assert cloud.work(FORWARD).flops == 2 * cloud.pairs() * 8 * 8
    product = inputs("tensor-product")
    rows = {1: 1 + 1 + 3 + 3, 2: 0}  # degree 1: paths (0,0,0), (0,1,1), (1,0,1), (1,1,0), by components of the first factor
    small = tensor_product.inputs(1, 4, 30, torch.float32, CPU)
    assert small.work(FORWARD).flops == 2 * 30 * rows[1] * 16 and product.work(FORWARD).bytes > small.work(FORWARD).bytes


@pytest.mark.parametrize("name", ["cora", "pubmed", "c-46", "kim1"])
def test_made_graphs_have_the_statistics(name: str) -> None:
    made, (rows, nonzeros, longest) = data.made_graph(name, CPU), data.STAND_INS[name]
    lengths = made.indptr.diff()
    assert made.shape == (rows, rows) and abs(made.nonzeros / nonzeros - 1) < 0.2 and int(lengths.max()) <= longest
    assert int(made.indices.max()) < rows and bool((made.rows().bincount(minlength=rows) == lengths).all())
    again = data.made_graph(name, CPU)
    assert torch.equal(again.indices, made.indices)


@pytest.mark.parametrize("name", data.CLOUD_STAND_INS)
def test_made_clouds_have_the_statistics(name: str) -> None:
    voxels, (count, neighbours) = data.made_cloud(name, CPU), data.CLOUD_STAND_INS[name]
    table = data.neighbour_table(voxels)
    mean = float((table >= 0).sum()) / len(voxels)
    assert table.shape == (27, len(voxels)) and abs(len(voxels) / count - 1) < 0.1 and abs(mean - neighbours) < 2.0
    assert torch.equal(table[13], torch.arange(len(voxels), dtype=table.dtype))


def test_small_graphs_come_first() -> None:
    names = data.graph_names(None)
    assert names[0] == "citeseer" and names[-1] == "COLLAB" and len(names) == 13


@pytest.mark.parametrize("name", MODULES)
def test_cases_shrink_on_a_cpu_and_with_quick(name: str) -> None:
    sizes = []
    for quick in (True, False):
        cases: Callable[[Options], Any] = MODULES[name].cases
        sizes.append(sum(1 for _ in cases(Options(CPU, quick=quick, directions=(FORWARD,)))) if name != "spmm" or quick else 4)
    assert 0 < sizes[0] <= sizes[1]


def test_rivals_have_a_reason_or_are_there() -> None:
    for found in rivals.RIVALS.values():
        for rival in found:
            assert isinstance(rival.absent(CPU), str)
    assert rivals.why_not("a_package_that_is_not") == "ModuleNotFoundError: No module named 'a_package_that_is_not'"
