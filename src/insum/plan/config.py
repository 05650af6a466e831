"""Config: what the planner or the tuner chooses for one kernel. Printable, pasteable, hashable."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from insum.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Config:
    """Tile sizes and launch options of one generated kernel.

    - ``m``, ``n``, ``k``: tile sizes of the three axes (powers of two; 1 where the axis is not used).
    - ``warps``, ``stages``: Triton's launch options.
    - ``split``: nonzeros at which a long segment is cut (0: never), or the number of pieces of a long reduction.
    - ``group``: tiles of the M axis that are visited before the next tile of the N axis (L2 reuse); 0 walks M first throughout.

    >>> Config(m=64, n=128, k=32)
    Config(m=64, n=128, k=32, warps=4, stages=2, split=0, group=0)
    """

    m: int = 1
    n: int = 1
    k: int = 1
    warps: int = 4
    stages: int = 2
    split: int = 0
    group: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or value < 0:
                raise SettingsError(f"config {field.name}={value!r}", expected="a non-negative integer")
        for name in ("m", "n", "k", "warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise SettingsError(f"config {name}={value}", expected="a power of two")

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def power_of_two(at_least: int) -> int:
    """The smallest power of two that is no smaller than the argument.

    >>> [power_of_two(n) for n in (0, 1, 3, 16, 17)]
    [1, 1, 4, 16, 32]
    """
    return 1 if at_least <= 1 else 1 << (at_least - 1).bit_length()
