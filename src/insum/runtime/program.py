"""A program: the kernels of one statement with their arguments bound, for one kind of input.
Launching it is all that is left to do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from insum.codegen.emit import Kernel
from insum.compat import calls
from insum.lang.bind import Problem
from insum.plan.config import Choice, Config
from insum.plan.prepare import Prepared, Wishes
from insum.runtime import binaries, launch

WIDE = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}
# what is looked up for the arguments that are no tensors of the statement
OUT, WORK = "<out>", "<work>"


@dataclass(slots=True, eq=False)
class Launch:
    """One kernel launch: ``arguments`` are constants, or ``names`` to look up among the call's
    tensors.
    """

    function: Any
    grid: tuple[int]
    arguments: tuple[Any, ...]
    # (position, name) of arguments that change from call to call
    names: tuple[tuple[int, str], ...]
    config: Config
    kernel: Kernel
    header: str
    runner: Any = None  # the compiled kernel, for calls whose pointers are all aligned
    # and those for calls in which some are not, as the rows of a tensor may be
    others: dict[int, Any] = field(default_factory=dict)
    # the arguments for runners, which take tensors by their address
    addresses: tuple[Any, ...] = ()
    # is told which pointers were not aligned, and the kernel that was compiled for it
    told: Callable[[int, Any], None] | None = None

    def __call__(self, values: Mapping[str, Any], out: Tensor, work: Tensor | None) -> None:
        if self.addresses:
            arguments, together = list(self.addresses), 0
            for position, name in self.names:
                at: int = (
                    out if name is OUT else work if name is WORK else values[name]
                ).data_ptr()  # type: ignore[union-attr]
                arguments[position] = at
                together |= at
            runner = self.others.get(self.unaligned(arguments)) if together & 15 else self.runner
            if runner is not None:
                runner(arguments)
                return
        self.first(values, out, work)

    def unaligned(self, addresses: Sequence[int]) -> int:
        """Which of the pointers that change are not aligned, one bit for each: kernels are compiled
        for that.
        """
        found = 0
        for position, _ in self.names:
            found = 2 * found + (addresses[position] & 15 != 0)
        return found

    def bound(self, values: Mapping[str, Any], out: Tensor, work: Tensor | None) -> list[Any]:
        """The arguments of one call, tensors as they are."""
        arguments = list(self.arguments)
        for position, name in self.names:
            value = out if name is OUT else work if name is WORK else values[name]
            # a truth value counts as a number here
            arguments[position] = int(value) if isinstance(value, bool) else value
        return arguments

    def first(self, values: Mapping[str, Any], out: Tensor, work: Tensor | None) -> None:
        """Launch through Triton, which compiles for the kinds of the arguments, and keep what it
        compiled.
        """
        arguments = self.bound(values, out, work)
        compiled = self.compiled(arguments)
        # Numbers may be specialised by value, so calls that pass some look their kernel up anew.
        changing = [arguments[position] for position, _ in self.names]
        if compiled is None or not all(isinstance(v, Tensor) for v in changing):
            return
        runner = launch.runner_of(compiled, self.grid[0])
        addresses = tuple(v.data_ptr() if isinstance(v, Tensor) else v for v in arguments)
        if which := self.unaligned(addresses):
            self.others[which] = runner
        else:
            self.runner = runner
        if self.told is not None:
            self.told(which, compiled)
        self.addresses = tuple(v.data_ptr() if isinstance(v, Tensor) else v for v in self.arguments)

    def compiled(self, arguments: list[Any]) -> Any:
        """Launch; the kernel that was launched, found on disk or compiled now."""
        warps, stages = self.config.warps, self.config.stages
        found = binaries.recalled(self.function, arguments, warps, stages)
        if found is not None:
            found[(self.grid[0], 1, 1)](*arguments)
            return found
        made = self.function[self.grid](*arguments, num_warps=warps, num_stages=stages)
        if made is not None:
            binaries.note(made, self.function, arguments, warps, stages)
        return made


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One product of the statement: its launches and what the output must be before them."""

    prepared: Prepared
    launches: tuple[Launch, ...]
    workspace: tuple[int, ...]  # shape of the workspace for pieces of long rows, or ()
    atomic: bool
    choice: Choice = ()


@dataclass(frozen=True, eq=False)
class Program:
    """All products of one statement, for one kind of input. Has no slots, so that it can be
    referred to weakly.
    """

    problem: Problem  # held, as are the wishes, so that their identities stay taken
    wishes: Wishes
    steps: tuple[Step, ...]
    shape: tuple[int, ...]
    buffer: torch.dtype | None
    start: bool | int | float
    # index tensors that become constants of the code once they have come back often enough
    promote: tuple[str, ...] = ()
    calls: list[int] = field(default_factory=lambda: [0])

    @functools.cached_property
    def empty(self) -> Callable[[], Tensor]:
        """Makes the result, or the buffer that it is computed in, on the current device."""
        return calls.maker(self.shape, self.buffer or self.problem.dtype, self.problem.device)

    @functools.cached_property
    def index(self) -> int | None:
        """Which of several GPUs it runs on; None where there is nothing to choose."""
        device = self.problem.device
        return device.index if device.type == "cuda" and torch.cuda.device_count() > 1 else None

    @functools.cached_property
    def filled(self) -> bool:
        """Whether a new result is filled with what it starts from before anything is launched."""
        first = self.steps[0]
        return first.atomic or first.prepared.fill or not first.launches

    @functools.cached_property
    def work(self) -> tuple[tuple[Callable[[], Tensor] | None, tuple[Launch, ...]], ...]:
        """Of each step what makes its workspace, where it has one, and its launches."""
        kinds = [
            (step.workspace, WIDE[step.prepared.plan.accumulator], step.launches)
            for step in self.steps
        ]
        return tuple(
            (calls.maker(shape, dtype, self.problem.device) if shape else None, launches)
            for shape, dtype, launches in kinds
        )

    def examples(self, step: Step) -> tuple[Tensor, Tensor]:
        """Tensors without elements of the kinds that the step's kernels take for the result and the
        workspace; compilers ask for no more.
        """
        return torch.empty(0, dtype=self.buffer or self.problem.dtype), torch.empty(
            0, dtype=WIDE[step.prepared.plan.accumulator]
        )
