"""Kernels that are written by hand, for what prologues do on the device: loaded, compiled and
launched like generated ones.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from insum.codegen.kernel import Kernel
from insum.compat import streams
from insum.runtime import binaries, compiling, launch

#: Elements that one program of most of these kernels takes.
BLOCK = 1024
_dtype_of = operator.attrgetter("dtype")


class Handwritten:
    """A kernel of fixed text. Tensors come first among its arguments, then integers of 64 bits."""

    def __init__(self, name: str, source: str, *, warps: int = 4, stages: int = 1) -> None:
        self.name, self.source, self.warps, self.stages = name, source, warps, stages
        head = source.partition(f"def {name}(")[2].partition(":\n")[0]
        #: How many tensors there are: what has no type is a pointer.
        self.tensors = sum(":" not in one for one in head.rstrip(" )\n,").split(","))
        self._launchers: dict[tuple[Any, ...], launch.Launcher] = {}

    def __call__(self, programs: int, *arguments: Tensor | int) -> None:
        """Launch so many programs, on the device of the first tensor."""
        if not programs:
            return
        if launch.interpreting():
            self._function()[(programs,)](*arguments)
            return
        given: Any = arguments[: self.tensors]
        if given[0].device.index != streams.device_now():
            with torch.cuda.device(given[0].device):
                return self(programs, *arguments)
        addresses, unaligned = [*map(Tensor.data_ptr, given)], 0
        if functools.reduce(operator.or_, addresses) & 15:
            for address in addresses:
                unaligned = 2 * unaligned + (address & 15 != 0)
        kinds = tuple(map(_dtype_of, given))
        found = self._launchers.get((unaligned, kinds))
        if found is None:
            found = self._compiled(kinds, len(arguments), unaligned)
            self._launchers[unaligned, kinds] = found
        found(programs, [*addresses, *arguments[self.tensors :]])

    def types(self, kinds: Sequence[torch.dtype], count: int) -> tuple[str, ...]:
        """The types of all arguments, of the dtypes of the tensors among them."""
        pointers = [launch.pointer_type(kind) for kind in kinds]
        return (*pointers, *["i64"] * (count - len(kinds)))

    def _compiled(
        self, kinds: Sequence[torch.dtype], count: int, unaligned: int
    ) -> launch.Launcher:
        function, types = self._function(), self.types(kinds, count)
        options = unaligned, self.warps, self.stages
        compiled = binaries.recalled(function, types, *options)
        if compiled is None:
            compiled = compiling.compile_kernel(function, types, *options)
            binaries.note(compiled, function, types, *options)
        return launch.launcher_of(compiled)

    def _function(self) -> Any:
        kernel = Kernel(self.name, self.source, ())
        return launch.load(kernel, f'"""{self.name}: written by hand."""')


def on_device(tensor: Tensor) -> bool:
    """Whether these kernels can work on a tensor."""
    if launch.available():
        return False
    return tensor.is_cuda or launch.interpreting() and tensor.is_cpu


def blocks(count: int, block: int = BLOCK) -> int:
    return -(-count // block)
