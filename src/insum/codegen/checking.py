"""One kernel that looks whether index values are in range, and fills the output on the way.

It evaluates every indexed dimension of a statement at every point, as the statement's own kernel
does, and writes the first offence into a record that the host looks at later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from insum.codegen.arguments import (
    CALL,
    CLAIM,
    FLAGS,
    RECORD,
    Argument,
    Count,
    ExtentArgument,
    Length,
    Passed,
    Pointer,
    Stride,
)
from insum.codegen.emit import FLAG_COUNT, Kernel, signature
from insum.lang.expr import Access, Affine, Var, variables
from insum.plan.sizes import BASE, OUT
from insum.plan.uses import Use

#: Points, and elements of the output, that one program looks at.
BLOCK = 1024
#: What a report is marked with, so that half of one is none.
SEAL = 0x1A5A
REPORT = f'''@triton.jit
def insum_report(bad, at, value, use, claim_at, record_at, flags_at, call_number):
    """The first to find an offence of this program, and of all programs, writes it down."""
    if tl.max(bad.to(tl.int32), axis=0) > 0:
        tl.store(flags_at + call_number % {FLAG_COUNT}, call_number)
        if tl.atomic_cas(claim_at, 0, call_number) == 0:
            place = tl.min(tl.where(bad, at, 9223372036854775807), axis=0)
            found = tl.sum(tl.where(at == place, value, 0), axis=0)
            number = call_number.to(tl.int64)
            tl.store(record_at, number)
            tl.store(record_at + 1, tl.zeros([], tl.int64) + use)
            tl.store(record_at + 2, place)
            tl.store(record_at + 3, found)
            tl.store(record_at + 4, (number ^ use) ^ (place ^ found) ^ {SEAL})


'''


def emit_check(
    uses: Sequence[Use],
    padded: frozenset[str],
    numbers: frozenset[str],
    fill: str | int | None,
    name: str = "insum_check",
) -> Kernel:
    """The kernel for these uses; ``numbers`` are scalars that are passed as such, ``fill`` is what
    the output starts from, where it is filled: a number as text, or of how many dimensions it is
    that start from a base.
    """
    writer = _Check(padded, numbers)
    writer.start(fill)
    for number, use in enumerate(uses):
        writer.use(number, use)
    header = signature(name, writer.arguments, wide=True)
    text = "\n".join([*header, *(f"    {line}" for line in writer.lines)])
    return Kernel(name, f"{REPORT}{text}\n", tuple(writer.arguments.values()))


@dataclass
class _Check:
    padded: frozenset[str]
    numbers: frozenset[str]
    lines: list[str] = field(default_factory=list)
    arguments: dict[str, Argument] = field(default_factory=dict)
    serial: int = 0

    def arg(self, argument: Argument) -> str:
        self.arguments.setdefault(argument.name, argument)
        return argument.name

    def start(self, fill: str | int | None) -> None:
        self.lines.append(f"at = tl.program_id(0).to(tl.int64) * {BLOCK} + tl.arange(0, {BLOCK})")
        if fill is None:
            return
        out, count = self.arg(Pointer(OUT)), self.arg(Count("out_count"))
        if isinstance(fill, int):
            value = self.based(fill, f"at < {count}")
        else:
            value = f"tl.full([{BLOCK}], {fill}, {out}.dtype.element_ty)"
        self.lines.append(f"tl.store({out} + at, {value}, mask=at < {count})")

    def based(self, rank: int, mask: str) -> str:
        """What the output starts from, at the places of a new one."""
        rest, offset = "at", []
        for dim in reversed(range(rank)):
            size, stride = self.arg(Length(OUT, dim)), self.arg(Stride(BASE, dim, 1))
            offset.append(f"{rest if dim == 0 else f'({rest} % {size})'} * {stride}")
            if dim:
                rest = self.define(f"{rest} // {size}")
        pointer = " + ".join([self.arg(Pointer(BASE)), *reversed(offset)])
        pointer += "" if rank else " + at * 0"
        return self.define(f"tl.load({pointer}, mask={mask}, other=0)")

    def use(self, number: int, use: Use) -> None:
        places = self.unpacked(variables(use.index))
        value, present = self.index(use.index, places)
        name = OUT if use.is_target else use.access.tensor
        limit = self.arg(Length(name, use.dim))
        found = self.define(value)
        if use.wraps:
            found = self.define(f"tl.where({found} < 0, {found} + {limit}, {found})")
        bad = self.define(" & ".join([*present, f"(({found} < 0) | ({found} >= {limit}))"]))
        if use.padded:
            bad = self.define(f"{bad} & ({found} != -1)")
        record = ", ".join(self.arg(Pointer(p)) for p in (CLAIM, RECORD, FLAGS))
        call = self.arg(Passed(CALL, "i32"))
        self.lines.append(f"insum_report({bad}, at, {value}, {number}, {record}, {call})")

    def define(self, text: str) -> str:
        self.serial += 1
        name = f"value{self.serial}"
        self.lines.append(f"{name} = {text}")
        return name

    def unpacked(self, names: Sequence[str]) -> Mapping[str, str]:
        """The point that each lane looks at, as values of the variables; which lanes have one."""
        sizes = [self.arg(ExtentArgument(v)) for v in names]
        self.lines.append(f"there = at < {' * '.join(sizes) or '1'}")
        found, rest = {}, "at"
        for var, size in reversed(list(zip(names, sizes, strict=True))):
            last = var == names[0]
            found[var] = self.define(rest if last else f"{rest} % {size}")
            if not last:
                rest = self.define(f"{rest} // {size}")
        return found

    def index(self, index: Affine, places: Mapping[str, str]) -> tuple[str, list[str]]:
        """The value of an index expression, and the masks under which it is one."""
        parts, masks = [str(index.offset)] if index.offset else [], ["there"]
        if not index.terms:
            parts.append("at * 0")
        for by, atom in index.terms:
            if isinstance(atom, Var):
                text = places[atom.name]
            else:
                text, more = self.load(atom, places)
                masks += [mask for mask in more if mask not in masks]
            parts.append(text if by == 1 else f"{by} * {text}")
        return self.define(" + ".join(parts)), masks

    def load(self, access: Access, places: Mapping[str, str]) -> tuple[str, list[str]]:
        if access.tensor in self.numbers:
            number = self.arg(Passed(access.tensor, "i64"))
            return self.define(f"tl.zeros([{BLOCK}], tl.int64) + {number}"), []
        masks, offset = ["there"], []
        for dim, index in enumerate(access.indices):
            value, more = self.index(index, places)
            masks += [mask for mask in more if mask not in masks]
            if any(isinstance(atom, Access) for _, atom in index.terms):
                length = self.arg(Length(access.tensor, dim))
                masks.append(f"((0 <= {value}) & ({value} < {length}))")
            offset.append(f"{value} * {self.arg(Stride(access.tensor, dim, 1))}")
        pointer = " + ".join([self.arg(Pointer(access.tensor)), *offset])
        if not access.indices:
            pointer += " + at * 0"
        found = self.define(f"tl.load({pointer}, mask={' & '.join(masks)}, other=0).to(tl.int64)")
        if access.tensor in self.padded:
            masks = [*masks, f"({found} != -1)"]
        return found, masks
