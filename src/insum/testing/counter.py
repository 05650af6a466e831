"""How often something was compiled, because a recompilation per size is what users suffer from
most.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Compilations:
    """Filled in when the ``with`` block ends; readable inside it too.

    Examples:
        >>> with count_compiles() as found:
        ...     pass
        >>> found.graphs, found.kernels
        (0, 0)
    """

    _graphs: int = 0
    _kernels: int = 0
    _open: bool = True

    @property
    def graphs(self) -> int:
        """Graphs that ``torch.compile`` compiled (its recompilations included)."""
        return _graphs() - self._graphs if self._open else self._graphs

    @property
    def kernels(self) -> int:
        """Fused kernels that insum compiled."""
        return _kernels() - self._kernels if self._open else self._kernels

    def _close(self) -> None:
        self._graphs, self._kernels, self._open = self.graphs, self.kernels, False

    def __repr__(self) -> str:
        return f"Compilations(graphs={self.graphs}, kernels={self.kernels})"


@contextmanager
def count_compiles() -> Iterator[Compilations]:
    """Count compilations in a ``with`` block.

    Yields:
        The counts.

    Examples:
        >>> import torch
        >>> double = torch.compile(lambda x: 2 * x, backend="eager", dynamic=True)
        >>> with count_compiles() as count:
        ...     _ = double(torch.ones(3)), double(torch.ones(4))
        >>> count
        Compilations(graphs=1, kernels=0)
    """
    count = Compilations(_graphs(), _kernels())
    try:
        yield count
    finally:
        count._close()


def _graphs() -> int:
    from insum.compat.compiler import compiled_graphs

    return compiled_graphs()


def _kernels() -> int:
    # not loaded: nothing was compiled, and counting must not load triton
    launch = sys.modules.get("insum.runtime.launch")
    count = getattr(launch, "compile_count", 0)
    return int(count() if callable(count) else count)
