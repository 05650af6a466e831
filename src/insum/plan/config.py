"""Config: what the planner or the tuner chooses for one kernel. Printable, pasteable, hashable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TypeAlias

from insum.errors import SettingsError


@dataclass(frozen=True, slots=True, repr=False)
class Config:
    """Tile sizes and launch options of one generated kernel.

    Args:
        m: Tile size of the first side of a product, a power of two; 1 where the axis is not used.
        n: That of the other side.
        k: That of the summed axis.
        warps: Warps of a program, Triton's ``num_warps``; a kernel that spills registers has more.
        stages: Stages of its pipelines, Triton's ``num_stages``.
        split: Nonzeros at which a long row is cut (0: never), or the number of pieces of a long
            reduction (0: as many as fill the device).
        group: Tiles along the slower axis of the grid that are visited before the next one along
            the faster axis, which then come out of L2; 0: all of the faster axis first.
        swap: Whether the two sides of a matrix product are exchanged: 1 yes, 0 no, -1 where that
            puts the wide side on M.

    Examples:
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
    swap: int = -1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if (
                not isinstance(value, int)
                or isinstance(value, bool)
                or value < (-1 if field.name == "swap" else 0)
            ):
                raise SettingsError(
                    f"config {field.name}={value!r}",
                    expected="a non-negative integer" if field.name != "swap" else "1, 0 or -1",
                )
        if self.swap > 1:
            raise SettingsError(f"config swap={self.swap}", expected="1, 0 or -1")
        for name in ("m", "n", "k", "warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise SettingsError(f"config {name}={value}", expected="a power of two")
        if self.warps > 32 or not 1 <= self.stages <= 16:
            raise SettingsError(
                f"config warps={self.warps}, stages={self.stages}",
                expected="at most 32 warps, and 1 to 16 stages",
            )

    def __repr__(self) -> str:
        shown = [
            f"{name}={value}"
            for name, value in asdict(self).items()
            if name != "swap" or value >= 0
        ]
        return f"Config({', '.join(shown)})"


#: What is chosen for one product: a config for each kind of launch. Tiles and unrolled patterns
#: have one; rows of a segmented output two, for short rows, and for long ones and pieces of those
#: that are cut: at the length that is ``split`` of the first. They are in one launch where there is
#: little to do.
Choice: TypeAlias = tuple[Config, ...]


def choice_of(config: Config | Sequence[Config] | None) -> Choice | None:
    """What a user gave as ``config=``, as a tuple.

    >>> choice_of(Config(m=16, n=16, k=16))
    (Config(m=16, n=16, k=16, warps=4, stages=2, split=0, group=0),)
    """
    if config is None:
        return None
    given = (
        (config,)
        if isinstance(config, Config)
        else tuple(config)
        if isinstance(config, Sequence)
        else (config,)
    )
    if not given or not all(isinstance(one, Config) for one in given):
        raise SettingsError(
            f"config is {config!r}",
            expected="an insum.Config, or a tuple of them",
            remedy="config=insum.Config(m=64, n=64, k=32)",
        )
    return given


def choice_text(choice: Choice | None) -> str:
    """A choice as one short string, for places that take nothing else; string formatting only,
    which tracers fold.

    >>> choice_from(choice_text((Config(m=64, n=16, k=32),)))
    (Config(m=64, n=16, k=32, warps=4, stages=2, split=0, group=0),)
    """
    return (
        ""
        if choice is None
        else ";".join(
            [f"{c.m},{c.n},{c.k},{c.warps},{c.stages},{c.split},{c.group},{c.swap}" for c in choice]
        )
    )


def choice_from(text: str) -> Choice | None:
    """The reverse of `choice_text`."""
    return tuple(Config(*map(int, one.split(","))) for one in text.split(";")) if text else None


def shown(choice: Choice) -> str:
    """A choice as it can be pasted behind ``config=``.

    >>> shown((Config(m=16, n=16, k=16),))
    'insum.Config(m=16, n=16, k=16, warps=4, stages=2, split=0, group=0)'
    """
    each = [f"insum.{one}" for one in choice]
    return each[0] if len(each) == 1 else f"({', '.join(each)})"
