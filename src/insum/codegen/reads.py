"""Reading: index expressions, offsets, masks and loads, each value with the tile axes it spans."""

from __future__ import annotations

import math
import re

from insum.codegen.frame import OUTPUT, Frame
from insum.codegen.functions import call
from insum.codegen.values import Val, combine, union
from insum.lang.expr import (
    Access,
    Affine,
    Call,
    Expr,
    Number,
    Product,
    Sum,
    Var,
    accesses,
    variables,
)


class Reads(Frame):
    """Turns index expressions and right-side expressions into lines of the kernel."""

    def index(self, index: Affine) -> Val:
        parts = [self.scaled(c, self.atom(a)) for c, a in index.terms]
        if index.offset or not parts:
            parts.append(Val(str(index.offset)))
        return combine(parts, "+")

    def scaled(self, coefficient: int, value: Val) -> Val:
        return value if coefficient == 1 else combine([value, Val(str(coefficient))], "*")

    def atom(self, atom: Var | Access) -> Val:
        return self.vars[atom.name] if isinstance(atom, Var) else self.load(atom, as_index=True)

    def offset(self, access: Access) -> Val:
        """Offset in elements; parts over the same axes are added first, so that two-dimensional
        arithmetic is done once.
        """
        if not access.indices:
            return Val("0")
        by_axes: dict[tuple[str, ...], list[Val]] = {}
        for dim, index in enumerate(access.indices):
            stride = Val(
                self.arg(
                    f"out_stride{dim}" if access.tensor == OUTPUT else f"{access.tensor}_s{dim}"
                )
            )
            value = self.index(index)
            part = Val(f"{_times(value.text)} * {stride.text}", value.axes, value.stage)
            by_axes.setdefault(part.axes, []).append(part)
        return combine([combine(parts, "+") for parts in by_axes.values()], "+")

    def mask_of(self, access: Access, offset: Val, *, as_index: bool) -> Val | None:
        masks = [
            m
            for axis, m in self.masks.items()
            if axis in offset.axes and set(m.axes) <= set(offset.axes)
        ]
        if any(m.axes == ("M", "K") for m in masks):  # a row beyond the last has no entries
            masks = [m for m in masks if m.axes != ("M",)]
        masks += self.inner_masks(access) if as_index else self.absent_masks(access, offset)
        # An index load that is out of range itself yields padding, so the padding's mask covers its
        # axes.
        covered = {axis for m in masks if m.text.endswith(">= 0)") for axis in m.axes}
        masks = [m for m in masks if m.text.endswith(">= 0)") or not set(m.axes) <= covered]
        return combine(distinct(masks), "&") if masks else None

    def absent_masks(self, access: Access, offset: Val) -> list[Val]:
        """Points that some padded index marks as absent: their values are not read."""
        depends, found = self.depends(access), []
        for index in access.indices:
            found += [m for vars_, m in self.point_masks if vars_ <= frozenset(variables(index))]
        return found + [
            m
            for vars_, m in self.point_masks
            if vars_ <= depends and set(m.axes) <= set(offset.axes)
        ]

    def inner_masks(self, access: Access) -> list[Val]:
        """Indices are read wherever they exist, absent point or not: they say where an output is
        stored, if only as zero.
        """
        padded = [a for i in access.indices for a in accesses(i) if a.tensor in self.plan.padded]
        return [
            Val(f"({v.text} >= 0)", v.axes, v.stage)
            for v in (self.load(a, as_index=True) for a in padded)
        ]

    def depends(self, access: Access) -> frozenset[str]:
        return frozenset(variables(access))

    def load(self, access: Access, *, as_index: bool = False) -> Val:
        key = (access, as_index)
        if access.tensor in self.plan.numbers:
            return Val(
                f"tl.cast({self.arg(f'{access.tensor}_number')}, "
                f"tl.{'int64' if self.plan.wide else 'int32'})"
            )
        if key in self.loaded:
            return self.loaded[key]
        offset = self.offset(access)
        mask = self.mask_of(access, offset, as_index=as_index)
        pointer = (
            f"{self.arg(f'{access.tensor}_ptr')} + {offset.text}"
            if access.indices
            else self.arg(f"{access.tensor}_ptr")
        )
        other = "-1" if as_index and access.tensor in self.plan.padded else "0"
        text = f"tl.load({pointer}" + (
            f", mask={mask.over(offset.axes)}, other={other})" if mask else ")"
        )
        stage = max(offset.stage, mask.stage if mask else 0)
        value = self.define_load(
            access, Val(self.cast_index(text) if as_index else text, offset.axes, stage), as_index
        )
        self.loaded[key] = value
        if as_index and access.tensor in self.plan.padded:
            self.point_masks.append(
                (self.depends(access), Val(f"({value.text} >= 0)", value.axes, value.stage))
            )
        return value

    def define_load(self, access: Access, value: Val, as_index: bool) -> Val:
        name = self.name(access.tensor)
        line = f"{name} = {value.text}"
        if as_index and value.stage == 2 and not self.late:
            self.index_lines.append(
                (name, line + (f"  # ({','.join(value.axes)})" if value.axes else ""))
            )
        else:
            self.line(value.stage, line, value.axes)
        return Val(name, value.axes, value.stage)

    # --- expressions ---

    def evaluate(self, expr: Expr, dtype: str) -> Val:
        match expr:
            case Number(value):
                return Val(repr(value) if math.isfinite(value) else f'float("{value}")')
            case Access(tensor, ()) if tensor in self.plan.numbers:
                return self.number(tensor, dtype)
            case Access():
                loaded = self.load(expr)
                return (
                    loaded
                    if dict(self.plan.kinds)[expr.tensor] == dtype
                    else Val(f"{loaded.text}.to(tl.{dtype})", loaded.axes, loaded.stage)
                )
            case Call(function, args):
                values = [self.argument(a, dtype) for a in args]
                axes = union(*(v.axes for v in values))
                return Val(
                    call(function, [v.over(axes) for v in values], dtype),
                    axes,
                    max(v.stage for v in values),
                )
            case Product(factors):
                return combine([self.evaluate(f, dtype) for f in factors], "*")
            case Sum(terms):
                return Val(
                    f"({(total := combine([self.evaluate(t, dtype) for t in terms], '+')).text})",
                    total.axes,
                    total.stage,
                )

    def number(self, tensor: str, dtype: str) -> Val:
        """A number that is passed; integers come in 32 bits where they fit, in which products of
        them, and identities of int64, need not.
        """
        name = self.arg(f"{tensor}_number")
        if dict(self.plan.kinds)[tensor].startswith("float"):
            return Val(name)
        return Val(f"tl.cast({name}, tl.{dtype})")

    def argument(self, expr: Expr, dtype: str) -> Val:
        """An argument of a function; numbers alone have no dtype yet, and functions want one."""
        value = self.evaluate(expr, dtype)
        typed = any(a.tensor not in self.plan.numbers for a in accesses(expr, nested=False))
        return (
            value
            if typed
            else Val(f"tl.full([], {value.text}, tl.{dtype})", value.axes, value.stage)
        )

    def prepare_masks(self) -> None:
        """Load every padded index tensor first, so that all other loads know the points that are
        absent.
        """
        for factor in (*self.plan.factors, self.plan.target):
            for access in accesses(factor):
                for index in access.indices:
                    for _, atom in index.terms:
                        if isinstance(atom, Access) and any(
                            a.tensor in self.plan.padded for a in accesses(atom)
                        ):
                            self.load(atom, as_index=True)


def distinct(values: list[Val]) -> list[Val]:
    return list({v.text: v for v in values}.values())


def _times(text: str) -> str:
    return text if re.fullmatch(r"\w+", text) else f"({text})"
