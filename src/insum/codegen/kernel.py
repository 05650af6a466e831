"""A generated kernel: its name, its text and its arguments; and what the text depends on besides
plan and config.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from insum.codegen.arguments import Argument, annotation
from insum.codegen.functions import prelude
from insum.codegen.ir import KernelLine
from insum.codegen.printing import lines_of
from insum.lang.expand import expand
from insum.lang.parser import parse
from insum.plan.plan import Plan

#: Characters of a kernel's name, so that files and profilers can show it.
LONGEST_NAME = 96
#: Characters of a line of arguments.
LONGEST_LINE = 90


@dataclass(frozen=True, slots=True)
class Shape:
    """What the text depends on besides plan and config: which axes divide evenly, and extents that
    became constants.
    """

    even_m: bool = False
    even_n: bool = False
    even_k: bool = False
    inner: int = 1  # extent of the inner variable of a flattened K axis
    onehot: int = 0  # places of the register tile for the dimension that is kept in registers
    k_tiles: int = 0  # how many tiles cover the K axis, where that is the same for every size
    single_k: bool = False  # the K axis is covered by one tile and nothing else is looped over
    pieces: bool = False  # a long reduction is cut into pieces, which meet in atomics
    outer: bool = False  # they are parts of the outermost loop around the contraction
    apart: bool = False  # or rather go to a workspace, piece by piece
    counted: bool = False  # how many tasks there are is known on the device alone
    waits: bool = False  # pieces of a row are summed by the program of the last
    part: bool = False  # the kernel is a part of one, and given the number of its program
    units: tuple[tuple[str, int], ...] = ()  # extents that are passed in units


@dataclass(frozen=True, slots=True)
class Kernel:
    """Generated source, and the order in which arguments are passed."""

    name: str
    source: str
    arguments: tuple[Argument, ...]


#: How operators are spelled in names; products and assignments are not.
_WORDS = {"+": "plus", "-": "minus", "/": "over", "**": "to_the", "<": "lt", ">": "gt"}
_WORDS |= {"<=": "le", ">=": "ge", "==": "eq", "!=": "ne"}


def kernel_name(plan: Plan, suffix: str = "") -> str:
    """What profilers and error messages show of a kernel: its statement, or the product of it that
    this is, and the strategy, in letters. ``suffix`` tells it from others of the same plan.
    """
    left, sign, _ = plan.statement.partition("=")
    several = len(expand(parse(plan.statement))) > 1
    text = f"{left}{sign} {plan.value}" if several else plan.statement
    return spelled(text, plan.strategy, *([suffix] if suffix else []))


def spelled(statement: str, *suffixes: str) -> str:
    """A statement in letters. Two underscores, which are always there, keep it apart from functions
    that kernels call; a digest tells long ones apart.

    >>> spelled("C[AM[p],n] += AV[p] * B[AK[p],n]", "atomic")
    'insum_C_AM_p_n__AV_p__B_AK_p_n__atomic'
    >>> spelled("y[r[e]] max= x[c[e]] - 1", "segment", "pieces")
    'insum_y_r_e_max__x_c_e_minus_1__segment__pieces'
    """
    text = re.sub(r"[-+]?=(?!=)", "__", re.sub(r"(?<=\w)\s+(?=max|min)", "_", statement), count=1)
    text = re.sub(r"\*\*|[<>=!]=|[-+/<>]", lambda found: f" {_WORDS[found[0]]} ", text)
    parts = [re.sub(r"\W+", "_", part).strip("_") for part in re.split(r"\*|__", text)]
    name, room = "__".join(parts), LONGEST_NAME - sum(len(one) + 2 for one in ("insum", *suffixes))
    if len(name) > room:
        digest = f"_{zlib.crc32(statement.encode()):08x}"
        name = name[: room - len(digest)].rstrip("_") + digest
    return "__".join([f"insum_{name}", *suffixes])


def kernel_of(
    name: str,
    arguments: Mapping[str, Argument],
    body: Iterable[KernelLine],
    *,
    wide: bool,
    helpers: Iterable[str] = (),
) -> Kernel:
    """A kernel of these statements; ``wide``: numbers have 64 bits, ``helpers``: functions of its
    own that it calls, as text.
    """
    text, own = "\n".join(lines_of(body, "    ")), "\n".join(helpers)
    head = "\n".join(_signature(name, arguments, wide=wide))
    parts = [*prelude(own + text), *([own] if own else []), head, text]
    return Kernel(name, "\n".join(parts) + "\n", tuple(arguments.values()))


def function_of(name: str, arguments: Iterable[str], body: Iterable[KernelLine]) -> list[str]:
    """The text of a function that kernels call."""
    listed = (f"    {line}," for line in _wrapped(arguments))
    return ["@triton.jit", f"def {name}(", *listed, "):", *lines_of(body, "    "), "", ""]


def _signature(name: str, arguments: Mapping[str, Argument], *, wide: bool) -> list[str]:
    """The head of a kernel. Numbers have fixed types and are never specialised: no size is compiled
    for.
    """
    types = {n: annotation(argument, wide=wide) for n, argument in arguments.items()}
    numbers = ", ".join(f'"{n}"' for n, type in types.items() if type)
    shown = [f'{n}: "{type}"' if type else n for n, type in types.items()]
    decorator = f"@triton.jit(do_not_specialize=[{numbers}])" if numbers else "@triton.jit"
    return [decorator, f"def {name}(", *(f"    {line}," for line in _wrapped(shown)), "):"]


def _wrapped(arguments: Iterable[str]) -> list[str]:
    lines, line = [], ""
    for argument in arguments:
        if line and len(line) + len(argument) + 2 > LONGEST_LINE:
            lines.append(line)
            line = ""
        line = f"{line}, {argument}" if line else argument
    return [*lines, line] if line else lines
