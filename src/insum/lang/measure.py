"""What binding finds out about sizes, as straight-line code: extents and the output's shape for
tensors of kinds that were bound before.

Binding names what is wrong; this code only notices that something is, and leaves the rest to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from insum.lang.expr import Access, Affine, Var, accesses, variables
from insum.lang.problem import Problem

#: Of tensors by name, and of sizes that were given: extents and shape, or None where they do not
#: fit together.
Measure: TypeAlias = Callable[
    [Mapping[str, Any], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]] | None
]
#: Names of sizes that a caller gives, and for a shape how many there are.
SizeKeys: TypeAlias = tuple[tuple[str | int, int | None], ...]


def measure_of(problem: Problem, keys: SizeKeys) -> Measure:
    """The code for a problem that was bound with sizes under these names.

    >>> import torch
    >>> from insum.lang.bind import bind
    >>> from insum.lang.parser import parse
    >>> problem = bind(parse("y[i] = A[i,j] * x[j]"), {"A": torch.ones(2, 3), "x": torch.ones(3)})
    >>> measure = measure_of(problem, ())
    >>> measure({"A": torch.ones(5, 7), "x": torch.ones(7)}, ())
    ((5, 7), (5,))
    >>> measure({"A": torch.ones(5, 7), "x": torch.ones(8)}, ()) is None
    True
    """
    return _MeasureWriter(problem).write(keys)


class _MeasureWriter:
    def __init__(self, problem: Problem) -> None:
        self.problem, self.target = problem, problem.statement.target
        self.lines: list[str] = []
        self.shapes: dict[str, str] = {}
        self.seen: dict[str, str] = {}
        self.dims: list[str | None] = [None] * len(self.target.indices)

    def write(self, keys: SizeKeys) -> Measure:
        self.read_sizes(keys)
        for access in self.accesses():
            if access is not self.target or self.target.tensor in self.problem.kinds:
                self.read_extents(access)
        shape = self.shape()
        extents = [self.seen[name] for name in self.problem.extents]
        for access in self.accesses():
            for dim, index in enumerate(access.indices):
                self.check_affine(access, dim, index)
        itemsize = self.problem.dtype.itemsize
        self.require(f"{' * '.join([*shape, str(itemsize)])} < {2**63}")
        self.lines.append(f"return ({_tuple(extents)}, {_tuple(shape)})")
        body = "\n".join(f"    {line}" for line in self.lines)
        names: dict[str, Any] = {}
        exec(f"def measure(v, g):\n{body}\n", names)
        found: Measure = names["measure"]
        return found

    def accesses(self) -> list[Access]:
        target = self.target
        inner = [a for index in target.indices for a in accesses(index)]
        return [target, *inner, *accesses(self.problem.statement.value)]

    # --- places ---

    def size(self, tensor: str, dim: int) -> str:
        if tensor not in self.shapes:
            name = self.shapes[tensor] = f"s{len(self.shapes)}"
            self.lines.append(f"{name} = v[{tensor!r}].shape")
        return f"{self.shapes[tensor]}[{dim}]"

    def require(self, condition: str) -> None:
        self.lines.append(f"if not ({condition}): return None")

    def see(self, var: str, size: str) -> None:
        if var in self.seen:
            self.require(f"{self.seen[var]} == {size}")
            return
        name = self.seen[var] = f"x{len(self.seen)}"
        self.lines.append(f"{name} = {size}")

    def set_dim(self, dim: int, size: str) -> None:
        if (known := self.dims[dim]) is not None:
            self.require(f"{known} == {size}")
        else:
            self.dims[dim] = size

    def read_sizes(self, keys: SizeKeys) -> None:
        place = 0
        for key, length in keys:
            for dim in range(length or 0):
                self.require(f"0 <= g[{place}] < {2**63}")
                self.set_dim(dim, f"g[{place}]")
                place += 1
            if length is None:
                self.require(f"0 <= g[{place}] < {2**63}")
                self.read_size(key, f"g[{place}]")
                place += 1

    def read_size(self, key: str | int, size: str) -> None:
        if isinstance(key, int) or key.isascii() and key.isdigit():
            return self.set_dim(int(key), size)
        if key in self.problem.extents:
            return self.see(key, size)
        text = key.replace(" ", "")
        for dim, index in enumerate(self.target.indices):
            atom = index.atom
            if str(index).replace(" ", "") == text or (
                isinstance(atom, Access) and atom.tensor == key
            ):
                self.set_dim(dim, size)

    def read_extents(self, access: Access) -> None:
        for dim, index in enumerate(access.indices):
            if access is self.target:
                self.set_dim(dim, self.size(access.tensor, dim))
            elif index.var is not None:
                self.see(index.var, self.size(access.tensor, dim))

    def shape(self) -> list[str]:
        found = []
        for dim, index in enumerate(self.target.indices):
            size = self.dims[dim]
            if size is not None and index.var is not None:
                self.see(index.var, size)
            found.append(self.seen[str(index.var)] if size is None else size)
        return found

    def check_affine(self, access: Access, dim: int, index: Affine) -> None:
        if index.var is not None or not all(isinstance(a, Var) for _, a in index.terms):
            return
        if access is self.target:
            var = self.dims[dim]
            limit = var if var is not None else self.seen[str(index.var)]
        else:
            limit = self.size(access.tensor, dim)
        low = high = str(index.offset)
        names = [self.seen[v] for v in variables(index)]
        for by, atom in index.terms:
            assert isinstance(atom, Var)
            reach = f" + {by} * ({self.seen[atom.name]} - 1)"
            low, high = (low + reach, high) if by < 0 else (low, high + reach)
        empty = " or ".join(f"{name} == 0" for name in names)
        inside = f"0 <= {low} and {high} < {limit}"
        self.require(f"{empty} or {inside}" if empty else inside)


def _tuple(parts: list[str]) -> str:
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
