"""Rows that travel between ranks while something else is computed, with gradients of every order.

An exchange has two ends: `_Begin` sets rows on their way, `_End` waits for them. The gradient of an
end is the other end of the exchange that leads back, so that a backward pass overlaps as the
forward pass does: autograd runs what was recorded between the two ends between them again. Both
ends are differentiable in turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from insum.compat.collectives import begin_all_to_all, finish, group_name
from insum.distributed.agreement import Turns, lost


@dataclass(frozen=True, eq=False)
class RowExchange:
    """Which of its rows a rank gives to which, and how many it takes from each.

    ``given`` holds numbers of own rows, those for rank 0 first; ``taken_rows`` are the rows that
    come, by number among all; ``moves`` is false where no rank of the group gives or takes
    anything.
    """

    given: Tensor
    taken_rows: Tensor
    give: tuple[int, ...]
    take: tuple[int, ...]
    group: dist.ProcessGroup
    turns: Turns
    moves: bool

    @property
    def taken(self) -> int:
        return sum(self.take)

    def pull(self, x: Tensor, dim: int) -> Flight:
        """Rows of others along a dimension, those that they give to this rank: on their way."""
        rows = x.index_select(dim, self.given).movedim(dim, 0)
        return Flight.of(rows, self.give, self.take, self, dim)

    def push(self, sums: Tensor, dim: int) -> Flight:
        """The other way: what was made for rows of others goes to their owners."""
        return Flight.of(sums.movedim(dim, 0), self.take, self.give, self, dim)


@dataclass(eq=False)
class _Passage:
    """One direction of one exchange; ``back`` is that of its gradient, once that has begun."""

    give: tuple[int, ...]
    take: tuple[int, ...]
    exchange: RowExchange
    work: dist.Work | None = None
    rows: Tensor | None = None
    back: _Passage | None = None

    def reversed(self) -> _Passage:
        return _Passage(self.take, self.give, self.exchange)

    def begin(self, x: Tensor) -> None:
        x = x.contiguous()
        self.rows = x.new_empty((sum(self.take), *x.shape[1:]))
        try:
            self.work = dist.all_to_all_single(
                self.rows, x, list(self.take), list(self.give), self.exchange.group, async_op=True
            )
        except RuntimeError as error:
            raise lost(error) from error

    def end(self) -> Tensor:
        rows, work = self.rows, self.work
        assert rows is not None and work is not None
        self.rows = self.work = None
        if rows.device.type == "cpu":
            self.exchange.turns.wait(work)
        else:
            work.wait()  # a stream waits, the host goes on
        return rows


@dataclass(frozen=True, eq=False)
class Flight:
    """Rows on their way; `land` gives them once they are there."""

    token: Tensor
    way: _Passage
    dim: int

    @classmethod
    def of(
        cls,
        rows: Tensor,
        give: tuple[int, ...],
        take: tuple[int, ...],
        exchange: RowExchange,
        dim: int,
    ) -> Flight:
        way = _Passage(give, take, exchange)
        # a compiler orders what it sees for itself
        begin = _AtOnce if torch.compiler.is_compiling() else _Begin
        return cls(_applied(begin, rows, way), way, dim)

    def land(self) -> Tensor:
        rows = self.token
        if not torch.compiler.is_compiling():
            rows = _applied(_End, self.token, self.way)
        return rows.movedim(0, self.dim)


def _applied(end: type[torch.autograd.Function], x: Tensor, way: _Passage) -> Tensor:
    found: Tensor = end.apply(x, way)  # type: ignore[no-untyped-call]
    return found


class _Begin(torch.autograd.Function):
    """Sets rows on their way. The result has no elements: it ties the two ends together."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, way: _Passage) -> Tensor:
        ctx.way = way  # type: ignore[attr-defined]
        way.begin(x)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        assert ctx.way.back is not None
        return _applied(_End, grad, ctx.way.back), None


class _End(torch.autograd.Function):
    """Waits for them."""

    @staticmethod
    def forward(ctx: FunctionCtx, token: Tensor, way: _Passage) -> Tensor:
        ctx.way = way  # type: ignore[attr-defined]
        return way.end()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.way.back = ctx.way.reversed()
        return _applied(_Begin, grad, ctx.way.back), None


class _AtOnce(torch.autograd.Function):
    """Both ends, as operators that can be traced."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, way: _Passage) -> Tensor:
        ctx.way = way  # type: ignore[attr-defined]
        name = group_name(way.exchange.group)
        return finish(begin_all_to_all(x.contiguous(), way.take, way.give, name))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _applied(_AtOnce, grad, ctx.way.reversed()), None
