"""Contenders of the four applications, ours and the rivals that can be installed, against the
float64 references; stand-ins and their statistics.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from insum.bench import block_spmm, conv, data, rivals, spmm, tensor_product
from insum.bench.measure import Contender, relative_error
from insum.bench.options import BenchOptions
from insum.bench.records import BOTH, FORWARD
from insum.compat import sparse

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


MODULES: dict[str, Any] = {
    "block-spmm": block_spmm,
    "spmm": spmm,
    "conv": conv,
    "tensor-product": tensor_product,
}
#: Contenders that this torch on this machine may refuse, which is a result and no mistake.
MAY_FAIL = ("torch.sparse BSR",)


@pytest.mark.parametrize("direction", [FORWARD, BOTH])
@pytest.mark.parametrize("name", MODULES)
def test_every_quick_contender_agrees_with_the_reference(name: str, direction: str) -> None:
    given, module = inputs(name), MODULES[name]
    want = module.want(given, direction)
    found: list[Contender] = [
        c for c in module.contenders(given, direction) if not c.slow and c.name not in MAY_FAIL
    ]
    # its other rivals need a GPU, or a while
    alone = name == "tensor-product" and importlib.util.find_spec("e3nn") is None
    assert (
        len(found) >= (1 if alone else 2)
        and found[0].name.startswith("insum")
        and found[0].lines == 1
    )
    for contender in found:
        ready = contender.make()
        assert relative_error(ready.canonical(ready.run()), want) < 1e-5, contender.name


@pytest.mark.parametrize("name", MODULES)
def test_the_program_for_torch_compile_is_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    given, module = inputs(name), MODULES[name]
    for native in (None, False, True):
        ready = module.compiled(given, native)
        assert relative_error(ready.canonical(ready.run()), module.want(given, FORWARD)) < 1e-5
        assert ("torch operations" if native is None else f"native_matmul={native}") in ready.note


@pytest.mark.parametrize("direction", [FORWARD, BOTH])
def test_a_library_that_numbers_offsets_in_its_own_way(direction: str) -> None:
    """The first axis fastest and from the far end, weights as (out, 3, 3, 3, in): found out, and
    gradients brought back.
    """
    given = inputs("conv")
    lists = given.lists()
    numbers = torch.arange(27).reshape(3, 3, 3).permute(2, 1, 0).reshape(-1).flip(0)

    def call(x: Tensor, w: Tensor) -> Tensor:
        flat, out = conv._channels_last(w), torch.zeros(len(x), w.shape[0])
        for position, z in enumerate(numbers.tolist()):
            here, there = lists[z]
            out = out.index_add(0, here, x[there] @ flat[position])
        return out

    library = conv.Library(
        call,
        lambda w: w.permute(2, 0, 1).reshape(w.shape[2], 3, 3, 3, w.shape[1]),
        conv._channels_last,
    )
    ready = conv.from_library(library, given, direction)
    assert relative_error(ready.canonical(ready.run()), conv.want(given, direction)) < 1e-5
    with pytest.raises(RuntimeError, match="no order of the offsets"):
        conv.from_library(
            conv.Library(lambda x, w: x * 0, library.theirs, library.back), given, direction
        )


@pytest.fixture
def bsr_kernels(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands for PyTorch's Triton kernels, which need a GPU; the search over parameters is
    PyTorch's own.
    """

    def mm(
        blank: Tensor, bsr: Tensor, b: Tensor, *, beta: float, alpha: float, meta: Any
    ) -> Tensor:
        assert (beta, alpha) == (0, 1) and blank.shape == b.shape
        return bsr.to_dense() @ b

    def sampled(bsr: Tensor, a: Tensor, b: Tensor, *, beta: float) -> Tensor:
        return (a @ b * (bsr.to_dense() != 0)).to_sparse_bsr((block_spmm.BLOCK, block_spmm.BLOCK))

    found = sparse.bsr_kernels()
    assert not isinstance(found, str), found
    kernels = SimpleNamespace(mm=mm, sampled=sampled, minimize=found.minimize)
    monkeypatch.setattr(sparse, "bsr_kernels", lambda: kernels)
    return kernels


@pytest.mark.parametrize("direction", [FORWARD, BOTH])
def test_torch_bsr_forward_and_backward(bsr_kernels: SimpleNamespace, direction: str) -> None:
    given = inputs("block-spmm")
    ready = block_spmm.torch_bsr(given, direction, tuned=False)
    assert relative_error(ready.canonical(ready.run()), block_spmm.want(given, direction)) < 1e-5


def test_torch_bsr_is_tuned_by_pytorchs_search(
    bsr_kernels: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fastest parameters, by a clock that likes 2 stages and SPLIT_N 1, are found and used."""
    tried: list[dict[str, int]] = []

    def mm(blank: Tensor, bsr: Tensor, b: Tensor, *, meta: dict[str, int], **_: Any) -> Tensor:
        tried.append(meta)
        return bsr.to_dense() @ b

    def timer(device: torch.device) -> Callable[[Callable[[], object], int], float]:
        def microseconds(run: Callable[[], object], repeat: int) -> float:
            run()
            return 10.0 + abs(tried[-1]["num_stages"] - 2) + tried[-1]["SPLIT_N"]

        return microseconds

    bsr_kernels.mm = mm
    monkeypatch.setattr(block_spmm.timing, "replay_timer", timer)
    ready = block_spmm.torch_bsr(inputs("block-spmm"), FORWARD, tuned=True)
    ready.run()
    assert (tried[-1]["num_stages"], tried[-1]["SPLIT_N"]) == (
        2,
        1,
    ) and "num_stages 2" in ready.note


def test_the_reference_of_the_product_is_e3nns() -> None:
    if importlib.util.find_spec("e3nn") is None:
        pytest.skip("e3nn is not installed: the comparison with e3nn is left out")
    given = inputs("tensor-product")
    ready = tensor_product.e3nn(given, BOTH)
    assert relative_error(ready.canonical(ready.run()), tensor_product.want(given, BOTH)) < 1e-6


@pytest.mark.parametrize("direction", [FORWARD, BOTH])
def test_the_product_in_e3nns_layout(direction: str) -> None:
    given = inputs("tensor-product")
    ready = tensor_product.ours_as_e3nn(given, direction)
    assert (
        relative_error(ready.canonical(ready.run()), tensor_product.want(given, direction)) < 1e-6
    )


def test_work_counts_what_has_to_be_done() -> None:
    block = inputs("block-spmm")
    assert (
        block.work(FORWARD).flops == 2 * block.blocks * 32 * 32 * 96
        and block.work(BOTH).flops == 3 * block.work(FORWARD).flops
    )
    graph = inputs("spmm")
    assert graph.work(FORWARD).flops == 2 * graph.graph.nonzeros * 8
    cloud = inputs("conv")
    assert cloud.work(FORWARD).flops == 2 * cloud.pairs() * 8 * 8
    product = inputs("tensor-product")
    # degree 1: paths (0,0,0), (0,1,1), (1,0,1), (1,1,0), by components of the first factor
    rows = {1: 1 + 1 + 3 + 3, 2: 0}
    small = tensor_product.inputs(1, 4, 30, torch.float32, CPU)
    assert (
        small.work(FORWARD).flops == 2 * 30 * rows[1] * 16
        and product.work(FORWARD).bytes > small.work(FORWARD).bytes
    )


@pytest.mark.parametrize("name", ["cora", "pubmed", "c-46", "kim1"])
def test_made_graphs_have_the_statistics(name: str) -> None:
    made, (rows, nonzeros, longest) = data.made_graph(name, CPU), data.STAND_INS[name]
    lengths = made.indptr.diff()
    assert (
        made.shape == (rows, rows)
        and abs(made.nonzeros / nonzeros - 1) < 0.2
        and int(lengths.max()) <= longest
    )
    assert int(made.indices.max()) < rows and bool(
        (made.rows().bincount(minlength=rows) == lengths).all()
    )
    again = data.made_graph(name, CPU)
    assert torch.equal(again.indices, made.indices)


@pytest.mark.parametrize("name", data.CLOUD_STAND_INS)
def test_made_clouds_have_the_statistics(name: str) -> None:
    voxels, (count, neighbours) = data.made_cloud(name, CPU), data.CLOUD_STAND_INS[name]
    table = data.neighbour_table(voxels)
    mean = float((table >= 0).sum()) / len(voxels)
    assert (
        table.shape == (27, len(voxels))
        and abs(len(voxels) / count - 1) < 0.1
        and abs(mean - neighbours) < 2.0
    )
    assert torch.equal(table[13], torch.arange(len(voxels), dtype=table.dtype))


def test_small_graphs_come_first() -> None:
    names = data.graph_names(None)
    assert names[0] == "citeseer" and names[-1] == "COLLAB" and len(names) == 13


@pytest.mark.parametrize("name", MODULES)
def test_cases_shrink_on_a_cpu_and_with_quick(name: str) -> None:
    sizes = []
    for quick in (True, False):
        cases: Callable[[BenchOptions], Any] = MODULES[name].cases
        sizes.append(
            sum(1 for _ in cases(BenchOptions(CPU, quick=quick, directions=(FORWARD,))))
            if name != "spmm" or quick
            else 4
        )
    assert 0 < sizes[0] <= sizes[1]


def test_rivals_have_a_reason_or_are_there() -> None:
    for found in rivals.RIVALS.values():
        for rival in found:
            assert isinstance(rival.absent(CPU), str)
    assert (
        rivals.why_not("a_package_that_is_not")
        == "ModuleNotFoundError: No module named 'a_package_that_is_not'"
    )
