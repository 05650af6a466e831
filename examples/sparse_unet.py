"""Train a small sparse U-Net on a scan of a room and time its convolutions.

    python examples/sparse_unet.py                              # a generated room
    python examples/sparse_unet.py --data FOLDER --cloud NAME   # FOLDER/NAME.npz with points

Every convolution is one statement, Out[x,m] = Map[z,x,y] * In[y,c] * W[z,c,m]; the maps of one
resolution are built once and shared. The task: which way does the surface face at each voxel, seen
from nothing but which voxels are occupied?
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from timing import default_device, median_ms, report
from torch import Tensor, nn

from insum.nn import SparseConv3d, SparseTensor, cat


def room(points: int) -> Tensor:
    """Floor, two walls and some boxes, in metres."""
    u, v = torch.rand(points), torch.rand(points)
    kind = torch.randint(0, 4, (points,))
    floor, wall, side = (
        torch.stack([5 * u, 4 * v, 0 * u], 1),
        torch.stack([5 * u, 0 * u, 2.5 * v], 1),
        torch.stack([0 * u, 4 * u, 2.5 * v], 1),
    )
    corner = torch.tensor([[1.0, 1.0, 0.0], [3.0, 2.0, 0.0], [2.0, 3.0, 0.5]])[
        torch.randint(0, 3, (points,))
    ]
    face = torch.stack([u, v, torch.rand(points)], 1) * 0.6
    face[torch.arange(points), torch.randint(0, 3, (points,))] = 0.6
    return torch.stack([floor, wall, side, corner + face])[
        kind, torch.arange(points)
    ] + 0.005 * torch.randn(points, 3)


def facing(x: SparseTensor) -> Tensor:
    """0, 1 or 2: the axis along which a voxel has the fewest neighbours within a cube of 5."""
    steps = (
        torch.stack(torch.meshgrid(*[torch.arange(-2, 3)] * 3, indexing="ij"), -1)
        .reshape(-1, 3)
        .to(x.coords.device)
    )
    near = x.voxels.find(x.coords + nn.functional.pad(steps, (1, 0))[:, None]) >= 0
    return torch.stack([near[steps[:, axis] != 0].sum(0) for axis in range(3)], 1).argmin(1)


class UNet(nn.Module):
    """Down once, up once, with a skip between the two levels of full resolution."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.enter = SparseConv3d(1, width, 3, submanifold=True)
        self.down = SparseConv3d(width, 2 * width, 2, stride=2)
        self.deep = SparseConv3d(2 * width, 2 * width, 3, submanifold=True)
        self.up = SparseConv3d(2 * width, width, 2, stride=2, transposed=True)
        self.leave = SparseConv3d(2 * width, width, 3, submanifold=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: SparseTensor) -> Tensor:
        fine = relu(self.enter(x))
        coarse = relu(self.deep(relu(self.down(fine))))
        back = relu(self.up(coarse, like=fine))
        out: Tensor = self.head(relu(self.leave(cat([fine, back]))).features)
        return out


def relu(x: SparseTensor) -> SparseTensor:
    return x.with_features(x.features.relu())


def pairs_of(layer: SparseConv3d, x: SparseTensor) -> list[tuple[Tensor, Tensor]]:
    """For every offset the output and input voxels that it joins."""
    centre = torch.tensor([0, *layer.geometry.padding], device=x.coords.device)
    found = [
        x.voxels.find(x.coords + offset - centre).long()
        for offset in layer.geometry.offsets(x.coords.device)
    ]
    return [(at := (source >= 0).nonzero().squeeze(1), source[at]) for source in found]


def by_hand(layer: SparseConv3d, x: SparseTensor, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The same submanifold convolution as most would write it: gather, multiply, scatter, offset by
    offset.
    """
    out = x.features.new_zeros(x.voxels.count, layer.out_channels)
    for weight, (at, source) in zip(layer.weight, pairs):
        out.index_add_(0, at, x.features[source] @ weight)
    return out if layer.bias is None else out + layer.bias


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, help="folder with .npz files; without it a room is generated"
    )
    parser.add_argument("--cloud", default="pc-s3dis-ucf-lobby")
    parser.add_argument("--points", type=int, default=20000, help="points of the generated room")
    parser.add_argument("--voxel", type=float, default=0.1, help="metres")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--device", default=default_device())
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    points = (
        torch.from_numpy(np.load(arguments.data / f"{arguments.cloud}.npz")["points"])
        if arguments.data
        else room(arguments.points)
    )
    coords = (
        torch.floor(points.to(arguments.device).double() / arguments.voxel).long().unique(dim=0)
    )
    x = SparseTensor(coords, torch.ones(len(coords), 1, device=coords.device))
    labels = facing(x)
    print(f"{len(points)} points, {x.voxels.count} voxels, on {coords.device}")

    model = UNet(arguments.width, 3).to(coords.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(arguments.steps):
        optimizer.zero_grad()
        out = model(x)
        loss = nn.functional.cross_entropy(out, labels)
        loss.backward()
        optimizer.step()
        if step % max(1, arguments.steps // 5) == 0 or step == arguments.steps - 1:
            print(
                f"step {step:3d}  loss {loss.item():.4f}  accuracy "
                f"{(out.argmax(1) == labels).float().mean().item():.3f}"
            )
    time_convolution(model, x)


@torch.no_grad()
def time_convolution(model: UNet, x: SparseTensor) -> None:
    layer, wide = (
        model.leave,
        x.with_features(
            torch.randn(x.voxels.count, model.leave.in_channels, device=x.coords.device)
        ),
    )
    pairs = pairs_of(layer, wide)
    print(
        "largest difference from the loop over offsets: "
        f"{(by_hand(layer, wide, pairs) - layer(wide).features).abs().max().item():.1e}"
    )
    rivals: dict[str, float | str] = {
        "loop over offsets": median_ms(lambda: by_hand(layer, wide, pairs), x.coords.device)
    }
    rivals["spconv"] = spconv_ms(layer, wide)
    report("one convolution", median_ms(lambda: layer(wide), x.coords.device), rivals)


def spconv_ms(layer: SparseConv3d, x: SparseTensor) -> float | str:
    try:
        import spconv.pytorch as spconv
    except ImportError:
        return "spconv is not installed"
    if not x.coords.is_cuda:
        return "spconv needs a GPU"
    coords = (x.coords - x.coords.amin(0)).int()
    theirs = spconv.SubMConv3d(layer.in_channels, layer.out_channels, 3, indice_key="a").to(
        x.coords.device
    )
    given = spconv.SparseConvTensor(x.features, coords, (coords.amax(0)[1:] + 1).tolist(), 1)
    return median_ms(lambda: theirs(given), x.coords.device)


if __name__ == "__main__":
    main()
