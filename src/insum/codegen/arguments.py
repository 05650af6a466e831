"""What a kernel is passed, in terms of the statement: `runtime.bound_launch` evaluates it for a
call, `runtime.unseen` for calls of other sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from insum.plan.sizes import BASE, FITTED, OUT, WORK

#: Arrays of a schedule, by what kernels call them.
START, END, ROW, COUNT = "<start>", "<end>", "<row>", "<count>"
#: Of the pieces of rows that were cut: the row that the last of them puts together, and the first.
CUT_ROW, CUT_START = "<cut_row>", "<cut_start>"
#: The same by rows that were cut: slots from one to another, for a row.
SUM_START, SUM_END, SUM_ROW = "<sum_start>", "<sum_end>", "<sum_row>"
#: Where offences are reported: flags of calls, who was first, the record; and the call's number.
FLAGS, CLAIM, RECORD, CALL = "<flags>", "<claim>", "<record>", "<call>"
_OWN = {
    OUT: "out_at",
    BASE: "base_at",
    WORK: "work_at",
    FITTED: "fitted_at",
    START: "seg_start_at",
    END: "seg_end_at",
    ROW: "seg_row_at",
    COUNT: "task_count_at",
    FLAGS: "flags_at",
    CLAIM: "claim_at",
    RECORD: "record_at",
}


def _is_own(tensor: str) -> bool:
    """Whether it is a name that no statement can spell."""
    return tensor.startswith("<")


@dataclass(frozen=True, slots=True)
class Pointer:
    """Where a tensor begins."""

    tensor: str

    @property
    def name(self) -> str:
        own = _OWN.get(self.tensor)
        return own or (f"{self.tensor[1:-1]}_at" if _is_own(self.tensor) else f"{self.tensor}_ptr")


@dataclass(frozen=True, slots=True)
class Stride:
    """A stride of a tensor, in units of so many elements."""

    tensor: str
    dim: int
    unit: int

    @property
    def name(self) -> str:
        name = f"{self.tensor[1:-1]}_stride" if _is_own(self.tensor) else f"{self.tensor}_s"
        return f"{name}{self.dim}"


@dataclass(frozen=True, slots=True)
class ExtentArgument:
    """The extent of a variable, in units."""

    var: str
    unit: int = 1

    @property
    def name(self) -> str:
        return f"{self.var}_size"


@dataclass(frozen=True, slots=True)
class Reciprocal:
    """What numbers below 2**31 are divided by the extent of a variable with (`reciprocal_of`)."""

    var: str

    @property
    def name(self) -> str:
        return f"{self.var}_reciprocal"


@dataclass(frozen=True, slots=True)
class Length:
    """The length of a dimension that is indexed through tensors."""

    tensor: str
    dim: int

    @property
    def name(self) -> str:
        return f"{'out_length' if self.tensor == OUT else f'{self.tensor}_d'}{self.dim}"


@dataclass(frozen=True, slots=True)
class Passed:
    """A scalar that comes with each call, by its type in the kernel: a Python number of the
    user, or the number of the call.
    """

    tensor: str
    type: str

    @property
    def name(self) -> str:
        return "call_number" if self.tensor == CALL else f"{self.tensor}_number"


@dataclass(frozen=True, slots=True)
class Count:
    """A number of the launch itself."""

    what: str

    @property
    def name(self) -> str:
        return self.what


Argument: TypeAlias = Pointer | Stride | ExtentArgument | Reciprocal | Length | Passed | Count


def reciprocal_of(size: int) -> int:
    """A factor of 32 bits, and above it how far to shift: of ``n * factor >> 32`` and ``n`` the
    sum, shifted, is ``n // size``, for a ``size`` and an ``n`` below 2**31.

    >>> factor, shift = reciprocal_of(63) % 2**32, reciprocal_of(63) >> 32
    >>> [(n * factor >> 32) + n >> shift for n in (0, 62, 63, 6300)]
    [0, 0, 1, 100]
    """
    shift = max(0, size - 1).bit_length()
    return (shift << 32) + ((1 << 32) * ((1 << shift) - size)) // max(1, size) + 1


def reciprocal_text(size: str) -> str:
    """The same as an expression of Python, without a call of a function of ours.

    >>> [eval(reciprocal_text(str(n))) == reciprocal_of(n) for n in (0, 1, 7, 64, 1000)]
    [True, True, True, True, True]
    """
    shift = f"(shift := max(0, {size} - 1).bit_length())"
    return f"(({shift} << 32) + ({1 << 32} * ((1 << shift) - {size})) // max(1, {size}) + 1)"


def annotation(argument: Argument, *, wide: bool) -> str:
    """The type of an argument where it is no pointer; numbers are then never specialised."""
    match argument:
        case Pointer():
            return ""
        case Passed(_, type):
            return type
        case Reciprocal():
            return "i64"
        case _:
            return "i64" if wide else "i32"
