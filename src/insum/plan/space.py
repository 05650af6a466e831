"""The configs that are worth trying for a plan: legal ones, within the device's shared memory and
registers, best by the model first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from insum.plan import cost, legal, tiling
from insum.plan.config import Choice, Config
from insum.plan.orientation import oriented
from insum.plan.plan import Plan
from insum.plan.sizes import power_of_two

#: Registers that a thread may be estimated to need before a config counts as spilling.
MOST_REGISTERS = 230
#: Of one shape of tile at most so many variants of warps and stages are tried before the next
#: shape's.
VARIANTS = 4


@dataclass(frozen=True, slots=True)
class SpaceLimits:
    """What the space is cut to: the device, the load, how many candidates, and whether sides may be
    exchanged.
    """

    device: cost.Device
    load: cost.Load
    count: int = 48
    swap: bool = True


def candidates(
    plan: Plan, extents: Mapping[str, int], limits: SpaceLimits, guess: Choice
) -> list[Choice]:
    """Choices to try: the first guess, then in turn its neighbours and the rest of the space, each
    as the model ranks them.
    """
    near = neighbours(plan, extents, limits, guess)
    far = _best(plan, extents, limits, _every(plan, extents, limits, guess), limits.count)
    in_turn = (
        choice for pair in itertools.zip_longest(far, near) for choice in pair if choice is not None
    )
    return list(dict.fromkeys([guess, *in_turn]))[: limits.count]


def neighbours(
    plan: Plan, extents: Mapping[str, int], limits: SpaceLimits, centre: Choice
) -> list[Choice]:
    """Choices that differ from ``centre`` in one number, which is doubled or halved."""
    return _best(plan, extents, limits, _around(centre), limits.count)


def crossed(timed: Sequence[tuple[Choice, float]]) -> Choice | None:
    """Where short and long rows have configs of their own: the best of each, taken from trials that
    changed only one of them.
    """
    if not timed or len(timed[0][0]) != 2:
        return None
    base = timed[0][0]
    shorts = [(t, c[0]) for c, t in timed if c[1] == base[1] and c[0].split == base[0].split]
    longs = [(t, c[1]) for c, t in timed if c[0] == base[0]]
    splits = [
        (t, c[0].split)
        for c, t in timed
        if c[1] == base[1] and replace(c[0], split=base[0].split) == base[0]
    ]
    short, long = min(shorts, key=lambda p: p[0])[1], min(longs, key=lambda p: p[0])[1]
    return replace(short, split=min(splits, key=lambda p: p[0])[1]), long


# --- pruning --------------------------------------------------------------------------------------


def _best(
    plan: Plan, extents: Mapping[str, int], limits: SpaceLimits, every: Iterable[Choice], count: int
) -> list[Choice]:
    ranked = []
    for choice in dict.fromkeys(every):
        turned = oriented(plan, extents, choice[0].swap, allowed=limits.swap)
        if not legal.broken(turned, extents, choice):
            predicted = cost.predict(turned, extents, choice, limits.device, limits.load)
            if fits(predicted, limits.device):
                ranked.append((predicted.total, choice))
    ranked.sort(key=lambda pair: pair[0])
    return _varied([choice for _, choice in ranked], count)


def fits(predicted: cost.Cost, device: cost.Device) -> bool:
    """Whether every launch stays within shared memory and registers."""
    return all(
        part.shared <= device.shared and part.registers <= MOST_REGISTERS
        for part in predicted.parts
    )


def _varied(ranked: Sequence[Choice], count: int) -> list[Choice]:
    """The first ones, but not too many of one shape of tile."""
    seen: dict[object, int] = {}
    kept: list[Choice] = []
    rest: list[Choice] = []
    for choice in ranked:
        shape = tuple((one.m, one.n, one.k, one.swap, one.split) for one in choice)
        seen[shape] = seen.get(shape, 0) + 1
        (kept if seen[shape] <= VARIANTS else rest).append(choice)
    return [*kept, *rest][:count]


# --- what there is --------------------------------------------------------------------------------


def _every(
    plan: Plan, extents: Mapping[str, int], limits: SpaceLimits, guess: Choice
) -> Iterator[Choice]:
    if plan.pattern:
        return _unrolled(plan, extents)
    if tiling.in_rows(plan):
        return _rows(plan, extents, limits, guess)
    return _dots(plan, extents, limits, guess) if plan.roles.dot else _sums(plan, extents, guess)


def _powers(low: int, high: int) -> list[int]:
    """Powers of two from ``low`` to ``high``; ``high`` alone where there are none."""
    return [
        1 << b for b in range(low.bit_length() - 1, high.bit_length()) if low <= 1 << b <= high
    ] or [max(low, high)]


def _dots(
    plan: Plan, extents: Mapping[str, int], limits: SpaceLimits, guess: Choice
) -> Iterator[Choice]:
    for swap in (0, 1) if limits.swap else (0,):
        turned = oriented(plan, extents, swap)
        m_held, n_held = tiling.held(turned, extents, 1, 1)
        sizes = [
            max(16, min(256, power_of_two(tiling.extent(axis, extents))))
            for axis in (turned.roles.m, turned.roles.n)
        ]
        ms = [m_held] if m_held > 1 else _powers(16, sizes[0])
        ns = [n_held] if n_held > 1 else _powers(16, sizes[1])
        for m, n, k in itertools.product(ms, ns, _depths(turned, extents)):
            for warps, stages in itertools.product(_warps(m, n), (1, 2, 3, 4)):
                for group in (0, 8) if sizes[0] > m and sizes[1] > n else (0,):
                    yield (
                        Config(m=m, n=n, k=k, warps=warps, stages=stages, group=group, swap=swap),
                    )
    yield from _pieces(plan, extents, guess)


def _warps(m: int, n: int) -> tuple[int, ...]:
    return (4, 8) if m * n >= 64 * 128 else (4,) if m * n >= 64 * 64 else (2, 4)


def _depths(plan: Plan, extents: Mapping[str, int]) -> list[int]:
    """Tiles of K: several entries of a segment, or a part of a plain extent."""
    inner = tiling.inner_extent(plan, extents)
    if inner > 1 and inner == power_of_two(inner):
        return [k for k in (inner * e for e in (1, 2, 4, 8)) if 16 <= k <= max(128, inner)]
    return _powers(16, max(16, min(128, power_of_two(extents[plan.roles.k[0]]))))


def _pieces(plan: Plan, extents: Mapping[str, int], guess: Choice) -> Iterator[Choice]:
    """The first guess with its reduction cut differently, where it may be cut at all."""
    if tiling.pieces(plan, replace(guess[0], split=2), extents) > 1:
        for split in (1, 2, 4, 8, 16, 32):
            yield (replace(guess[0], split=split),)


def _sums(plan: Plan, extents: Mapping[str, int], guess: Choice) -> Iterator[Choice]:
    roles = plan.roles
    m_held, n_held = tiling.held(plan, extents, 1, 1)
    m_all, n_all, k_all = (
        power_of_two(tiling.extent(axis, extents)) if axis else 1
        for axis in (roles.m, roles.n, roles.k[:1])
    )
    # the register tile has the scattered axis too
    three = plan.onehot >= 0 and m_held == n_held == 1
    ms = [m_held] if m_held > 1 else _powers(1, min(64, m_all)) if not three else [guess[0].m]
    ns = [n_held] if n_held > 1 else _powers(min(16, n_all), min(256, n_all))
    for m, n, k in itertools.product(ms, ns, _powers(1, min(64, k_all))):
        if 64 <= m * n * k <= 8192 or (m, n, k) == (m_all, n_all, k_all):
            for warps in (1, 2, 4, 8):
                yield (Config(m=m, n=n, k=k, warps=warps, stages=guess[0].stages),)
    yield from _pieces(plan, extents, guess)


def _rows(
    plan: Plan, extents: Mapping[str, int], limits: SpaceLimits, guess: Choice
) -> Iterator[Choice]:
    """One of short rows, long rows and split length changed at a time; `crossed` puts the best of
    each together.
    """
    short, long = guess
    n_all = power_of_two(tiling.extent(plan.roles.n, extents)) if plan.roles.n else 1
    longest = max((length for length, _ in limits.load.lengths), default=0)
    ns = _powers(min(32, n_all), min(512, n_all))
    for m, n, k, warps in itertools.product((1, 2, 4, 8, 16, 32), ns, (1, 2, 4, 8, 16), (1, 2, 4)):
        if 32 * warps <= m * n * k <= 8192:
            yield replace(short, m=m, n=n, k=k, warps=warps), long
    for n, k, warps in itertools.product(ns, (8, 16, 32, 64), (1, 2, 4)):
        if longest > tiling.SHORT and n * k <= 8192:
            yield short, replace(long, n=n, k=k, warps=warps)
    for split in (0, 32, 64, 128, 256, 512):
        if split == 0 or split < longest:
            yield replace(short, split=split), long


def _unrolled(plan: Plan, extents: Mapping[str, int]) -> Iterator[Choice]:
    m_all, n_all = (
        power_of_two(tiling.extent(axis, extents)) if axis else 1
        for axis in (plan.roles.m, plan.roles.n)
    )
    if plan.roles.k:
        k_all = min(128, power_of_two(tiling.extent(plan.roles.k, extents)))
        for m, n, k, warps in itertools.product(
            _powers(1, min(8, m_all)),
            _powers(min(8, n_all), min(64, n_all)),
            {k_all, min(k_all, 32)},
            (1, 2, 4, 8),
        ):
            if 128 * warps <= m * n * k <= 2048 * warps:
                yield (Config(m=m, n=n, k=k, warps=warps, stages=1),)
        return
    for m, n, warps in itertools.product(
        _powers(1, min(32, m_all)), _powers(min(16, n_all), min(128, n_all)), (1, 2, 4)
    ):
        if m * n <= 2048:
            yield (Config(m=m, n=n, warps=warps, stages=1),)


def _around(centre: Choice) -> Iterator[Choice]:
    for position, one in enumerate(centre):
        sizes = [
            (name, value)
            for name in ("m", "n", "k", "warps")
            for value in (getattr(one, name) * 2, getattr(one, name) // 2)
        ]
        changed = [
            replace(one, **{name: value})
            for name, value in sizes
            if 1 <= value <= (16 if name == "warps" else 1024)
        ]
        changed += [
            replace(one, stages=value)
            for value in (one.stages + 1, one.stages - 1)
            if 1 <= value <= 6
        ]
        changed += [
            replace(one, group=value)
            for value in (0, 4, 8, 16)
            if one.swap >= 0 and value != one.group
        ]
        if len(centre) == 2 and position == 0 and one.split:
            changed += [
                replace(one, split=one.split * 2),
                replace(one, split=max(16, one.split // 2)),
            ]
        for new in changed:
            yield (*centre[:position], new, *centre[position + 1 :])
