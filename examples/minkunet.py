"""Train MinkUNet18 or MinkUNet34 on clouds that are new at every step.

    python examples/minkunet.py                              # generated rooms
    python examples/minkunet.py --data FOLDER --cloud NAME   # FOLDER/NAME.npz with points

Every sample is a part of the cloud, turned, moved and voxelised anew by the workers of a
DataLoader, which join samples with `insum.nn.collate`. The task: which way does the surface face at
each voxel, seen from nothing but the points in it?
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sparse_unet import facing, room
from timing import default_device, median_ms, report
from torch import Tensor, nn

from insum.nn import SparseTensor, collate, voxelize
from insum.nn.models import MINKUNET18, MINKUNET34, MinkUNet

DEPTHS = {18: MINKUNET18, 34: MINKUNET34}


class Parts(torch.utils.data.Dataset[Any]):
    """Parts of a cloud around points of it, each turned about the vertical and moved."""

    def __init__(self, points: Tensor, count: int, radius: float, voxel: float) -> None:
        self.points, self.count, self.radius, self.voxel = points, count, radius, voxel

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[SparseTensor, Tensor]:
        draw = torch.Generator().manual_seed(number)
        centre = self.points[torch.randint(len(self.points), (1,), generator=draw)]
        near = (self.points - centre)[(self.points - centre)[:, :2].norm(dim=1) < self.radius]
        turn = torch.randint(4, (1,), generator=draw).item() * math.pi / 2
        cos, sin = round(math.cos(turn)), round(math.sin(turn))
        rotation = torch.tensor([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]], dtype=near.dtype)
        placed = near @ rotation.T + torch.rand(3, generator=draw).to(near.dtype)
        within = placed / self.voxel - torch.floor(placed / self.voxel) - 0.5
        features = torch.cat([within, torch.ones(len(placed), 1)], 1).float()
        x = voxelize(placed, self.voxel, features)
        return x, facing(x)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, help="folder with .npz files; without it a room is generated"
    )
    parser.add_argument("--cloud", default="pc-s3dis-ucf-lobby")
    parser.add_argument("--points", type=int, default=40000, help="points of the generated room")
    parser.add_argument("--voxel", type=float, default=0.1, help="metres")
    parser.add_argument("--radius", type=float, default=1.5, help="metres around the centre")
    parser.add_argument("--depth", type=int, choices=sorted(DEPTHS), default=18)
    parser.add_argument("--width", type=int, default=8, help="channels of the first stage")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--device", default=default_device())
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    points = (
        torch.from_numpy(np.load(arguments.data / f"{arguments.cloud}.npz")["points"])
        if arguments.data
        else room(arguments.points)
    )
    wide = [arguments.width * k for k in (1, 2, 4, 8, 8, 4, 3, 3)]
    model = MinkUNet(4, 3, DEPTHS[arguments.depth], wide, (5, arguments.width))
    model.to(arguments.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(
        Parts(points, arguments.batch * arguments.steps, arguments.radius, arguments.voxel),
        batch_size=arguments.batch,
        collate_fn=collate,
        num_workers=arguments.workers,
    )
    for step, (cloud, labels) in enumerate(loader):
        x, wanted = cloud.to(arguments.device), labels.to(arguments.device)
        optimizer.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.device.type == "cuda"):
            out = model(x).features
        loss = nn.functional.cross_entropy(out.float(), wanted)
        loss.backward()
        optimizer.step()
        print(
            f"step {step:3d}  {x.voxels.count} voxels  loss {loss.item():.4f}  accuracy "
            f"{(out.argmax(1) == wanted).float().mean().item():.3f}"
        )
    with torch.no_grad():
        ours = median_ms(lambda: model(x), x.device, repeat=3)
    report(f"MinkUNet{arguments.depth}, forward", ours, {})


if __name__ == "__main__":
    main()
