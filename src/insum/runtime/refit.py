"""A program for other sizes: where index tensors are new at each call, so is their length, and
neither plan nor kernel depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from torch import Tensor

from insum.lang.bind import Problem
from insum.lang.expr import Access, accesses
from insum.plan import model
from insum.plan.draft import is_wide
from insum.runtime import launch
from insum.runtime.build import Builder
from insum.runtime.program import Launch, Program

#: A config is good for sizes up to this many times larger or smaller.
REACH = 4
_MOST_MADE = 64
OUT = ""  # stands for the output among the names of tensors


class Refit:
    """The one kernel of a program, and what about its launch depends on sizes."""

    def __init__(self, program: Program, values: Mapping[str, Any], target: Tensor | None) -> None:
        (step,) = program.steps
        (self.launch,) = step.launches
        problem, prepared = program.problem, step.prepared
        (self.config,) = step.choice
        plan = model.oriented(
            prepared.plan, prepared.extents, self.config.swap, allowed=program.wishes.settings.swap
        )
        self.program, self.prepared = program, replace(prepared, plan=plan)
        self.places, self.indexed, self.fixed = _places(problem, values)
        builder = Builder(
            problem, self.prepared, values, target, program.wishes, step.choice, loose=True
        )
        self.pieces = (
            model.pieces(plan, self.config, prepared.extents) if builder.pieces_fit() else 1
        )
        self.shape = builder.shape(self.config, self.pieces)
        #: Compiled kernels by what Triton compiles numbers for, and by which pointers are not
        #: aligned.
        self.compiled: dict[Any, dict[int, Any]] = {}
        #: Programs that were made before, by shapes and strides.
        self.made: dict[Any, Program | None] = {}

    def shape_of(self, values: Mapping[str, Any]) -> tuple[int, ...]:
        """The shape of a result that nothing is scattered to."""
        target = self.program.problem.statement.target
        owners = {
            v: next((place for place in places if place[0] != OUT), None)
            for v, places in self.places.items()
        }
        return tuple(
            int(values[t].shape[d])
            for index in target.indices
            if (place := owners[index.var or ""]) is not None
            for t, d in [place]
        )

    def limits(self, values: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, int]:
        """The sizes of the dimensions that index tensors index."""
        return {
            name: min(shape[d] if t == OUT else values[t].shape[d] for t, d in places)
            for name, places in self.indexed.items()
        }

    def __call__(
        self, values: Mapping[str, Any], shape: tuple[int, ...], target: Tensor | None
    ) -> Program | None:
        """The program for these tensors and a result of this shape; None where it would be another
        kernel, or they do not fit together.
        """
        key = shape, target is None, *((v.shape, v.stride()) for v in values.values())
        if key not in self.made:
            if len(self.made) >= _MOST_MADE:
                self.made.clear()
            self.made[key] = self._make(values, shape, target)
        return self.made[key]

    def _make(
        self, values: Mapping[str, Any], shape: tuple[int, ...], target: Tensor | None
    ) -> Program | None:
        extents = self._extents(values, shape)
        if extents is None or is_wide(values.values(), shape) and not self.prepared.plan.wide:
            return None
        program = self.program
        (step,) = program.steps
        problem = replace(program.problem, extents=extents, shape=shape)
        prepared = replace(self.prepared, extents={v: extents[v] for v in self.prepared.extents})
        builder = Builder(
            problem, prepared, values, target, program.wishes, step.choice, loose=True
        )
        if builder.shape(self.config, self.pieces) != self.shape:
            return None
        one = self._launch(builder)
        return (
            None
            if one is None
            else replace(
                program,
                problem=problem,
                shape=shape,
                steps=(replace(step, prepared=prepared, launches=(one,)),),
            )
        )

    def _extents(self, values: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, int] | None:
        if any((shape[d] if t == OUT else values[t].shape[d]) != size for t, d, size in self.fixed):
            return None
        found: dict[str, int] = {}
        for var, places in self.places.items():
            sizes = {int(shape[d] if t == OUT else values[t].shape[d]) for t, d in places}
            size, before = sizes.pop(), int(self.program.problem.extents[var])
            if sizes or not before <= REACH * size or not size <= REACH * before or not size:
                return None
            found[var] = size
        return found

    def _launch(self, builder: Builder) -> Launch | None:
        old, roles = self.launch, self.prepared.plan.roles
        programs = (
            builder.tile_count(self.config)
            * self.pieces
            * math.prod(builder.extents[v] for v in roles.grid)
        )
        if programs >= 2**31:
            return None
        extra = {"piece_count": self.pieces}
        arguments = tuple(builder.argument(name, extra) for name in old.kernel.arguments)
        new = Launch(
            old.function, (programs,), arguments, old.names, old.config, old.kernel, old.header
        )
        kind = launch.kind_of(*(v for v in arguments if isinstance(v, int)))
        compiled = self.compiled.setdefault(kind, {})
        new.told = compiled.__setitem__
        if compiled:
            new.others = {which: launch.runner_of(one, programs) for which, one in compiled.items()}
            new.runner, new.addresses = new.others.get(0), arguments
        return new


def refit_of(program: Program, values: Mapping[str, Any], target: Tensor | None) -> Refit | None:
    """How a program that was just run is made one for other sizes; None where that takes more than
    other numbers.
    """
    if (
        len(program.steps) != 1
        or program.promote
        or len(program.steps[0].launches) != 1
        or len(program.steps[0].choice) != 1
    ):
        return None
    step = program.steps[0]
    prepared = step.prepared
    if (
        prepared.plan.strategy not in ("atomic", "store")
        or model.in_rows(prepared.plan)
        or step.workspace
    ):
        return None
    if (
        prepared.arrays
        or prepared.views
        or prepared.segments
        or prepared.baked
        or not all(isinstance(v, Tensor) for v in values.values())
    ):
        return None
    problem = program.problem
    if any(problem.extents.get(v) != size for v, size in prepared.extents.items()) or any(
        isinstance(a, Tensor) for a in step.launches[0].arguments
    ):
        return None
    if any(
        len(index.terms) > 1 or index.terms and index.atom is None
        for access in _accesses(problem)
        for index in access.indices
    ):
        return None  # how far a sum of variables reaches was found out for these sizes
    found = Refit(program, values, target)
    return found if {*prepared.extents, *problem.extents} <= {*found.places} else None


Places: TypeAlias = dict[str, list[tuple[str, int]]]


def _accesses(problem: Problem) -> list[Access]:
    target = problem.statement.target
    return [
        target,
        *(a for i in target.indices for a in accesses(i)),
        *accesses(problem.statement.value),
    ]


def _places(
    problem: Problem, values: Mapping[str, Any]
) -> tuple[Places, Places, list[tuple[str, int, int]]]:
    """Tensors and dimensions: where variables stand alone, by variable; what index tensors index,
    by tensor; and all others, with their sizes.
    """
    alone: Places = {}
    indexed: Places = {}
    fixed: list[tuple[str, int, int]] = []
    target = problem.statement.target
    for access in _accesses(problem):
        name = OUT if access is target else access.tensor
        for dim, index in enumerate(access.indices):
            if index.var is not None:
                alone.setdefault(index.var, []).append((name, dim))
            elif isinstance(index.atom, Access):
                indexed.setdefault(index.atom.tensor, []).append((name, dim))
            else:
                fixed.append(
                    (
                        name,
                        dim,
                        int(
                            problem.shape[dim]
                            if access is target
                            else values[access.tensor].shape[dim]
                        ),
                    )
                )
    return alone, indexed, fixed
