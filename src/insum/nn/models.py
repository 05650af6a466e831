"""Networks over voxels, made of the layers of `insum.nn`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from insum.accepted import COUNTS, Accepted, is_size, require
from insum.errors import BindingError
from insum.nn.conv import SparseConv3d
from insum.nn.sparse_tensor import at_voxels

__all__ = ["MINKUNET18", "MINKUNET34", "MinkUNet"]

STEM = Accepted(
    "a pair of integers of at least 1: the size of a kernel, channels",
    lambda v: isinstance(v, tuple | list) and len(v) == 2 and all(is_size(n, 1) for n in v),
)


class MinkUNet(nn.Module):
    """The U-Net for clouds that MinkowskiEngine made known: four levels down, four up, blocks of
    two convolutions with a residual. Names are those of its `MinkUNet`, so that `load_minkowski`
    loads their weights.

    Args:
        in_channels: Features of a voxel.
        out_channels: Classes.
        blocks: Blocks at each of the eight stages: `MINKUNET18`, `MINKUNET34`.
        widths: Channels at each of them.
        stem: The size of the first kernel, and the channels behind it.

    Raises:
        BindingError: There are not eight stages.

    >>> from insum.nn import SparseTensor
    >>> x = SparseTensor(torch.cartesian_prod(*[torch.arange(4)] * 3), torch.randn(64, 3))
    >>> small = MinkUNet(3, 5, blocks=(1,) * 8, widths=(4,) * 8, stem=(3, 4))
    >>> small.eval()(x)
    SparseTensor(voxels=64, channels=5, float32, spatial_shape=None, cpu)
    """

    #: How the parts of a level are called by the strides behind and before it.
    DOWN: ClassVar = (("conv1p1s2", "bn1"), ("conv2p2s2", "bn2"), ("conv3p4s2", "bn3"),
                      ("conv4p8s2", "bn4"))  # fmt: skip
    UP: ClassVar = (("convtr4p16s2", "bntr4"), ("convtr5p8s2", "bntr5"), ("convtr6p4s2", "bntr6"),
                    ("convtr7p2s2", "bntr7"))  # fmt: skip

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        blocks: Sequence[int] = (2,) * 8,
        widths: Sequence[int] = (32, 64, 128, 256, 256, 128, 96, 96),
        stem: tuple[int, int] = (5, 32),
    ) -> None:
        super().__init__()
        _check_stages(blocks=blocks, widths=widths)
        require("stem", stem, STEM)
        kernel, width = stem
        self.conv0p1s1 = self.same(in_channels, width, kernel, 0)
        self.bn0 = nn.BatchNorm1d(width)
        skips = [width]
        for level, (conv, norm) in enumerate(self.DOWN):
            setattr(self, conv, self.down(width, width, level))
            setattr(self, norm, nn.BatchNorm1d(width))
            setattr(
                self,
                f"block{level + 1}",
                self.stage(width, widths[level], blocks[level], level + 1),
            )
            width = widths[level]
            skips.append(width)
        skips.pop()
        for number, (conv, norm) in enumerate(self.UP):
            level, wide = 3 - number, widths[4 + number]
            setattr(self, conv, self.up(width, wide, level))
            setattr(self, norm, nn.BatchNorm1d(wide))
            joined = wide + skips.pop()
            setattr(self, f"block{number + 5}", self.stage(joined, wide, blocks[4 + number], level))
            width = wide
        self.final = self.same(width, out_channels, 1, 0, bias=True)

    # --- the layers that it is made of, for those who have others ---

    def same(
        self, inputs: int, outputs: int, kernel: int, level: int, bias: bool = False
    ) -> nn.Module:
        return SparseConv3d(inputs, outputs, kernel, bias=bias, submanifold=True)

    def down(self, inputs: int, outputs: int, level: int) -> nn.Module:
        return SparseConv3d(inputs, outputs, 2, stride=2, bias=False)

    def up(self, inputs: int, outputs: int, level: int) -> nn.Module:
        return SparseConv3d(inputs, outputs, 2, stride=2, bias=False, transposed=True)

    @staticmethod
    def replaced(x: Any, features: Tensor) -> Any:
        return at_voxels(x.voxels, features)

    def stage(self, inputs: int, outputs: int, count: int, level: int) -> nn.Sequential:
        pairs = itertools.pairwise([inputs] + [outputs] * count)
        return nn.Sequential(*(ResidualBlock(self, a, b, level) for a, b in pairs))

    def forward(self, x: Any) -> Any:
        x = self.activated(self.conv0p1s1(x), self.bn0)
        skips = [x]
        for number, (conv, norm) in enumerate(self.DOWN):
            x = self.activated(getattr(self, conv)(x), getattr(self, norm))
            x = getattr(self, f"block{number + 1}")(x)
            skips.append(x)
        skips.pop()
        for number, (conv, norm) in enumerate(self.UP):
            skip = skips.pop()
            x = self.activated(getattr(self, conv)(x, skip), getattr(self, norm))
            x = self.replaced(skip, torch.cat([x.features, skip.features], 1))
            x = getattr(self, f"block{number + 5}")(x)
        return self.final(x)

    def activated(self, x: Any, norm: nn.Module) -> Any:
        return self.replaced(x, norm(x.features).relu())


def _check_stages(**given: Sequence[int]) -> None:
    stages = len(MinkUNet.DOWN) + len(MinkUNet.UP)
    for name, numbers in given.items():
        require(name, numbers, COUNTS)
        if len(numbers) != stages:
            raise BindingError(f"{name} is {numbers!r}", expected=f"{stages} numbers, one a stage")


class ResidualBlock(nn.Module):
    """Two convolutions over the same voxels, and what came in."""

    def __init__(self, of: MinkUNet, inputs: int, outputs: int, level: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = of.same(inputs, outputs, 3, level), nn.BatchNorm1d(outputs)
        self.conv2, self.norm2 = of.same(outputs, outputs, 3, level), nn.BatchNorm1d(outputs)
        self.downsample: nn.Sequential | None = None
        if inputs != outputs:
            self.downsample = nn.Sequential(
                of.same(inputs, outputs, 1, level), nn.BatchNorm1d(outputs)
            )
        self.replaced = type(of).replaced

    def forward(self, x: Any) -> Any:
        out = self.conv1(x)
        out = self.conv2(self.replaced(out, self.norm1(out.features).relu()))
        before = x.features
        if self.downsample is not None:
            before = self.downsample[1](self.downsample[0](x).features)
        return self.replaced(out, (self.norm2(out.features) + before).relu())


#: Blocks at each stage.
MINKUNET18, MINKUNET34 = (2,) * 8, (2, 3, 4, 6, 2, 2, 2, 2)
