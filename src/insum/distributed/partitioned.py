"""`Partitioned`: a sparse matrix whose rows are on several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from insum.accepted import DTYPE, FLAG, TENSOR, TENSORS, require, takes
from insum.distributed.cuts import Cuts
from insum.distributed.exchange import RowExchange
from insum.distributed.joined import JoinedPattern, joined_pattern
from insum.errors import BindingError, DeviceError, FormatError
from insum.formats import COO, SparseFormat
from insum.formats.einsum import einsum
from insum.formats.operands import StatementOwner
from insum.notebook import table
from insum.plan.path import Optimize

if TYPE_CHECKING:
    from typing_extensions import Self

    from insum.distributed.needs import RankPlan, UnitExchange

    AnyExchange = UnitExchange | RowExchange


@dataclass(frozen=True)
class RankTraffic:
    """What one rank holds (rows; entries of its three parts) and sends and receives in a product:
    rows of the dense factor, and sums for rows of the result.
    """

    rows: int
    own: int
    far: int
    out: int
    rows_in: int
    rows_out: int
    sums_in: int
    sums_out: int

    @classmethod
    def counted(
        cls, rows: int, plan: RankPlan, columns: AnyExchange, sums: AnyExchange
    ) -> RankTraffic:
        """Of a rank with so many rows; ``sums`` travel against the way of their exchange."""
        return cls(
            rows=rows,
            own=len(plan.own.rows),
            far=len(plan.far.rows),
            out=len(plan.out.rows),
            rows_in=sum(columns.take),
            rows_out=sum(columns.give),
            sums_in=sum(sums.give),
            sums_out=sum(sums.take),
        )

    @property
    def entries(self) -> int:
        return self.own + self.far + self.out

    @property
    def received(self) -> int:
        return self.rows_in + self.sums_in


@dataclass(frozen=True, eq=False, repr=False)
class Partitioned(StatementOwner):
    """One rank's part of a sparse matrix; made by `partition` and `partition_edges`.

    ``insum.einsum`` takes it as it takes a format: ``Y[m,n] = A[m,k] * X[k,n]``, ``Y[k,n] = A[m,k]
    * X[m,n]``, or ``S[m,k] = A[m,k] * X[m,f] * Y[k,f]``, whose result is a matrix with the same
    partition. Tensors with a row for each row or column of the matrix hold this rank's rows, plain
    tensors of torch's; all others are the same on every rank. Every rank makes the same calls.

    Each entry is held once, by one rank.

    Attributes:
        own: The entries between rows and columns of this rank.
        far: Those between its rows and rows that come from others.
        out: Those between rows of others, for which it sums, and its columns.
        columns: How rows of the dense factor travel.
        rows: How sums travel.
        shape: Of the whole matrix.
        row_cuts: Where its rows are cut.
        column_cuts: Where its columns are cut.
        order: The old row at each new place; None where rows stay where they were.
        mesh: One dimension of a device mesh.
        traffic: What each rank holds, sends and receives.
        balance: What is even.
        send: What may travel.

    Examples:
        >>> from insum.distributed import partition
        >>> from insum.formats import COO
        >>> A = partition(COO.from_dense(torch.eye(3)), mesh)
        >>> A.shape, A.own.nnz, A.far.nnz
        ((3, 3), 3, 0)
    """

    own: SparseFormat
    far: SparseFormat
    out: SparseFormat
    columns: RowExchange
    rows: RowExchange
    shape: tuple[int, ...]
    row_cuts: Cuts
    column_cuts: Cuts
    order: Tensor | None
    mesh: Any
    traffic: tuple[RankTraffic, ...]
    balance: str
    send: str

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def rank(self) -> int:
        return self.rows.turns.rank

    @property
    def group(self) -> dist.ProcessGroup:
        return self.rows.group

    @property
    def device(self) -> torch.device:
        return self.own.device

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the values; ``None`` for a pattern."""
        return self.own.dtype

    @property
    def nnz(self) -> int:
        """Entries that this rank holds."""
        return sum(part.nnz for part in self.parts)

    @property
    def parts(self) -> tuple[SparseFormat, SparseFormat, SparseFormat]:
        return self.own, self.far, self.out

    @property
    def row_range(self) -> range:
        """Rows of the matrix that this rank holds, in the order of the partition."""
        return range(self.row_cuts[self.rank], self.row_cuts[self.rank + 1])

    @property
    def column_range(self) -> range:
        """Columns that this rank holds: the rows of what the matrix is multiplied with."""
        return range(self.column_cuts[self.rank], self.column_cuts[self.rank + 1])

    @property
    def values(self) -> tuple[Tensor, ...]:
        """The values of `own`, `far` and `out`; nothing for a pattern."""
        return tuple(part.values for part in self.parts if part.values is not None)

    @takes(FormatError, values=TENSORS.optional)
    def with_values(self, values: tuple[Tensor, ...] | None) -> Self:
        """The same pattern and plan with other values of the three parts."""
        if values is None:
            parts: list[SparseFormat] = [part.pattern() for part in self.parts]
        elif len(values) != len(self.parts):
            raise FormatError(
                f"{len(values)} tensors of values were passed",
                expected="three: of own, far and out, as `values` has them",
            )
        else:
            parts = [part.with_values(one) for part, one in zip(self.parts, values)]
        return self._with_parts(parts)

    def pattern(self) -> Self:
        """The same entries, each counting as 1."""
        return self.with_values(None)

    @takes(FormatError, requires_grad=FLAG)
    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Ask for gradients of the values, in place."""
        for part in self.parts:
            part.requires_grad_(requires_grad)
        return self

    @takes(FormatError, dtype=DTYPE)
    def to(self, dtype: torch.dtype) -> Self:
        """The same with values of another dtype; a partition stays on its device."""
        return self._with_parts([part.to(dtype=dtype) for part in self.parts])

    def _with_parts(self, parts: list[SparseFormat]) -> Self:
        own, far, out = parts
        made = replace(self, own=own, far=far, out=out)
        for name in ("_joined", "_degrees"):  # what belongs to the pattern
            if name in self.__dict__:
                object.__setattr__(made, name, self.__dict__[name])
        return made

    def entries(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Row, column and value of each entry (or block) that this rank holds, in the order of the
        partition; blocks are counted in blocks.
        """
        coordinates, values = self.coordinates()
        return coordinates[0], coordinates[1], values

    def coordinates(self) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """The same with all coordinates of entries that have more than two."""
        block = self.own.block_shape_or_none or (1,) * self.ndim
        first = self.row_range.start // block[0], self.column_range.start // block[1]
        far, out = self._unit_numbers(block)
        found = [part.entries() for part in self.parts]
        (r0, c0), (r1, c1), (r2, c2) = ([c.long() for c in e.coords[:2]] for e in found)
        rows = torch.cat([r0 + first[0], r1 + first[0], out[r2]])
        columns = torch.cat([c0 + first[1], far[c1], c2 + first[1]])
        rest = [torch.cat(one).long() for one in zip(*(e.coords[2:] for e in found))]
        values = [e.values for e in found if e.values is not None]
        return (rows, columns, *rest), torch.cat(values) if values else None

    def _unit_numbers(self, block: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Numbers of the units that come, and of those for which this rank sums."""
        return (
            self.columns.taken_rows[:: block[1]].div(block[1], rounding_mode="floor"),
            self.rows.taken_rows[:: block[0]].div(block[0], rounding_mode="floor"),
        )

    def joined(self) -> JoinedPattern:
        """The rows of this rank as one pattern over its columns and, behind them, rows that
        come.
        """
        found: JoinedPattern | None = self.__dict__.get("_joined")
        if found is None:
            found = joined_pattern(self.own, self.far, self.rows.moves)
            object.__setattr__(self, "_joined", found)
        return found

    def ends(self) -> tuple[Tensor, Tensor]:
        """Source and target of every edge into a row of this rank, the sources as numbers of rows
        of `pulled`.
        """
        found = self.joined()
        return found.columns, found.rows

    def degrees(self) -> Tensor:
        """How many entries there are in each row of this rank, as float32."""
        found: Tensor | None = self.__dict__.get("_degrees")
        if found is None:
            with torch.no_grad():
                found = einsum("D[m] = A[m,k]", A=self.pattern()).float()
            object.__setattr__(self, "_degrees", found)
        return found

    def pulled(self, x: Tensor) -> Tensor:
        """Rows of this rank, and behind them those that come for its entries: what the columns of
        `joined` are numbers in.
        """
        self.check_rows("x", x, 0, self.column_range)
        if not self.columns.moves:
            return x
        with self.rows.turns.turn():
            return torch.cat([x, self.columns.pull(x, 0).land()])

    def check_rows(self, name: str, x: Tensor, dim: int, held: range) -> None:
        if hasattr(x, "to_local"):
            raise BindingError(
                f"{name} is a DTensor, which cuts rows evenly",
                expected="this rank's rows as a plain tensor",
                remedy=f"insum.distributed.distribute_rows({name}.full_tensor(), A)",
            )
        if x.device != self.device:
            raise DeviceError(
                f"the matrix is on {self.device} but {name} is on {x.device}",
                expected="all operands on one device",
                remedy=f"{name}.to({str(self.device)!r})",
            )
        if x.shape[dim] != len(held):
            raise BindingError(
                f"{name} has {x.shape[dim]} rows, but rank {self.rank} holds {len(held)}, those "
                f"from {held.start} to {held.stop}",
                expected=f"{len(held)} in dimension {dim}",
                remedy=f"insum.distributed.distribute_rows({name}, A)",
            )

    def run_statement(
        self,
        text: str,
        given: Mapping[str, Any],
        *,
        dense_output: bool = False,
        optimize: Optimize = True,
    ) -> Any:
        from insum.distributed.statements import run

        if torch.compiler.is_compiling():
            return run(self, text, given, dense_output, optimize)
        with self.rows.turns.turn():
            return run(self, text, given, dense_output, optimize)

    def __matmul__(self, x: Tensor) -> Any:
        require("the right factor", x, TENSOR)
        text = "C[m] = A[m,k] * B[k]" if x.dim() == 1 else "C[m,n] = A[m,k] * B[k,n]"
        return einsum(text, A=self, B=x)

    def __repr__(self) -> str:
        held = self.row_range
        kind = type(self.own).__name__
        return (
            f"Partitioned({kind}, shape={self.shape}, rank {self.rank} of "
            f"{len(self.row_cuts) - 1}: rows {held.start} to {held.stop}, {self.nnz} entries, "
            f"{self.columns.taken} rows come, {self.rows.taken} sums go)"
        )

    def _repr_html_(self) -> str:
        parts = {"own": self.own, "far": self.far, "out": self.out}
        rows = [(name, repr(part)) for name, part in parts.items()]
        return table(("entries", "format"), rows, repr(self))


def joined_matrix(A: Partitioned) -> COO:
    """The rows of this rank with their values over the columns of `Partitioned.pulled`."""
    return A.joined().with_values(A.own.values, A.far.values)
