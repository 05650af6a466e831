"""Statements over a partitioned matrix: every rank computes its parts, rows and sums travel.

An entry lies between a row and a column, each of which is this rank's or another's. In ``Y[m,n] =
A[m,k] * X[k,n]`` rows of ``X`` come for the entries of ``far``, and what the entries of ``out`` sum
up goes to the owner of the row of ``Y``. With the roles of rows and columns exchanged the same
holds for ``Y[k,n] = A[m,k] * X[m,n]``, and for every product of such factors. What is sent is on
its way while the entries of ``own`` are multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from insum.compat.tensors import base_of
from insum.distributed.exchange import Flight, RowExchange
from insum.distributed.partitioned import Partitioned, joined_matrix
from insum.errors import BindingError, DeviceError, UnsupportedError
from insum.formats import SparseFormat
from insum.formats.layout import memoised
from insum.formats.run import run_formats
from insum.lang.expand import expand
from insum.lang.expr import Access, Statement, accesses, fresh, names_of, rewrite
from insum.lang.parser import parse
from insum.plan.path import Optimize


@dataclass(frozen=True)
class PartitionRoles:
    """Where the rows and the columns of the matrix stand: dimension by operand, and on the left.

    An operand that stands with rows and with columns has a second name in ``text`` for the latter.
    """

    text: str
    second: tuple[tuple[str, str], ...]
    matrix: str
    target: str
    operator: str
    rows: tuple[tuple[str, int], ...]
    columns: tuple[tuple[str, int], ...]
    row_out: int | None
    column_out: int | None


@memoised
def roles_of(text: str, matrix: str, others: tuple[str, ...]) -> PartitionRoles:
    """The roles of a statement; an error where rows of one rank alone do not give its result."""
    statement = parse(text)
    row, column = _indices_of(statement, matrix)
    by_row = _standing(statement, matrix, row)
    second = {
        name: fresh(f"{name}_of_{column}", {*names_of(statement), *others})
        for name in _standing(statement, matrix, column)
        if name in by_row
    }

    def renamed(access: Access) -> Access:
        if access.tensor in second and _dimension(statement, access, column) is not None:
            return replace(access, tensor=second[access.tensor])
        return access

    statement = replace(statement, value=rewrite(statement.value, renamed))
    text = str(statement)
    by_row, by_column = (_standing(statement, matrix, v) for v in (row, column))
    row_out, column_out = (_dimension(statement, statement.target, v) for v in (row, column))
    if row_out is None and column_out is None:
        raise _refused(
            text,
            f"{statement.target} has neither index {row!r} nor {column!r} of {matrix}: it would be "
            "a sum over all ranks",
            remedy=f"a statement with {row!r} on its left, then a sum, then all_reduce",
        )
    return PartitionRoles(
        text,
        tuple((new, old) for old, new in second.items()),
        matrix,
        statement.target.tensor,
        statement.operator,
        tuple(by_row.items()),
        tuple(by_column.items()),
        row_out,
        column_out,
    )


def _standing(statement: Statement, matrix: str, variable: str) -> dict[str, int]:
    """The dimension in which each operand but the matrix has a variable."""
    found: dict[str, int] = {}
    for access in accesses(statement.value):
        dim = _dimension(statement, access, variable) if access.tensor != matrix else None
        if dim is not None and found.setdefault(access.tensor, dim) != dim:
            raise _refused(
                statement.text, f"{access.tensor} has index {variable!r} in different dimensions"
            )
    return found


def _indices_of(statement: Statement, matrix: str) -> tuple[str, str]:
    """The index variables of the rows and the columns of the matrix, the same in every term."""
    seen = set()
    for term in expand(statement):
        found = [a for factor in term.factors for a in accesses(factor) if a.tensor == matrix]
        if len(found) != 1:
            raise _refused(
                statement.text,
                f"{matrix} stands {len(found)} times in the term {term.value}",
                remedy="terms without the matrix in a statement of their own",
            )
        seen.add(found[0].indices[:2])
    names = [index.var for index in next(iter(seen))]
    if len(seen) > 1 or None in names or len(set(names)) < 2:
        raise _refused(
            statement.text,
            f"{matrix} is not read at two variables, the same in every term",
            remedy=f"{matrix}[m,k]",
        )
    return str(names[0]), str(names[1])


def _dimension(statement: Statement, access: Access, variable: str) -> int | None:
    """Where a variable stands by itself in an access; inside of an index it must not be."""
    dims = [dim for dim, index in enumerate(access.indices) if index.var == variable]
    inside = [
        index
        for index in access.indices
        if index.var is None and variable in {a.name for _, a in index.terms if hasattr(a, "name")}
    ]
    if len(dims) > 1 or inside:
        raise _refused(
            statement.text, f"index {variable!r}, whose rows are on several ranks, in {access}"
        )
    return dims[0] if dims else None


def _refused(text: str, fact: str, remedy: str = "") -> UnsupportedError:
    return UnsupportedError(
        fact,
        statement=text,
        expected="one partitioned matrix A[m,k] in every term, with m or k by themselves elsewhere",
        remedy=remedy,
    )


# --- running --------------------------------------------------------------------------------------


def run(
    A: Partitioned, text: str, given: Mapping[str, Any], dense_output: bool, optimize: Optimize
) -> Any:
    """One statement, on every rank at once."""
    matrix = _only(A, text, given)
    roles = roles_of(text, matrix, tuple(given))
    given = {**given, **{new: given[old] for new, old in roles.second if old in given}}
    _check(A, roles, given)
    call = _PartitionCall(A, roles.text, roles, given, optimize)
    if roles.row_out is not None and roles.column_out is not None:
        if dense_output:
            raise _refused(
                text, "the result has the partition of the matrix, and was asked for dense"
            )
        return call.sampled()
    return call.product() if roles.operator in ("=", "+=") else call.of_whole_rows()


def _only(A: Partitioned, text: str, given: Mapping[str, Any]) -> str:
    names = [name for name, x in given.items() if isinstance(x, Partitioned | SparseFormat)]
    if len(names) != 1:
        raise _refused(text, f"{' and '.join(names)} are sparse")
    return names[0]


def _check(A: Partitioned, roles: PartitionRoles, given: Mapping[str, Any]) -> None:
    """Everything that one rank can see, before anything is sent."""
    for name, x in given.items():
        if isinstance(x, Tensor) and x.dim() and x.device != A.device:
            raise DeviceError(
                f"{roles.matrix} is on {A.device} but {name} is on {x.device}",
                expected="all operands on one device",
                remedy=f"{name}.to({str(A.device)!r})",
            )
    for places, out, held in (
        (roles.rows, roles.row_out, A.row_range),
        (roles.columns, roles.column_out, A.column_range),
    ):
        passed = [(roles.target, out)] if out is not None and roles.target in given else []
        for name, dim in (*places, *passed):
            if not isinstance(given.get(name), Tensor) or given[name].dim() <= dim:
                raise BindingError(
                    f"{name} has no dimension {dim}",
                    expected=f"a tensor with rows of {roles.matrix}",
                )
            A.check_rows(name, given[name], dim, held)


@dataclass(frozen=True, eq=False)
class _PartitionCall:
    """One call: what was passed, by part."""

    matrix: Partitioned
    text: str
    roles: PartitionRoles
    given: Mapping[str, Any]
    optimize: Optimize

    @property
    def _into_passed(self) -> bool:
        """Whether the result is a tensor that was passed to be added to."""
        return self.roles.operator != "=" and self.roles.target in self.given

    def product(self) -> Tensor:
        """Rows or columns on the left: one part of the entries adds to what is this rank's, another
        makes sums for others.
        """
        A, roles = self.matrix, self.roles
        by_row = roles.row_out is not None
        dim = roles.row_out if roles.row_out is not None else roles.column_out
        assert dim is not None
        adding, pushing = ("far", "out") if by_row else ("out", "far")
        exchange = A.rows if by_row else A.columns
        coming = {"far": self._pulled(A.columns, roles.columns)}
        coming["out"] = self._pulled(A.rows, roles.rows)
        sums: Flight | None = None
        if exchange.moves:
            made = self._run(getattr(A, pushing), self._landed(coming[pushing]), alone=True)
            sums = exchange.push(made, dim)
        result: Tensor = self._run(A.own, {})
        if (A.columns if by_row else A.rows).moves:
            result = self._added(result, getattr(A, adding), self._landed(coming[adding]))
        if sums is not None:
            result = self._scattered(result, dim, exchange.given, sums.land())
        return result

    def _added(self, result: Tensor, part: SparseFormat, instead: Mapping[str, Tensor]) -> Tensor:
        """In place where autograd does not look, or where the user has asked for it."""
        if self._into_passed or not _recorded(result, part.values, *instead.values()):
            self._run(part, instead, into=result)
            return result
        made: Tensor = self._run(part, instead, alone=True)
        return result + made

    def _scattered(self, result: Tensor, dim: int, places: Tensor, sums: Tensor) -> Tensor:
        """Sums added to rows; what an operator gave as a view is not written to while autograd
        looks.
        """
        if torch.compiler.is_compiling():
            return result.index_add(dim, places, sums)
        given = base_of(result) is not None and not self._into_passed
        if given and _recorded(result, sums):
            return result.index_add(dim, places, sums)
        return result.index_add_(dim, places, sums.to(result.dtype))

    def sampled(self) -> Partitioned:
        """Rows and columns on the left: new values for the same entries."""
        A, roles = self.matrix, self.roles
        far = self._pulled(A.columns, roles.columns)
        out = self._pulled(A.rows, roles.rows)
        made = [
            self._run(A.own, {}),
            self._run(A.far, self._landed(far) if far else self._empty(roles.columns)),
            self._run(A.out, self._landed(out) if out else self._empty(roles.rows)),
        ]
        return A.with_values(tuple(part.values for part in made))

    def of_whole_rows(self) -> Tensor:
        """Largest and smallest values, and means, of whole rows at a time."""
        A, roles = self.matrix, self.roles
        if roles.row_out is None:
            raise _refused(
                self.text,
                f"{roles.operator} over rows of {roles.matrix}, which are on several ranks",
                remedy="a partition of the transposed matrix",
            )
        flights = self._pulled(A.columns, roles.columns)
        whole = {
            name: torch.cat([self.given[name], flight.land()], flight.dim)
            for name, flight in flights.items()
        }
        found: Tensor = self._run(joined_matrix(A), whole)
        return found

    def _pulled(
        self, exchange: RowExchange, places: tuple[tuple[str, int], ...]
    ) -> dict[str, Flight]:
        if not exchange.moves:
            return {}
        return {name: exchange.pull(self.given[name], dim) for name, dim in places}

    def _landed(self, flights: Mapping[str, Flight]) -> dict[str, Tensor]:
        return {name: flight.land() for name, flight in flights.items()}

    def _empty(self, places: tuple[tuple[str, int], ...]) -> dict[str, Tensor]:
        """What comes where nothing travels."""
        return {name: self.given[name].narrow(dim, 0, 0) for name, dim in places}

    def _run(
        self,
        part: SparseFormat,
        instead: Mapping[str, Tensor],
        *,
        into: Tensor | None = None,
        alone: bool = False,
    ) -> Any:
        """The statement over one part: by itself, or added to a tensor."""
        roles, text = self.roles, self.text
        given = {**self.given, **instead, roles.matrix: part}
        if alone or into is not None:
            given.pop(roles.target, None)
        if into is not None:
            given[roles.target] = into
            text = _with_operator(text, "+=")
        elif alone:
            text = _with_operator(text, "=")
        return run_formats(text, given, optimize=self.optimize)


def _recorded(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


@memoised
def _with_operator(text: str, operator: str) -> str:
    statement = parse(text)
    return str(Statement(statement.target, operator, statement.value))
