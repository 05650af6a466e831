"""Ranks that agree, or all raise: what is wrong on one rank is an error on every one.

Work that several ranks do together (`partition`, `load`) ends in one exchange of what each has
found or what went wrong, so that nobody goes on alone. A product does not wait for such an
exchange: a rank that fails in one leaves a note in the store of the processes, and ranks that wait
longer than usual look for notes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from insum.compat.collectives import default_store
from insum.errors import InsumError, RankError

T = TypeVar("T")
#: Seconds that a rank waits before it looks for notes, and between two looks.
PATIENCE = 0.2
TIMEOUT = (
    "the time that ranks wait is that of the group: init_process_group(timeout=...), or "
    "new_group(timeout=...)"
)


def gathered(group: dist.ProcessGroup, make: Callable[[], T]) -> list[T]:
    """What ``make`` gives on each rank; where it raises on one, every rank raises."""
    own: InsumError | None = None
    found: tuple[bool, Any] = (False, "")
    try:
        found = (True, make())
    except InsumError as error:
        own, found = error, (False, str(error))
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
        own, found = RankError(f"this rank failed: {raised}"), (False, raised)
        own.__cause__ = error
    every: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(every, found, group=group)
    except RuntimeError as error:
        raise own or lost(error) from error
    if own is not None:
        raise own
    for rank, (ok, value) in enumerate(every):
        if not ok:
            raise RankError(f"rank {rank} failed: {value}", remedy="look at that rank first")
    return [value for _, value in every]


def same(group: dist.ProcessGroup, what: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What all ranks say alike; an error on every rank that names what they do not."""
    every = gathered(group, what)
    for name, value in every[0].items():
        said = [one.get(name) for one in every]
        if any(other != value for other in said):
            shown = ", ".join(f"rank {rank}: {other}" for rank, other in enumerate(said[:8]))
            raise RankError(
                f"ranks do not agree about {name}: {shown}",
                expected="the same on every rank of the mesh",
            )
    return every[0]


def lost(error: BaseException) -> RankError:
    """The error of a rank that waited in vain."""
    return RankError(
        f"an exchange with other ranks failed: {str(error).strip().splitlines()[0]}",
        expected="every rank of the mesh in the same call",
        remedy=f"look at the ranks that ended first; {TIMEOUT}",
    )


@dataclass(eq=False)
class Turns:
    """The products of one partition by number, the same on every rank, and those that failed
    here.
    """

    name: str
    rank: int
    ranks: int
    number: int = 0
    failed: set[int] = field(default_factory=set)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One product: what it raises is told to ranks that wait for this one."""
        self.number += 1
        try:
            yield
        except Exception as error:
            self.failed.add(self.number)
            if self.ranks > 1:
                self._tell(error)
            raise

    def _tell(self, error: Exception) -> None:
        try:
            default_store().set(self._key(self.rank), f"{self.number} {error}")
        except Exception:  # the store may be gone with the process that held it
            return

    def _key(self, rank: int) -> str:
        return f"insum/{self.name}/{rank}"

    def look(self) -> None:
        """Raise where another rank has failed in a product that did not fail here."""
        for rank in range(self.ranks):
            number, text = self._note(rank)
            if 0 < number <= self.number and number not in self.failed:
                raise RankError(f"rank {rank} failed: {text}", remedy="look at that rank first")

    def _note(self, rank: int) -> tuple[int, str]:
        """The last product that failed on a rank, 0 for none, and why."""
        try:
            store = default_store()
            if rank == self.rank or not store.check([self._key(rank)]):
                return 0, ""
            number, _, text = store.get(self._key(rank)).decode().partition(" ")
        except RuntimeError as error:  # the process that held the store has ended
            raise lost(error) from error
        return int(number), text

    def wait(self, work: dist.Work) -> None:
        """Until an exchange is done, or a note tells that it never will be."""
        looked, pauses = time.monotonic(), itertools.chain([0.0] * 10, itertools.repeat(2e-4))
        while not work.is_completed():
            time.sleep(next(pauses))
            if time.monotonic() - looked > PATIENCE:
                self.look()
                looked = time.monotonic()
        try:
            work.wait()
        except RuntimeError as error:
            raise lost(error) from error
