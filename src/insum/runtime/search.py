"""The search for the best choice: candidates by the model, compiled ahead in other processes, timed
on the device, checked, remembered.

Nothing is trusted that does not give the first guess's result. Where there is nothing to time (no
GPU), the first guess stands.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from insum.errors import SettingsError, UnsupportedError
from insum.lang.bind import Problem, Value
from insum.notebook import table
from insum.plan import cost, space
from insum.plan.config import Choice, Config, shown
from insum.plan.draft import CannotFuse, Planned, Wishes
from insum.runtime import cache, launch, workers
from insum.runtime.build import assemble, first_choice
from insum.runtime.inspection import Look
from insum.runtime.ready import Ready
from insum.runtime.shelf import recalled, unusable
from insum.runtime.timing import Timer, replay_timer

log = logging.getLogger("insum")


@dataclass(frozen=True, slots=True)
class Effort:
    """How much a search may cost: candidates, rounds of refinement, and seconds after which no new
    candidate is tried.
    """

    candidates: int
    refine: int
    seconds: float


EFFORTS = {"quick": Effort(8, 0, 10.0), "full": Effort(40, 12, 90.0)}
#: Repeats of a first look, of a second, and of the final between the best.
LOOK, MEASURE, FINAL = 3, 10, 25
#: Rounds of the final: the best of each counts, for a device has slow moments, and memory has
#: places that are slower.
ROUNDS = 3
#: A candidate this much slower than the best so far is not looked at again, and a winner must be
#: this much faster than the first guess.
LOSER, MARGIN = 1.25, 1.02


@dataclass(frozen=True, slots=True)
class TriedChoice:
    """One choice that was tried; ``microseconds`` is infinite where it could not be run."""

    choice: Choice
    microseconds: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Tuned:
    """What a search found. Prints as one line; ``config`` can be given as ``config=``.

    >>> import insum, torch
    >>> tuned = insum.tune("y[i] = A[i,j] * x[j]", A=torch.ones(2, 3), x=torch.ones(3))
    >>> tuned.source
    'first guess: generated kernels do not run on cpu'
    """

    statement: str
    choice: Choice  # of all products of the statement, one after the other
    microseconds: float
    first_guess: float
    trials: tuple[TriedChoice, ...] = ()
    source: str = "search"

    @property
    def config(self) -> Config | Choice | None:
        return None if not self.choice else self.choice[0] if len(self.choice) == 1 else self.choice

    @property
    def speedup(self) -> float:
        """How many times as fast as the first guess."""
        return self.first_guess / self.microseconds if self.microseconds else 1.0

    def __str__(self) -> str:
        config = f"; config={shown(self.choice)}" if self.choice else ""
        if self.source != "search":
            return f"insum: {self.statement!r}: {self.source}{config}"
        times = (
            f"{self.microseconds:.1f} µs, first guess {self.first_guess:.1f} µs "
            f"({self.speedup:.2f} times)"
        )
        return f"insum: {self.statement!r}: {times}, {len(self.trials)} configs tried{config}"

    def _repr_html_(self) -> str:
        """What was tried, the fastest first."""
        tried = sorted(self.trials, key=lambda one: one.microseconds)
        rows = [(shown(one.choice), f"{one.microseconds:.1f}", one.note) for one in tried]
        return table(("config", "µs", ""), rows, str(self))


# --- what is called -------------------------------------------------------------------------------


def tune(
    problem: Problem,
    values: Mapping[str, Value],
    target: Tensor | None,
    effort: str = "full",
    timer: Timer | None = None,
    workers: int = 0,
) -> Tuned:
    """Search, remember what was found, and tell about it. ``timer`` replaces the device's clock, in
    tests.
    """
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise SettingsError(f"effort is {effort!r}", expected="'quick' or 'full'")
    reason = launch.available() or (unusable(problem) or _untimed(problem) if timer is None else "")
    look = Look(problem, values, target)
    wishes = look.wishes
    text = problem.statement.text or str(problem.statement)
    try:
        prepared = look.planned()
    except CannotFuse as error:
        return Tuned(text, (), 0.0, 0.0, source=f"no kernel: {error}")
    if reason:
        guess = tuple(config for one in prepared for config in first_choice(one, wishes))
        return Tuned(text, guess, 0.0, 0.0, source=f"first guess: {reason}")
    cold = replay_timer(problem.device, cold=True) if timer is None else None
    warm = timer or replay_timer(problem.device)
    try:
        return _Search(look, prepared, wishes, EFFORTS[effort], warm, workers, effort, cold).run()
    finally:
        for clock in (warm, cold):
            getattr(clock, "close", lambda: None)()


def joined(statement: str, parts: Sequence[Tuned]) -> Tuned:
    """What was found for the statements that one is made of. There is no config for all of them:
    later calls find those of each.
    """
    trials = tuple(trial for part in parts for trial in part.trials)
    source = "search" if trials else "; ".join(dict.fromkeys(part.source for part in parts))
    return Tuned(
        statement,
        (),
        sum(part.microseconds for part in parts),
        sum(part.first_guess for part in parts),
        trials,
        source,
    )


def on_first_call(
    problem: Problem, values: Mapping[str, Value], target: Tensor | None, effort: str
) -> None:
    """Search under ``settings.effort``, where nothing was found before and one can be made now."""
    look = Look(problem, values, target)
    if _untimed(problem) or unusable(problem):
        return
    try:
        planned = look.planned()
    except CannotFuse:
        return
    if not all(recalled(problem, one, look.wishes) for one in planned):
        tune(problem, values, target, effort)


def _untimed(problem: Problem) -> str:
    """Why nothing can be timed now, or ''."""
    if problem.device.type != "cuda":
        return f"there is no GPU to time on, the tensors are on {problem.device.type}"
    return "a CUDA graph is being captured" if torch.cuda.is_current_stream_capturing() else ""


# --- the search -----------------------------------------------------------------------------------

TimedRun: TypeAlias = Callable[[], Tensor]


@dataclass(slots=True)
class _Search:
    look: Look
    prepared: Sequence[Planned]
    wishes: Wishes
    effort: Effort
    timer: Timer
    workers: int
    named: str
    cold: Timer | None = None
    trials: list[TriedChoice] = field(default_factory=list)
    deadline: float = 0.0
    tick: Callable[[int], None] = lambda total: None

    @property
    def problem(self) -> Problem:
        return self.look.problem

    def run(self) -> Tuned:
        """Tune one product after the other, the rest of the statement as it is known best."""
        self.deadline = time.monotonic() + self.effort.seconds
        choices = [first_choice(one, self.wishes) for one in self.prepared]
        text = self.problem.statement.text or str(self.problem.statement)
        first = best = 0.0
        with progress_bar(f"insum tunes {text[:60]}") as self.tick, on_device(self.problem.device):
            for position, one in enumerate(self.prepared):
                if 0 not in one.extents.values() and 0 not in self.look.shape:
                    choices[position], guessed, best = self.product(choices, position)
                    first = first or guessed
        tuned = Tuned(
            text, tuple(c for choice in choices for c in choice), best, first, tuple(self.trials)
        )
        _tell(tuned)
        return tuned

    def product(self, choices: list[Choice], position: int) -> tuple[Choice, float, float]:
        """The best choice for one product, and the times of first guess and best."""
        plan, extents = self.prepared[position].plan, self.prepared[position].extents
        limits = self.limits_of(position)
        tried = space.candidates(plan, extents, limits, choices[position])
        timed = self.measure(choices, position, tried)
        if self.effort.refine and timed:
            centre = space.crossed(timed) or min(timed, key=lambda pair: pair[1])[0]
            around = [centre, *space.neighbours(plan, extents, limits, centre)]
            timed += self.measure(
                choices,
                position,
                [c for c in around if c not in tried][: self.effort.refine],
                best=min(t for _, t in timed),
            )
        choice, guessed, best = self.decide(choices, position, timed)
        statement = self.problem.statement.text or str(self.problem.statement)
        key = cache.key_of(self.prepared[position], self.problem.device)
        if best:  # else not even the first guess could be timed
            cache.remember(cache.CachedChoice(key, statement, choice, best, guessed, self.named))
        return choice, guessed, best

    def limits_of(self, position: int) -> space.SpaceLimits:
        device = cost.device_of(self.problem.device)
        return space.SpaceLimits(
            device,
            self.look.load(self.prepared[position]),
            self.effort.candidates,
            self.wishes.settings.swap,
        )

    # --- timing ---

    def measure(
        self,
        choices: list[Choice],
        position: int,
        candidates: Sequence[Choice],
        best: float = float("inf"),
    ) -> list[tuple[Choice, float]]:
        """Times of the candidates that run; those that look slow are dropped after a short look."""
        programs = [(choice, self.program(choices, position, choice)) for choice in candidates]
        self.tick(len(programs))
        self.compile_ahead([program for _, program in programs if isinstance(program, Ready)])
        timed: list[tuple[Choice, float]] = []
        for choice, program in programs:
            late = time.monotonic() > self.deadline and bool(timed)
            found = (
                TriedChoice(choice, float("inf"), "no time left")
                if late
                else self.timed(choice, program, best)
            )
            self.trials.append(found)
            self.tick(0)
            if found.microseconds < float("inf"):
                best = min(best, found.microseconds)
                timed.append((choice, found.microseconds))
        return timed

    def timed(self, choice: Choice, program: Ready | str, best: float) -> TriedChoice:
        if isinstance(program, str):
            return TriedChoice(choice, float("inf"), program)
        try:
            run = self.runner(program)
            taken = self.timer(run, LOOK)
            if taken <= LOSER * best:
                taken = self.timer(run, MEASURE)
            return TriedChoice(choice, taken)
        except Exception as error:
            # out of shared memory, or whatever the compiler thinks of it: this choice is none
            log.debug("insum: %s: %s", choice, error)
            return TriedChoice(choice, float("inf"), f"{type(error).__name__}: {error}"[:200])

    def program(self, choices: list[Choice], position: int, choice: Choice) -> Ready | str:
        trial = [*choices[:position], choice, *choices[position + 1 :]]
        try:
            return self.look.ready(assemble(self.problem, self.prepared, self.wishes, trial))
        except (CannotFuse, SettingsError, UnsupportedError) as error:
            return str(error)

    def runner(self, program: Ready) -> TimedRun:
        """A call that may be repeated: what accumulates does so into a copy."""
        target = self.look.target
        if target is not None:
            target = target.detach().clone(memory_format=torch.preserve_format)
        return functools.partial(program, self.look.values, target)

    def compile_ahead(self, programs: Sequence[Ready]) -> None:
        wanted = {str(one.job()): one.job() for program in programs for one in program.launches}
        if len(wanted) > 1 and self.problem.device.type == "cuda" and self.workers >= 0:
            workers.compile_ahead(
                list(wanted.values()),
                launch.current_target(),
                workers=self.workers,
                seconds=self.effort.seconds,
            )

    # --- deciding ---

    def decide(
        self, choices: list[Choice], position: int, timed: Sequence[tuple[Choice, float]]
    ) -> tuple[Choice, float, float]:
        """Time the best few again beside the first guess, and take the fastest that gives the first
        guess's result.
        """
        guess = choices[position]
        known = dict(timed)
        if guess not in known:
            return guess, 0.0, 0.0
        near = [c for c in known if c != guess and known[c] <= LOSER * min(known.values())]
        final = sorted(near, key=lambda c: known[c])[:3]
        rivals = {
            choice: self.runner(self.built(choices, position, choice)) for choice in (guess, *final)
        }
        rounds = [
            {choice: self.timer(run, FINAL) for choice, run in rivals.items()}
            for _ in range(ROUNDS)
        ]
        times = {choice: min(one[choice] for one in rounds) for choice in rivals}
        for choice in self.ranked(choices, position, final, times):
            if times[choice] * MARGIN >= times[guess]:
                continue
            if self.agrees(choices, position, choice):
                return choice, times[guess], times[choice]
            log.warning(
                "insum: %s gives another result than the first guess and is not used", shown(choice)
            )
        return guess, times[guess], times[guess]

    def ranked(
        self,
        choices: list[Choice],
        position: int,
        final: Sequence[Choice],
        times: Mapping[Choice, float],
    ) -> list[Choice]:
        """The fastest first; those that are equally fast with warm operands by their time with an
        L2 that holds something else.
        """
        best = min((times[c] for c in final), default=0.0)
        close = [c for c in final if times[c] <= MARGIN * best]
        if self.cold is not None and len(close) > 1:
            chilled = {
                c: self.cold(self.runner(self.built(choices, position, c)), MEASURE) for c in close
            }
            close.sort(key=lambda c: chilled[c])
        return [*close, *sorted((c for c in final if c not in close), key=lambda c: times[c])]

    def built(self, choices: list[Choice], position: int, choice: Choice) -> Ready:
        program = self.program(choices, position, choice)
        assert isinstance(program, Ready)
        return program

    def agrees(self, choices: list[Choice], position: int, choice: Choice) -> bool:
        want, got = (
            self.runner(self.built(choices, position, c))() for c in (choices[position], choice)
        )
        return same(got, want, self.prepared[position].plan.precision == "tf32")


#: Relative difference, as a norm, up to which two summation orders count as one result.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 3e-5, torch.float64: 1e-12}


def same(got: Tensor, want: Tensor, reduced: bool = False) -> bool:
    """Whether two results differ by no more than rounding; ``reduced`` where products were rounded
    to TF32.
    """
    tolerance = TOLERANCE.get(want.dtype)
    if tolerance is None:
        return bool(torch.equal(got, want))
    finite = torch.isfinite(want)
    if not torch.equal(torch.isfinite(got), finite) or not torch.equal(
        got[~finite].nan_to_num(), want[~finite].nan_to_num()
    ):
        return False
    difference, size = (
        (got[finite].double() - want[finite].double()).norm(),
        want[finite].double().norm(),
    )
    return bool(difference <= max(tolerance, 4e-3 if reduced else 0.0) * size + 1e-30)


# --- telling --------------------------------------------------------------------------------------


def is_first_rank() -> bool:
    """Whether this process speaks for its group: rank 0, or no group at all."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    return os.environ.get("RANK", "0") in ("", "0")


def _tell(tuned: Tuned) -> None:
    if is_first_rank():
        log.info("%s", tuned)
        if sys.stderr.isatty() and not log.isEnabledFor(logging.INFO):
            print(tuned, file=sys.stderr)


@contextlib.contextmanager
def progress_bar(text: str) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; called with the number of steps to come, and with 0 for each that is
    done.
    """
    if not (sys.stderr.isatty() and is_first_rank()):
        yield lambda total: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield lambda total: None
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=0)
        total = [0]

        def tick(more: int) -> None:
            total[0] += more
            bar.update(task, total=total[0], advance=0 if more else 1)

        yield tick


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Work on the GPU that a statement's tensors are on."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return contextlib.nullcontext()
    return torch.cuda.device(device)
