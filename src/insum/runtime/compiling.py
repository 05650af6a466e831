"""Compiling kernels: for the device that is here, for targets that are not, and as a worker of
`runtime.workers`.

A worker runs this as a file of its own: nothing of insum, and no torch, is imported here.
"""

from __future__ import annotations

import hashlib
import json
import linecache
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias, TypeVar

C = TypeVar("C")

_compiled = 0  # kernels, for the device that is here
#: Between the heading of a file and its kernel.
IMPORTS = "\nimport triton\nimport triton.language as tl\n\n\n"


def kept_text(path: Path) -> str | None:
    """The text of a file that an earlier process wrote: a heading, whose sizes are those that it
    saw first, and the kernel that the file's name speaks of. None where it is anything else, as
    after a full disk.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    header, _, source = text.partition(IMPORTS)
    plain = re.fullmatch(r'"""[^"\\]*"""', header) is not None
    return text if plain and path.stem == f"k{key_of(source)}" else None


def key_of(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()[:20]


def module_of(path: Path, text: str) -> ModuleType:
    """The module of a text that was looked at: neither the file nor compiled code beside it is read
    again, by Python or by Triton, which asks for the source of its functions.
    """
    module = ModuleType(f"insum_generated.{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))
    exec(compile(text, str(path), "exec", dont_inherit=True), module.__dict__)
    return module


#: One kernel to compile: the file of its source, its name, the types of its arguments, which
#: pointers are not aligned (a bit each), warps and stages.
Job: TypeAlias = tuple[str, str, list[str], int, int, int]

REPLY = "insum-worker "


def serve() -> None:
    """The worker: compile what standard input asks for, as if the device were here; torch is kept
    out, for it takes seconds to import.
    """
    asked = json.loads(sys.stdin.read())
    sys.modules["torch"] = None  # type: ignore[assignment]
    _pretend(asked["target"])
    for position, work in asked["jobs"]:
        try:
            _compile_job(work)
            answer = ""
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"[:300]
        print(REPLY + json.dumps([position, answer]), flush=True)


def _compile_job(work: Job) -> None:
    path, name, types, unaligned, warps, stages = work
    text = kept_text(Path(path))
    if text is None:
        raise ValueError(f"{path} is not as it was written")
    function = getattr(module_of(Path(path), text), name)
    compile_kernel(function, types, unaligned, warps, stages)


def _pretend(target: Sequence[Any]) -> None:
    """Let Triton see a device that is not opened: compiling needs no more than its name."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Absent:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> Any:
            return GPUTarget(*target)

    driver.set_active(Absent())


def compiled_here() -> int:
    """How many kernels were compiled in this process for its own device."""
    return _compiled


def compile_kernel(
    function: Any, types: Sequence[str], unaligned: int, warps: int, stages: int, target: Any = None
) -> Any:
    """Compile a kernel for arguments of these types; pointers are to 16 bytes but for those whose
    bit is set, counted from the last pointer. Numbers are not specialised.
    """
    import triton
    from triton.compiler import ASTSource

    global _compiled
    _compiled += target is None
    signature = dict(zip(function.arg_names, types, strict=True))
    pointers = [place for place, type in enumerate(types) if type.startswith("*")]
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for bit, place in enumerate(reversed(pointers))
        if not unaligned >> bit & 1
    }
    source = ASTSource(fn=function, signature=signature, constexprs={}, attrs=attributes)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=target, options=options)


#: Bytes that a thread may keep in memory for want of registers, and warps up to which a program
#: gets more of them instead.
MOST_SPILLED, MOST_WARPS = 160, 16
#: More than any kernel spills: one whose numbers may be mixed up, and one that the device cannot
#: load, whatever its warps.
MIXED_UP, UNLOADABLE = 1 << 40, sys.maxsize
#: A number that is moved up by so much, and the upper half of something.
_MOVED_UP, _UPPER_HALF = re.compile(r"mul\.wide\.u32\s+%rd\d+, %r\d+, (\d+);"), "{_, %r"


def with_enough_warps(compiled: Callable[[int], C], flaw: Callable[[C], int], warps: int) -> C:
    """What is ``compiled`` for so many warps; where that has a ``flaw``, as bytes that are spilled,
    for twice as many, among which the same tile is divided, as long as it helps and can be
    compiled.

    >>> with_enough_warps(lambda warps: warps, lambda warps: {4: 900, 8: 200}.get(warps, 0), 4)
    16
    >>> with_enough_warps(lambda warps: warps, lambda warps: 200, 4)
    4
    >>> with_enough_warps(lambda warps: warps, lambda warps: MIXED_UP if warps < 4 else 100, 1)
    4
    """
    found = compiled(warps)
    left = flaw(found)
    while MOST_SPILLED < left < UNLOADABLE and 2 * warps <= MOST_WARPS:
        warps *= 2
        try:
            other = compiled(warps)
            remaining = flaw(other)
        except Exception:  # what there is runs, if slowly
            break
        if remaining < left:
            found, left = other, remaining
        elif left != MIXED_UP:
            break
    return found


def mixes_numbers_up(assembly: str) -> bool:
    """Whether a kernel may take one number for another. The LLVM of Triton 3.6 moves a thread's
    number and a tile's into one of 64 bits, and then takes the upper half, which has bits of both,
    for the tile's alone: some columns are read twice, and others not at all. It was seen of single
    warps, whose threads' numbers need no mask; Triton 3.7 does not do so.

    >>> moved = "mul.wide.u32 \t%rd45, %r49, 2147483648;"
    >>> mixes_numbers_up(moved + "or.b64 \t%rd46, %rd45, %rd44; mov.b64 \t{_, %r58}, %rd46;")
    True
    >>> mixes_numbers_up("mul.wide.u32 \t%rd1, %r2, 8; mov.b64 \t{_, %r3}, %rd1;")
    False
    """
    if _UPPER_HALF not in assembly:
        return False
    factors = (int(number) for number in _MOVED_UP.findall(assembly))
    return any(factor >= 1 << 16 and factor & (factor - 1) == 0 for factor in factors)


@dataclass(frozen=True, slots=True)
class CompilerReport:
    """What the compiler says of a kernel for one target, without running it."""

    target: str
    assembly: dict[str, str]
    shared: int
    registers: int
    stack: int  # bytes of local memory: above zero, registers were spilled
    warps: int

    @property
    def flaw(self) -> int:
        return MIXED_UP if mixes_numbers_up(self.assembly.get("ptx", "")) else self.stack

    def uses(self, instruction: str) -> bool:
        return any(instruction in text for text in self.assembly.values())


#: Targets that continuous integration compiles for: Ampere, Hopper, Blackwell and CDNA 3.
TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}


def compile_for(
    function: Any, types: Sequence[str], target: str, *, warps: int, stages: int, unaligned: int = 0
) -> CompilerReport:
    """Compile a kernel for a target that need not be here, as a launch would."""
    from triton.backends.compiler import GPUTarget

    binary = compile_kernel(function, types, unaligned, warps, stages, GPUTarget(*TARGETS[target]))
    registers, stack = _resources(binary, target)
    texts = {key: text for key, text in binary.asm.items() if isinstance(text, str)}
    return CompilerReport(target, texts, binary.metadata.shared, registers, stack, warps)


def _resources(binary: Any, target: str) -> tuple[int, int]:
    """Registers per thread and bytes of local memory, read from the binary."""
    if target.startswith("gfx"):
        text = binary.asm["amdgcn"]
        found = {
            key: re.search(rf"\.{key}:\s+(\d+)", text)
            for key in ("vgpr_count", "private_segment_fixed_size")
        }
        return tuple(int(m.group(1)) if m else 0 for m in found.values())  # type: ignore[return-value]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        report = subprocess.run(
            [_cuobjdump(), "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    registers, stack = re.search(r"REG:(\d+)", report), re.search(r"STACK:(\d+)", report)
    return int(registers.group(1)) if registers else 0, int(stack.group(1)) if stack else 0


def _cuobjdump() -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")
