"""Results beside that of a kernel: a place for every entry that its loops walk."""

from __future__ import annotations

from insum.codegen.contract import Contract
from insum.codegen.frame import Frame
from insum.codegen.functions import reduced
from insum.codegen.ir import Tile, chain, combine, store, union, where
from insum.codegen.reads import Reads
from insum.lang.expr import Access, variables
from insum.plan.plan import Beside


class EntryResults:
    """Writes them, of what is read for the kernel's own sums where both read it."""

    def __init__(self, frame: Frame, reads: Reads, contract: Contract) -> None:
        self.frame, self.reads, self.contract = frame, reads, contract
        self.plan = frame.plan

    def write(self) -> None:
        """One product each, while the entries of rows are walked."""
        for one in self.plan.beside:
            self.product(one)

    def product(self, one: Beside) -> None:
        ((target, factors),) = one.pattern.points
        parts = [self.reads.evaluate(factor, self.plan.accumulator) for factor in factors]
        value = self.frame.define("entry", combine(parts, "*"), 2)
        if not set(self.plan.roles.n) & set(variables(target)):
            value = self.sum_of_columns(self.contract.full(value, union((*value.axes, "N"))))
        self.store(one.tensor, target, value)

    def sum_of_columns(self, value: Tile) -> Tile:
        """Over the N axis, which one tile holds whole."""
        if "N" in self.frame.masks:
            value = where(self.frame.masks["N"], value, 0)
        return self.frame.define("sum", reduced("sum", value, "N"), value.stage)

    def store(self, tensor: str, target: Access, value: Tile) -> None:
        """What one entry has, at its place."""
        offset = self.reads.offset(Access(tensor, target.indices))
        axes = union(offset.axes, value.axes)
        masks = [m for axis, m in self.frame.masks.items() if axis in axes]
        pointer = self.frame.pointer(tensor)
        value = self.contract.full(value, axes).to(f"{pointer.name}.dtype.element_ty")
        address = chain("+", pointer, offset.over(axes))
        stage = 2 if self.plan.segment else 0
        self.frame.put(stage, store(address, value, combine(masks, "&") if masks else None))
