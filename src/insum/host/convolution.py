"""Windows of one tensor that another is a kernel for: a convolution, or a gradient of one, which a
library has. Of three tensors the ``long`` one is read or written through windows; which of them
is on the left side says which it is:

    y[b,o,i] = w[o,c,r] * x[b,c,i+r]        the convolution
    x[b,c,i+r] = y[b,o,i] * w[o,c,r]        its gradient by the long tensor
    w[o,c,r] = y[b,o,i] * x[b,c,i+r]        and by the kernel

What two of them share is the batch (b) and channels of what is read (c) and of the result (o); what
all three do are groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from insum.host.arguments import HostCall
from insum.host.roles import as_tensor, cast
from insum.host.slices import SlicedAccess
from insum.lang.bind import Problem

#: The three, and what it is where each of them is on the left side.
RESULT, LONG, KERNEL = range(3)
_WHICH = "a convolution", "the gradient of a convolution", "the gradient of its kernel"


@dataclass(frozen=True, slots=True, eq=False)
class ConvolvedTensor:
    """One of the three, as the library has it: ``view`` is the part that is read or written, None
    where that is all of it, whose dimensions in this ``order`` (empty: as they are) have
    ``ordered`` as their sizes and are those of ``shape``. With ``strides`` channels are innermost.
    """

    name: str
    view: SlicedAccess | None
    extents: Mapping[str, int]
    order: tuple[int, ...]
    ordered: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def read(self, tensor: Tensor) -> Tensor:
        if self.view is not None:
            tensor = self.view.of(tensor, {}, self.extents)
        if self.order:
            tensor = tensor.permute(self.order)
        if tensor.shape != self.shape:
            tensor = tensor.reshape(self.shape)
        if not self.strides or tensor.stride() == self.strides:
            return tensor
        last = torch.channels_last if len(self.shape) == 4 else torch.channels_last_3d
        # the library looks at the strides of dimensions of size 1, too
        return tensor.contiguous(memory_format=last).as_strided(self.shape, self.strides)

    def asked(self, dtype: torch.dtype) -> Tensor:
        """What stands for it while it is computed: its shape and its layout are read alone."""
        if self.strides:
            return torch.empty_strided(self.shape, self.strides, dtype=dtype)
        return torch.empty((), dtype=dtype).expand(self.shape)

    def written(self, found: Tensor, shape: Sequence[int]) -> Tensor:
        """The reverse of it: a tensor of this shape, zero where nothing is written."""
        found = found if found.shape == self.ordered else found.reshape(self.ordered)
        if self.order:
            found = found.permute(sorted(range(len(self.order)), key=self.order.__getitem__))
        if self.view is None:
            return found.contiguous()
        result = found.new_zeros(shape)
        self.view.of(result, {}, self.extents).copy_(found)
        return result


@dataclass(frozen=True, slots=True, eq=False)
class Convolution:
    """The one of ``sides`` that stands at ``target``, of the other two."""

    problem: Problem
    dtype: torch.dtype
    sides: tuple[ConvolvedTensor, ...]
    target: int
    apart: tuple[int, ...]
    between: tuple[int, ...]
    groups: int
    name, slowness = "convolution", 0

    @property
    def why(self) -> str:
        return f"windows, multiplied with a kernel: {_WHICH[self.target]}, which a library runs"

    def __call__(self, call: HostCall) -> Tensor:
        result, long, kernel = (
            side.read(cast(as_tensor(call.values[side.name]), self.dtype)) if side.name else None
            for side in self.sides
        )
        found = self.computed(result, long, kernel)
        shape = [int(n) for n in self.problem.shape]
        return cast(self.sides[self.target].written(found, shape), self.problem.dtype)

    def computed(self, result: Tensor | None, long: Tensor | None, kernel: Tensor | None) -> Tensor:
        none, count = [0] * len(self.apart), self.groups
        if long is not None and kernel is not None:
            return torch.convolution(
                long, kernel, None, self.apart, none, self.between, False, none, count
            )
        found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            result,
            self.sides[LONG].asked(self.dtype) if long is None else long,
            self.sides[KERNEL].asked(self.dtype) if kernel is None else kernel,
            None,
            self.apart,
            none,
            self.between,
            False,
            none,
            count,
            [long is None, kernel is None, False],
        )
        return found[self.target - LONG]
