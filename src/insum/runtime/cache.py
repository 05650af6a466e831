"""The memory of tuning: choices by plan, dtypes, size class, device and versions; in this process,
and on disk for the next.

One JSON file per entry, written aside and renamed, so that any number of processes may read and
write at once and nobody ever sees half a file. An entry that cannot be read, or that another
version wrote, is passed over with one line in the log and written anew by the next search.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from insum.bounded import keep
from insum.compat.locks import renew_in_children
from insum.plan.config import Choice, Config
from insum.plan.draft import Planned
from insum.plan.plan import PatternPoint
from insum.plan.sizes import power_of_two
from insum.runtime import disk, launch
from insum.settings import SettingValues, settings

log = logging.getLogger("insum")

#: The layout of the files. Raise it when that changes: entries of other layouts are passed over.
FORMAT = 1
MOST_CHOICES = 4096
_found: dict[str, Choice] = {}
_lock = threading.Lock()
renew_in_children(_lock)
#: ``epoch`` goes up whenever what is remembered changes, so that launches made before are looked up
#: anew.
state = {"epoch": 0}


# --- where ----------------------------------------------------------------------------------------


def folder() -> Path:
    """Where kernels and tuned choices are kept."""
    return disk.cache_folder()


def entries_folder() -> Path:
    return folder() / "tuned"


# --- keys and entries -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Key:
    """What a choice was found for."""

    plan: str
    sizes: str
    device: str
    torch: str
    triton: str
    insum: str

    @property
    def name(self) -> str:
        text = "\n".join((self.plan, self.sizes, self.device, self.torch, self.triton, self.insum))
        return hashlib.sha256(text.encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True)
class CachedChoice:
    """One remembered choice, and what it won against."""

    key: Key
    statement: str
    choice: Choice
    microseconds: float
    first_guess: float
    effort: str


def key_of(planned: Planned, device: torch.device) -> Key:
    return Key(
        plan_text(planned) + unusual(), size_class(planned), device_name(device), *versions()
    )


def unusual() -> str:
    """Settings under which the same plan becomes another kernel, where they are not the usual ones:
    what is found then is found for them alone.
    """
    now, usual = settings.values, SettingValues()
    names = ("swap", "prefetch", "lazy_broadcasting")
    return "".join(
        f" | {name}={getattr(now, name)}"
        for name in names
        if getattr(now, name) != getattr(usual, name)
    )


def plan_text(planned: Planned) -> str:
    """The plan as text: what decides the kernel but for its config; the user's spelling of the
    statement does not.
    """
    plan = planned.plan
    parts = [
        str(plan.target),
        *(str(f) for f in plan.factors),
        plan.reduce,
        plan.strategy,
        str(plan.roles),
        str(plan.kinds),
        str(sorted(plan.padded)),
    ]
    parts += [
        plan.accumulator,
        plan.operand,
        plan.precision,
        str(plan.segment),
        str(plan.onehot),
        str(plan.wide),
        str(plan.accumulate),
        str(plan.numbers),
    ]
    if plan.pattern:
        parts.append(hashlib.sha256(_points_text(plan.pattern.points).encode()).hexdigest()[:16])
    return " | ".join(parts)


def _points_text(points: Sequence[PatternPoint]) -> str:
    """A line for each point, whose expressions are shared by many."""
    every = {id(e): e for target, factors in points for e in (target, *factors)}
    texts = {number: str(expr) for number, expr in every.items()}
    return "\n".join(
        f"{texts[id(target)]} {' '.join(texts[id(f)] for f in factors)}"
        for target, factors in points
    )


def size_class(planned: Planned) -> str:
    """Extents rounded up to powers of two, and for a segmented output the entries and the longest
    row as well.
    """
    rows = {"entries": planned.entries, "longest": planned.longest} if planned.segments else {}
    sizes = {**planned.extents, **rows}
    return " ".join(f"{name}:{power_of_two(size)}" for name, size in sizes.items())


@functools.cache
def device_name(device: torch.device) -> str:
    """Of a device that may not be here: programs can be exported for one."""
    here = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_name(device) if here else device.type


@functools.cache
def versions() -> tuple[str, str, str]:
    """Versions of torch, triton and insum; what is not installed has none."""
    return torch.__version__, _version("triton"), _version("insum")


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


# --- remembering ----------------------------------------------------------------------------------


def epoch() -> int:
    """Goes up whenever what is remembered changes, so that earlier launches are looked up anew."""
    return state["epoch"]


def forget() -> None:
    """Drop what this process remembers; files stay."""
    with _lock:
        _found.clear()
        state["epoch"] += 1


def recall(key: Key) -> Choice | None:
    """The choice that was found for this key, in this process or by an earlier one."""
    choice = _found.get(key.name)
    if choice is None:
        entry = _read(entries_folder() / f"{key.name}.json", key)
        choice = entry.choice if entry else None
        if choice is not None:
            keep(_found, key.name, choice, MOST_CHOICES)
    return choice


def remember(entry: CachedChoice) -> None:
    """Keep a choice for this process and, where files can be written, for the next."""
    with _lock:
        _found.pop(entry.key.name, None)
        keep(_found, entry.key.name, entry.choice, MOST_CHOICES)
        state["epoch"] += 1
    try:
        disk.write_whole(entries_folder() / f"{entry.key.name}.json", _as_json(entry))
    except OSError as error:
        disk.warn_unwritten(entries_folder(), error.strerror or "it cannot be written")


def _as_dict(entry: CachedChoice) -> dict[str, Any]:
    return {"format": FORMAT, **asdict(entry)}


def _as_json(entry: CachedChoice) -> str:
    return json.dumps(_as_dict(entry), indent=1) + "\n"


def _entry(found: Any) -> CachedChoice:
    """An entry from its dictionary; raises ValueError, KeyError or TypeError where it is none."""
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        version = found.get("format") if isinstance(found, dict) else None
        raise ValueError(f"format {version!r}, not {FORMAT}")
    choice = tuple(Config(**one) for one in found["choice"])
    if not choice:
        raise ValueError("no config")
    return CachedChoice(
        Key(**found["key"]),
        str(found["statement"]),
        choice,
        float(found["microseconds"]),
        float(found["first_guess"]),
        str(found["effort"]),
    )


def _read(path: Path, key: Key | None = None) -> CachedChoice | None:
    try:
        entry = _entry(json.loads(path.read_text(encoding="utf-8")))
        if key is not None and entry.key != key:
            raise ValueError(
                f"written by torch {entry.key.torch}, triton {entry.key.triton}, insum "
                f"{entry.key.insum}, or for something else"
            )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        log.warning(
            "insum: cache entry %s is passed over: %s",
            path.name,
            str(error).splitlines()[0] if str(error) else type(error).__name__,
        )
        return None
    return entry


#: Generated kernels: sources, notes, what is half-written, and what earlier releases left.
_GENERATED = ("k*.py", "b*.json", ".writing-*", "[kb]*.tmp", "__pycache__/k*.pyc", ".probe-*")


# --- looking after the files ----------------------------------------------------------------------


def entries() -> Iterator[CachedChoice]:
    """All entries that can be read."""
    for path in sorted(entries_folder().glob("*.json")):
        entry = _read(path)
        if entry is not None:
            yield entry


def clear(*, kernels: bool = True) -> int:
    """Remove every entry, the sources of generated kernels and the notes about compiled ones;
    returns how many files that were.
    """
    forget()
    doomed = [*entries_folder().glob("*.json"), *entries_folder().glob(".writing-*")]
    if kernels:
        sources = launch.source_folder()
        doomed += [path for pattern in _GENERATED for path in sources.glob(pattern)]
    for path in doomed:
        path.unlink(missing_ok=True)
    return len(doomed)


def export_file(path: str | Path) -> int:
    """Write all entries to one file, to be shipped with a model; returns how many."""
    held = [_as_dict(entry) for entry in entries()]
    text = json.dumps({"format": FORMAT, "entries": held}, indent=1) + "\n"
    disk.write_whole(Path(path).absolute(), text)
    return len(held)


def import_file(path: str | Path, *, any_version: bool = False) -> tuple[int, int]:
    """Take over the entries of an exported file: how many, and how many were left out because other
    versions wrote them.

    ``any_version`` takes those too, as if the present versions had found them.
    """
    held = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(held, dict) or held.get("format") != FORMAT:
        raise ValueError(f"{path} is no exported cache of format {FORMAT}")
    taken = left = 0
    for one in held["entries"]:
        entry = _entry(one)
        now = Key(entry.key.plan, entry.key.sizes, entry.key.device, *versions())
        if now != entry.key and not any_version:
            left += 1
            continue
        remember(
            CachedChoice(
                now,
                entry.statement,
                entry.choice,
                entry.microseconds,
                entry.first_guess,
                entry.effort,
            )
        )
        taken += 1
    return taken, left
