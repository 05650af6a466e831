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
from insum.codegen.emit import FLAG_COUNT
from insum.codegen.ir import (
    Assignment,
    Effect,
    KernelLine,
    Named,
    Tile,
    apply,
    as_tile,
    chain,
    distinct,
    load,
    product,
    store,
    where,
)
from insum.codegen.kernel import Kernel, kernel_of
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
    return kernel_of(name, writer.arguments, writer.lines, wide=True, helpers=[REPORT])


#: The axis of a program's points.
_POINTS = ("K",)


@dataclass
class _Check:
    padded: frozenset[str]
    numbers: frozenset[str]
    lines: list[KernelLine] = field(default_factory=list)
    arguments: dict[str, Argument] = field(default_factory=dict)
    serial: int = 0
    at: Tile = Named("at", _POINTS)
    there: Tile = Named("there", _POINTS)  # points that there are

    def arg(self, argument: Argument) -> Named:
        self.arguments.setdefault(argument.name, argument)
        return Named(argument.name)

    def start(self, fill: str | int | None) -> None:
        first = apply("tl.program_id", 0).to("tl.int64") * BLOCK
        self.lines.append(Assignment("at", first + apply("tl.arange", 0, BLOCK, over=_POINTS)))
        if fill is None:
            return
        out, count = self.arg(Pointer(OUT)), self.arg(Count("out_count"))
        if isinstance(fill, int):
            value = self.based(fill, self.at < count)
        else:
            dtype = f"{out.name}.dtype.element_ty"
            value = apply("tl.full", f"[{BLOCK}]", fill, dtype, over=_POINTS)
        self.lines.append(store(out + self.at, value, self.at < count))

    def based(self, rank: int, mask: Tile) -> Tile:
        """What the output starts from, at the places of a new one."""
        rest, offset = self.at, list[Tile]()
        for dim in reversed(range(rank)):
            size, stride = self.arg(Length(OUT, dim)), self.arg(Stride(BASE, dim, 1))
            offset.append((rest % size if dim else rest) * stride)
            if dim:
                rest = self.define(rest // size)
        places = reversed(offset) if rank else [self.at * 0]
        return self.define(load(chain("+", self.arg(Pointer(BASE)), *places), mask, 0))

    def use(self, number: int, use: Use) -> None:
        places = self.unpacked(variables(use.index))
        value, present = self.index(use.index, places)
        name = OUT if use.is_target else use.access.tensor
        limit = self.arg(Length(name, use.dim))
        found = self.define(value)
        if use.wraps:
            found = self.define(where(found < 0, found + limit, found))
        bad = self.define(chain("&", *present, ((found < 0) | (found >= limit))))
        if use.padded:
            bad = self.define(bad & found.differs(-1))
        record = [self.arg(Pointer(p)) for p in (CLAIM, RECORD, FLAGS)]
        call = self.arg(Passed(CALL, "i32"))
        report = apply("insum_report", bad, self.at, value, number, *record, call, over=())
        self.lines.append(Effect(report))

    def define(self, value: Tile) -> Named:
        self.serial += 1
        name = f"value{self.serial}"
        self.lines.append(Assignment(name, value))
        return Named(name, value.axes)

    def unpacked(self, names: Sequence[str]) -> Mapping[str, Tile]:
        """The point that each lane looks at, as values of the variables; which lanes have one."""
        sizes = [self.arg(ExtentArgument(v)) for v in names]
        self.lines.append(Assignment("there", self.at < product(sizes)))
        found, rest = {}, self.at
        for var, size in reversed(list(zip(names, sizes, strict=True))):
            last = var == names[0]
            found[var] = self.define(rest if last else rest % size)
            if not last:
                rest = self.define(rest // size)
        return found

    def index(self, index: Affine, places: Mapping[str, Tile]) -> tuple[Tile, list[Tile]]:
        """The value of an index expression, and the masks under which it is one."""
        masks: list[Tile] = [self.there]
        parts = [as_tile(index.offset)] if index.offset else []
        if not index.terms:
            parts.append(self.at * 0)
        for by, atom in index.terms:
            if isinstance(atom, Var):
                value = places[atom.name]
            else:
                value, more = self.load(atom, places)
                masks += more
            parts.append(value if by == 1 else as_tile(by) * value)
        return self.define(chain("+", *parts)), distinct(masks)

    def load(self, access: Access, places: Mapping[str, Tile]) -> tuple[Tile, list[Tile]]:
        if access.tensor in self.numbers:
            number = self.arg(Passed(access.tensor, "i64"))
            zeros = apply("tl.zeros", f"[{BLOCK}]", "tl.int64", over=_POINTS)
            return self.define(zeros + number), []
        masks: list[Tile] = [self.there]
        offset = []
        for dim, index in enumerate(access.indices):
            value, more = self.index(index, places)
            masks += more
            if any(isinstance(atom, Access) for _, atom in index.terms):
                length = self.arg(Length(access.tensor, dim))
                masks.append(((as_tile(0) <= value) & (value < length)).grouped())
            offset.append(value * self.arg(Stride(access.tensor, dim, 1)))
        masks = distinct(masks)
        address = chain("+", self.arg(Pointer(access.tensor)), *(offset or [self.at * 0]))
        found = self.define(load(address, chain("&", *masks), 0).to("tl.int64"))
        if access.tensor in self.padded:
            masks = [*masks, found.differs(-1)]
        return found, masks
