"""Layers in four processes against one: data parallel, FSDP, tensor parallel, expert parallel."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which DTensors load: once here, rather than in every process
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import parallelize_module

import insum
from distributed.drawn import whole
from insum.distributed import SparseColwise, SparseRowwise
from insum.nn import BlockSparseLinear, GCNConv, SparseConv3d, SparseTensor

DEVICE = os.environ.get("INSUM_DEVICE", "cpu")
EXAMPLES = Path(__file__).parents[2] / "examples"


def mesh() -> Any:
    return init_device_mesh(DEVICE, (dist.get_world_size(),))


def near(got: Any, want: Tensor) -> None:
    torch.testing.assert_close(whole(got.detach()), want.detach(), rtol=1e-4, atol=1e-5)


def seeded(make: Callable[[], Any]) -> Any:
    """The same on every rank, and each time."""
    torch.manual_seed(1)
    made = make()
    return made.to(DEVICE) if hasattr(made, "to") else made


def block_linear() -> BlockSparseLinear:
    return BlockSparseLinear.from_dense(nn.Linear(32, 32), density=0.5, block_shape=4)


def graph() -> tuple[Tensor, Tensor]:
    return torch.randn(20, 6).to(DEVICE), torch.randint(20, (2, 60)).to(DEVICE)


def voxels() -> SparseTensor:
    coords = torch.cartesian_prod(*[torch.arange(4)] * 3)[::3]
    return SparseTensor(coords.to(DEVICE), torch.randn(len(coords), 8).to(DEVICE))


#: What is trained, and what it is called with.
LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = {
    "gcn": (lambda: GCNConv(6, 4), lambda m: m(*graph())),
    "blocks": (block_linear, lambda m: m(torch.randn(5, 32).to(DEVICE))),
    "voxels": (lambda: SparseConv3d(8, 8, 3, submanifold=True), lambda m: m(voxels()).features),
}


def check_fully_sharded_layers() -> None:
    for make, run in LAYERS.values():
        plain, cut = seeded(make), seeded(make)
        fully_shard(cut, mesh=mesh())
        out, want = seeded(partial(run, cut)), seeded(partial(run, plain))
        out.sum().backward()
        want.sum().backward()
        near(out, want)
        for one, other in zip(cut.parameters(), plain.parameters()):
            near(one.grad, other.grad)


def check_data_parallel_layers() -> None:
    layer = seeded(lambda: GCNConv(6, 4))
    ranks, edges = dist.get_world_size(), seeded(graph)[1]
    x = seeded(lambda: torch.randn(ranks, 20, 6))
    total = sum(layer(one, edges).square().sum() for one in x) / ranks
    want = torch.autograd.grad(total, list(layer.parameters()))
    parallel = nn.parallel.DistributedDataParallel(layer)
    parallel(x[dist.get_rank()], edges).square().sum().backward()
    for parameter, gradient in zip(layer.parameters(), want):
        near(parameter.grad, gradient)


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = block_linear(), block_linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def check_tensor_parallel_blocks() -> None:
    plain, cut = seeded(_Mlp), seeded(_Mlp)
    x = seeded(lambda: torch.randn(5, 32))
    parallelize_module(cut, mesh(), {"up": SparseColwise(), "down": SparseRowwise()})
    part = 32 // dist.get_world_size()
    assert cut.up.weight().shape == (part, 32) and cut.down.weight().shape == (32, part)
    got, want = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, other = cut(got), plain(want)
    near(out, other)
    out.square().sum().backward()
    other.square().sum().backward()
    near(got.grad, want.grad)
    near(cut.down.bias.grad, plain.down.bias.grad)
    own = slice(part * dist.get_rank(), part * dist.get_rank() + part)
    near(cut.up.bias.grad, plain.up.bias.grad[own])
    up = plain.up.weight().with_values(plain.up.weight.values.grad)
    near(cut.up.weight().with_values(cut.up.weight.values.grad).to_dense(), up.to_dense()[own])


def check_tensor_parallel_convolutions() -> None:
    for style in (SparseColwise(use_local_output=False), SparseRowwise(use_local_output=False)):
        make = LAYERS["voxels"][0]
        plain, cut = seeded(make), seeded(make)
        parallelize_module(cut, mesh(), style)
        x = seeded(voxels)
        place = Replicate() if isinstance(style, SparseColwise) else Shard(1)
        features = distribute_tensor(x.features, mesh(), [place])
        out, want = cut(x.with_features(features)).features, plain(x).features
        near(out, want)
        out.square().sum().backward()
        want.square().sum().backward()
        for one, other in zip(cut.parameters(), plain.parameters()):
            near(one.grad, other.grad)


def check_distributed_modules() -> None:
    """`distribute_module` makes DTensors of everything, patterns too."""
    plain, spread = seeded(block_linear), seeded(block_linear)
    x = seeded(lambda: torch.randn(8, 32))

    def cut(name: str, module: nn.Module, where: Any) -> None:
        if name == "weight":
            values = distribute_tensor(module.values.detach(), where, [Shard(0)])
            module.values = nn.Parameter(values)

    distribute_module(spread, mesh(), cut)
    given = distribute_tensor(x, mesh(), [Replicate()])
    out, want = spread(given), plain(x)
    assert isinstance(out, DTensor)
    near(out, want)
    out.square().sum().backward()
    want.square().sum().backward()
    near(spread.weight.values.grad, plain.weight.values.grad)


def check_a_format_beside_dtensors() -> None:
    A = insum.formats.GroupCOO.from_dense(seeded(lambda: torch.randn(6, 9)).relu(), group_size=2)
    B = seeded(lambda: torch.randn(9, 8))
    for place in (Shard(1), Shard(0), Replicate()):
        got = insum.einsum("C[m,n] = A[m,k] * B[k,n]", A=A, B=distribute_tensor(B, mesh(), [place]))
        near(got, A @ B)


def check_the_example_reaches_the_loss_of_one_process() -> None:
    sys.path.insert(0, str(EXAMPLES))
    example = runpy.run_path(str(EXAMPLES / "tensor_parallel_mlp.py"))
    losses = example["main"](["--width", "32", "--block", "4", "--steps", "4", "--device", DEVICE])
    alone = example["losses"](width=32, block=4, steps=4, device=DEVICE, mesh=None)
    assert losses[-1] < losses[0]
    near(torch.tensor(losses), torch.tensor(alone))
