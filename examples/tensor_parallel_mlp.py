"""Train a block-sparse MLP whose two layers are cut over processes: the first by its outputs, the
second by its inputs, so that one sum is all that travels.

    torchrun --nproc-per-node 4 examples/tensor_parallel_mlp.py

Every process has its own part of both patterns, and the losses are those of one process, which are
printed as well.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from timing import default_device, median_ms, report
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from insum.distributed import SparseColwise, SparseRowwise
from insum.nn import BlockSparseLinear


class Mlp(nn.Module):
    """Two block-sparse layers, four times as wide in between."""

    def __init__(self, width: int, block: int) -> None:
        super().__init__()
        dense = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.up, self.down = (
            BlockSparseLinear.from_dense(layer, density=0.3, block_shape=block) for layer in dense
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def made(width: int, block: int, device: str, mesh: DeviceMesh | None) -> Mlp:
    """The same network with every number of processes."""
    torch.manual_seed(0)
    model = Mlp(width, block).to(device)
    if mesh is not None:
        parallelize_module(model, mesh, {"up": SparseColwise(), "down": SparseRowwise()})
    return model


def losses(width: int, block: int, steps: int, device: str, mesh: DeviceMesh | None) -> list[float]:
    """The loss of each step; where there is a mesh, layers are cut over its ranks."""
    model = made(width, block, device, mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    x, wanted = torch.randn(256, width, device=device), torch.randn(256, width, device=device)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), wanted)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def main(argv: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--device", default=default_device())
    arguments = parser.parse_args(argv)
    width, block, device = arguments.width, arguments.block, arguments.device
    begun = not dist.is_initialized()
    if begun:
        backend = "nccl" if device == "cuda" else "gloo"
        if "RANK" in os.environ:  # which torchrun sets
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    found = losses(width, block, arguments.steps, device, mesh)
    if dist.get_rank() == 0:
        show(found, losses(width, block, arguments.steps, device, None))
        whole, x = made(width, block, device, None), torch.randn(256, width, device=device)
        took = median_ms(lambda: whole(x), x.device)
        dense = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        rivals = {"dense": median_ms(lambda: dense.to(device)(x), x.device)}
        report("the whole MLP in one process", took, rivals)
    if begun:
        dist.destroy_process_group()
    return found


def show(found: list[float], alone: list[float]) -> None:
    ranks = dist.get_world_size()
    for step in sorted({0, len(found) // 2, len(found) - 1}):
        print(f"step {step}: loss {found[step]:.6f}, in one process {alone[step]:.6f}")
    apart = max(abs(a - b) for a, b in zip(found, alone))
    print(f"{ranks} process(es): losses differ by {apart:.1e}")


if __name__ == "__main__":
    main()
