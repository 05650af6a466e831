"""Train a detector in the manner of SECOND: sparse convolutions over voxels, then dense ones over
the ground.

    python examples/second.py                              # a generated street
    python examples/second.py --data FOLDER --cloud NAME   # FOLDER/NAME.npz with points

Boxes of the size of cars are put into the cloud at every step, and their centres are to be found on
the ground, four times as coarse as the voxels.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from timing import default_device, median_ms, report
from torch import Tensor, nn

from insum.nn import SparseConv3d, SparseSequential, SparseTensor, batch, voxelize

CAR = torch.tensor([4.0, 1.8, 1.6])


def street(points: int) -> Tensor:
    """A road between two walls, in metres."""
    u, v = torch.rand(points), torch.rand(points)
    road = torch.stack([60 * u - 30, 30 * v - 15, 0 * u], 1)
    wall = torch.stack([60 * u - 30, 15 * torch.sign(v - 0.5), 4 * torch.rand(points)], 1)
    return torch.where(torch.rand(points, 1) < 0.7, road, wall) + 0.02 * torch.randn(points, 3)


def with_cars(points: Tensor, cars: int, extent: Tensor) -> tuple[Tensor, Tensor]:
    """The cloud with boxes on its ground, and their centres."""
    low, high = extent[0, :2] + 4, extent[1, :2] - 4
    centres = low + torch.rand(cars, 2) * (high - low)
    faces = torch.rand(cars, 200, 3) - 0.5
    side = torch.randint(0, 3, (cars, 200, 1))
    faces.scatter_(2, side, 0.5 * torch.sign(torch.rand(cars, 200, 1) - 0.5))
    ground = points[:, 2].quantile(0.05) if len(points) < 10**6 else points[:, 2].median()
    middle = torch.cat([centres, (ground + CAR[2] / 2).expand(cars, 1)], 1)
    return torch.cat([points, (faces * CAR + middle[:, None]).reshape(-1, 3)]), centres


class Second(nn.Module):
    """Two strides of sparse convolutions, columns of what is left as channels, and a small network
    over the ground.
    """

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        sizes = [width, width, 2 * width, 4 * width]
        self.sparse = SparseSequential(
            *_stage(4, sizes[0], submanifold=True),
            *_stage(sizes[0], sizes[1], submanifold=True),
            *(
                module
                for a, b in itertools.pairwise(sizes[1:])
                for module in (*_stage(a, b, stride=2, padding=1), *_stage(b, b, submanifold=True))
            ),
        )
        columns = sizes[-1] * levels
        self.ground = nn.Sequential(
            nn.Conv2d(columns, 4 * width, 3, padding=1),
            nn.BatchNorm2d(4 * width),
            nn.ReLU(),
            nn.Conv2d(4 * width, 4 * width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(4 * width, 1, 1),
        )

    def forward(self, x: SparseTensor) -> Tensor:
        deep = self.sparse(x)
        grid = deep.to_dense(x.batch_size)  # (batch, channels, x, y, z)
        out: Tensor = self.ground(grid.movedim(-1, 2).flatten(1, 2))
        return out[:, 0]


def _stage(inputs: int, outputs: int, **options: int | bool) -> tuple[nn.Module, ...]:
    conv = SparseConv3d(inputs, outputs, 3, bias=False, **options)  # type: ignore[arg-type]
    return conv, nn.BatchNorm1d(outputs), nn.ReLU()


def sample(points: Tensor, cars: int, voxel: float, extent: Tensor) -> tuple[SparseTensor, Tensor]:
    """Voxels of a cloud with new cars, and where the centres are on the ground."""
    cloud, centres = with_cars(points, cars, extent)
    inside = cloud[((cloud >= extent[0]) & (cloud < extent[1])).all(1)] - extent[0]
    height = torch.cat([inside, torch.ones(len(inside), 1)], 1)
    x = voxelize(inside, voxel, height)
    shape = tuple(int(n) for n in torch.ceil((extent[1] - extent[0]) / voxel))
    fits = (x.coords[:, 1:] < torch.tensor(shape)).all(1)
    x = x.keep(fits)
    wanted = torch.zeros([-(-n // 4) for n in shape[:2]])
    place = ((centres - extent[0, :2]) / (4 * voxel)).long()
    wanted[tuple(place.T)] = 1
    return SparseTensor(x.coords, x.features, spatial_shape=shape), wanted


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, help="folder with .npz files; without it a street is generated"
    )
    parser.add_argument("--cloud", default="pc-lidar-ucf-LIDAR1")
    parser.add_argument("--points", type=int, default=20000, help="points of the generated street")
    parser.add_argument("--voxel", type=float, default=0.25, help="metres")
    parser.add_argument(
        "--side", type=float, default=32.0, help="metres of ground, along and across"
    )
    parser.add_argument("--cars", type=int, default=8)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--device", default=default_device())
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    points = (
        torch.from_numpy(np.load(arguments.data / f"{arguments.cloud}.npz")["points"]).float()
        if arguments.data
        else street(arguments.points)
    )
    middle, half = points.median(0).values, arguments.side / 2
    extent = torch.stack([middle - half, middle + half])
    extent[:, 2] = middle[2] + torch.tensor([-1.0, 3.0])
    model = Second(arguments.width, levels=-(-round(4.0 / arguments.voxel) // 4))
    model.to(arguments.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for step in range(arguments.steps):
        drawn = [
            sample(points, arguments.cars, arguments.voxel, extent) for _ in range(arguments.batch)
        ]
        x = batch([cloud for cloud, _ in drawn]).to(arguments.device)
        wanted = torch.stack([map_ for _, map_ in drawn]).to(arguments.device)
        optimizer.zero_grad()
        out = model(x)
        loss = nn.functional.binary_cross_entropy_with_logits(
            out, wanted, pos_weight=out.new_tensor(20.0)
        )
        loss.backward()
        optimizer.step()
        found = out.flatten(1).topk(arguments.cars).indices
        right = wanted.flatten(1).gather(1, found).mean().item()
        print(f"step {step:3d}  {x.voxels.count} voxels  loss {loss.item():.4f}  found {right:.2f}")
    with torch.no_grad():
        report("SECOND, forward", median_ms(lambda: model(x), x.device, repeat=3), {})


if __name__ == "__main__":
    main()
