"""Sparse layers saved and loaded by everything that saves and loads models, exchanged in whole
models, and taken by modules that know of `nn.Linear` alone.

safetensors and transformers need not be installed; what needs them then says that it was skipped.
"""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader

import insum
from insum.formats import COO, GroupCOO, SparseParameter
from insum.nn import BlockSparseLinear, SparseLinear, layouts, restore, sparsify


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))


def sparse_mlp() -> nn.Sequential:
    model = mlp()
    sparsify(model, {"0": {"density": 0.25, "block_shape": 8}, "2": 0.2}, rows=8)
    return model


X = torch.randn(5, 32)


def changed(model: nn.Module, name: str, new: Any) -> dict[str, Any]:
    return {**model.state_dict(), name: new}


# --- files ---


def test_states_hold_tensors_alone_and_weights_only_loads_them(tmp_path: Path) -> None:
    model = sparse_mlp()
    assert all(isinstance(held, Tensor) for held in model.state_dict().values())
    torch.save(model.state_dict(), tmp_path / "m.pt")
    state = torch.load(tmp_path / "m.pt", weights_only=True)
    fresh = restore(mlp(1), state)
    fresh.load_state_dict(state)
    assert type(fresh[0]) is BlockSparseLinear and type(fresh[2]) is SparseLinear  # type: ignore[index]
    assert torch.equal(fresh(X), model(X))


def test_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    # index arrays that are views of one tensor, and shared by two layers
    edges = torch.tensor([[0, 1, 2], [2, 0, 1]], dtype=torch.int32)
    shared = COO(torch.ones(3), (edges[0], edges[1]), (3, 3))
    model = nn.Sequential(SparseLinear(shared), SparseLinear(shared))
    other = nn.Sequential(SparseLinear(COO.from_dense(torch.eye(3))), SparseLinear(shared))
    for one in (model, sparse_mlp()):
        safetensors.save_model(one, str(tmp_path / "m.safetensors"))
        state = safetensors.load_file(str(tmp_path / "m.safetensors"))
        fresh = restore(mlp(1) if one is not model else other, state)
        assert safetensors.load_model(fresh, str(tmp_path / "m.safetensors")) == (set(), [])
        x = X if one is not model else X[:, :3]
        assert torch.equal(fresh(x), one(x))


def test_distributed_checkpoint(tmp_path: Path) -> None:
    checkpoint: Any = pytest.importorskip("torch.distributed.checkpoint")
    model, fresh = sparse_mlp(), copy.deepcopy(sparse_mlp())
    for parameter in fresh.parameters():
        nn.init.zeros_(parameter)
    with pytest.warns(UserWarning, match="single process"):
        checkpoint.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "c")
        state = {"model": fresh.state_dict()}
        checkpoint.load(state, checkpoint_id=tmp_path / "c")  # into our own arrays
    assert torch.equal(fresh(X), model(X))
    fresh.load_state_dict(state["model"])
    assert torch.equal(fresh(X), model(X))


class Columns(torch.utils.data.Dataset[GroupCOO]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> GroupCOO:
        return GroupCOO.from_dense(torch.eye(4) * (number + 1))


def first(batch: list[GroupCOO]) -> GroupCOO:
    return batch[0]


def test_workers_hand_formats_over() -> None:
    loader = DataLoader(Columns(), batch_size=1, num_workers=1, collate_fn=first)
    assert [a.to_dense()[0, 0].item() for a in loader] == [1, 2, 3]


def test_copies_and_pickles_of_what_is_public() -> None:
    model = sparse_mlp()
    model(X)
    suggestion = insum.formats.suggest(torch.eye(4))
    report = sparsify(mlp(), 0.5, rows=8)
    pattern = GroupCOO.from_dense(torch.eye(3))
    things: list[Any] = [
        model,
        pattern,
        pattern.pattern(),
        suggestion,
        report,
        insum.compile("y[i] = A[i,j] * x[j]"),
        insum.explain("y[i] = A[i]", A=torch.ones(2)),
        insum.Config(),
        insum.settings.values,
        insum.fusion.report(),
        insum.nn.Irreps.of("2x0e + 1o"),
        insum.nn.GCNConv(3, 4),
        insum.nn.RelationalConv(3, 4, 2),
        insum.nn.FullyConnectedTensorProduct("0e", "0e", "0e"),
    ]
    for thing in things:
        for made in (copy.deepcopy(thing), copy.copy(thing), pickle.loads(pickle.dumps(thing))):
            assert type(made) is type(thing) and repr(made) == repr(thing)
    assert torch.equal(copy.deepcopy(model)(X), model(X))
    assert torch.equal(pickle.loads(pickle.dumps(model))(X), model(X))


# --- hostile files ---


@pytest.mark.parametrize(
    "name, new",
    [
        ("0.weight.slot_indices_0", lambda t: t + 1000),
        ("0.weight.slot_indices_0", lambda t: t - 1000),
        ("0.weight.group_indices_0", lambda t: t.flip(0)),
        ("0.weight.group_indices_0", lambda t: t[:-1]),
        ("0.weight.values", lambda t: t[:-1]),
        ("0.weight.encoding", lambda t: t[:-2]),
        ("0.weight.encoding", lambda t: t.float()),
        ("2.weight.slot_indices_0", lambda t: t.double()),
    ],
)
def test_a_hostile_file_is_an_error_and_nothing_runs_on_it(name: str, new: Any) -> None:
    model = sparse_mlp()
    state = changed(model, name, new(model.state_dict()[name].clone()))
    with pytest.raises(insum.InsumError):
        model.load_state_dict(state)
    with pytest.raises(insum.InsumError):
        fresh = restore(mlp(), state)
        fresh.load_state_dict(state)
        fresh(X)


def test_descriptions_that_no_memory_holds_are_errors() -> None:
    described = {k: dict(v) for k, v in layouts(sparse_mlp()).items()}
    name = next(k for k, v in described.items() if v["format"] == "GroupCOO")
    sizes = described[name]["arrays"]
    described[name]["arrays"] = {k: [v[0], 2**50, *v[2:]] for k, v in sizes.items()}
    with pytest.raises(insum.FormatError, match="no memory"):
        restore(mlp(), described)
    state = {**sparse_mlp().state_dict(), 3: torch.ones(1)}
    restore(mlp(), state)  # keys of any kind


def test_a_state_with_some_of_the_arrays_is_an_error() -> None:
    model, state = sparse_mlp(), sparse_mlp().state_dict()
    del state["0.weight.slot_indices_0"]
    with pytest.raises(insum.FormatError, match="but no slot_indices_0"):
        model.load_state_dict(state, strict=False)
    values = {k: v for k, v in sparse_mlp().state_dict().items() if k.endswith("values")}
    model.load_state_dict(values, strict=False)  # parameters alone, as averages of them come


def test_restore_says_what_does_not_fit() -> None:
    model, state = sparse_mlp(), sparse_mlp().state_dict()
    with pytest.raises(insum.FormatError, match="nothing to hold it"):
        restore(nn.Sequential(nn.ReLU()), state)
    with pytest.raises(insum.FormatError, match="has shape"):
        restore(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5)), state)
    with pytest.raises(insum.FormatError, match="has no arrays"):
        restore(mlp(), {"0.weight": {"format": "COO"}})
    with pytest.raises(insum.FormatError, match="cannot be read"):
        restore(mlp(), {"0.weight": {"format": "COO", "shape": [48, 32], "arrays": {"x": []}}})
    found = layouts(model)
    found["0.weight"]["arrays"]["values"] = ["float32", -1]
    with pytest.raises(insum.FormatError, match="cannot be read"):
        restore(mlp(), found)
    whole = mlp()
    assert restore(whole, mlp().state_dict()) is whole and type(whole[0]) is nn.Linear
    with pytest.raises(insum.FormatError, match=r"try: insum\.nn\.restore"):
        sparse_mlp().load_state_dict({**state, "0.weight.encoding": state["2.weight.encoding"]})


def test_layouts_are_json_and_serve_a_model_on_the_meta_device() -> None:
    model = sparse_mlp()
    with torch.device("meta"):
        shell = restore(mlp(), json.loads(json.dumps(layouts(model))))
    shell.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(shell(X), model(X))


# --- Hugging Face ---


SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
PRETRAINED = {
    "LlamaForCausalLM": ("LlamaConfig", {"num_key_value_heads": 1, "vocab_size": 50}),
    "ViTForImageClassification": ("ViTConfig", {"image_size": 16, "patch_size": 8}),
}
#: Loads a saved model in a process of its own, exports it, and compares both with what was saved.
ELSEWHERE = """
import sys, torch, transformers
import insum.nn
folder, name = sys.argv[1:]
base = getattr(transformers, name)

class Sparse(base):
    def __init__(self, config):
        super().__init__(config)
        insum.nn.restore(self, config.insum)

Sparse.__name__ = f"Sparse{name}"  # which says what the loss is
given, want = torch.load(f"{folder}/data.pt", weights_only=True)
model = Sparse.from_pretrained(folder).eval()
model.config.use_cache = False  # a cache is no tensor, which export would return
with torch.no_grad():
    assert torch.equal(model(**given).logits, want)
exported = torch.export.export(model, (), given, strict=False)
torch.export.save(exported, f"{folder}/program.pt2")
again = torch.export.load(f"{folder}/program.pt2").module()
torch.testing.assert_close(again(**given).logits, want)
off = (again(**given).logits - want).abs().max().item()
layers = [m for m in model.modules() if isinstance(m, insum.nn.SparseLinear)]
print(f"{name}: {len(layers)} sparse layers loaded: equal; exported: {off:.1e} off at most")
"""


@pytest.mark.parametrize("name", PRETRAINED)
def test_pretrained_models(name: str, tmp_path: Path) -> None:
    """Sparsified, trained, saved, loaded in another process, exported there: equal."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    words = torch.randint(0, 50, (2, 6))
    given = {
        "LlamaForCausalLM": {"input_ids": words, "labels": words},
        "ViTForImageClassification": {
            "pixel_values": torch.randn(2, 3, 16, 16),
            "labels": torch.tensor([0, 1]),
        },
    }[name]
    kind, more = PRETRAINED[name]
    model = getattr(transformers, name)(getattr(transformers, kind)(**SMALL, **more))
    report = sparsify(model, lambda name, layer: 0.3 if layer.in_features >= 32 else None, rows=8)
    assert len(report.swapped) >= 6
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(3):
        loss = model(**given).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.config.insum = layouts(model)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        torch.save((given, model.eval()(**given).logits), tmp_path / "data.pt")
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(tmp_path), name],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    print(report, [round(loss, 3) for loss in losses], done.stdout.strip(), sep="\n")


# --- as modules know weights ---


def test_encoder_layers_take_the_exchange() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    x = torch.randn(2, 4, 32)
    report = sparsify(model, 1.0, block_shape=16, rows=8)
    assert [one.swapped for one in report.layers] == [False, True, True]
    assert "other code" in report.layers[0].why
    want = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)(x)
    assert_close(model(x), want)
    model.eval()
    with torch.no_grad():  # the fast path of torch does not take a sparse weight
        assert_close(model(x), want, atol=1e-5, rtol=1e-5)
    weight: Any = model.layers[0].linear1.weight
    assert (weight.shape, weight.dtype, weight.device) == ((64, 32), torch.float32, x.device)
    assert weight.requires_grad and weight.ndim == 2 and weight.size(-1) == 32
    bias = model.layers[0].linear1.bias
    assert_close(nn.functional.linear(x, weight, bias), model.layers[0].linear1(x))
    with pytest.raises(insum.UnsupportedError, match="does not take a sparse weight"):
        torch.nn.functional.relu(weight)
    with pytest.raises(insum.BindingError, match="the input has shape"):
        nn.functional.linear(x[..., :3], weight)
    with pytest.raises(insum.UnsupportedError, match="not the weight here"):
        nn.functional.linear(weight, x)
    with pytest.raises(insum.FormatError, match="dim"):
        weight.size(2)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_close(compiled(x), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_autocast_gives_the_dtype_of_a_linear_layer(bias: bool) -> None:
    dense = nn.Linear(32, 16, bias=bias)
    layer, x = SparseLinear.from_dense(dense, density=0.5), torch.randn(3, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == dense(x).dtype == torch.bfloat16
        assert layer.double()(x.double()).dtype == torch.float64
    layer.float()(x).sum().backward()
    assert layer.weight.values is not None and layer.weight.values.grad is not None


# --- whole models ---


def test_pruned_layers_need_no_mask() -> None:
    dense = nn.Linear(32, 16)
    with pytest.raises(insum.FormatError, match="nothing in the weight is pruned"):
        SparseLinear.from_dense(dense)
    with torch.no_grad():
        dense.weight[:, 8:] = 0
    assert SparseLinear.from_dense(dense).weight().nnz == 128
    layer = BlockSparseLinear.from_dense(dense, block_shape=8)
    assert layer.weight().entries().count == 2
    assert_close(layer(X), dense(X))


def test_sparsify_leaves_what_is_tied_and_reports_what_pays() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(50, 32), nn.Linear(32, 50, bias=False)
            self.head.weight = self.table.weight
            self.one = self.again = nn.Linear(32, 32)
            self.one.weight.requires_grad_(False)

    model = Tied().eval()
    report = sparsify(model, 0.1, rows=64)
    assert model.one is model.again and isinstance(model.one, SparseLinear)
    assert not model.one.weight.requires_grad and not model.one.training
    assert isinstance(model.head, nn.Linear) and [x.name for x in report.swapped] == ["one"]
    assert "its weight is used elsewhere too" in str(report) and "dense is faster" in str(report)
    html = report._repr_html_()
    assert html.count("<tr>") == 3 and "H200" in html
    big = nn.Sequential(nn.Linear(2048, 2048, bias=False))
    found = sparsify(big, 0.05, block_shape=64, rows=4096)
    assert found.layers[0].pays and found.layers[0].sparse_bytes < found.layers[0].dense_bytes / 10
    kept = sparsify(mlp(), 0.5, rows=8, only_where_faster=True)
    assert not kept.swapped and kept.layers[0].why == "left: dense is faster"


def test_sparsify_says_what_it_cannot_do() -> None:
    model = mlp()
    with pytest.raises(insum.BindingError, match="no linear layer has a name like 'layers"):
        sparsify(model, {"layers.*": 0.1})
    with pytest.raises(insum.BindingError, match="itself a linear layer"):
        sparsify(model[0], 0.1)
    with pytest.raises(insum.FormatError, match="the rule says 'most' of a layer"):
        sparsify(model, lambda name, layer: "most")
    with pytest.raises(insum.DtypeError, match="rule is True"):
        sparsify(model, True)
    with pytest.raises(insum.FormatError):  # for the second layer: the first is not exchanged
        sparsify(model, lambda name, layer: 0.5 if name == "0" else 7.0)
    assert type(model[0]) is nn.Linear
    with pytest.raises(insum.FormatError, match="nothing in the weight is pruned"):
        sparsify(model, "zeros")


def test_a_pattern_has_no_dtype_of_its_own() -> None:
    held = SparseParameter(COO.from_dense(torch.eye(3)).pattern())
    assert held.dtype == torch.get_default_dtype() and not held.requires_grad
    assert list(held.arrays()) == ["indices_0", "indices_1"]
