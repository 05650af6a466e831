"""Operands as other libraries hold them: arrays of NumPy, sparse tensors of torch, sparse arrays of
SciPy. They are taken as they are, converted at every call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from insum.accepted import Accepted
from insum.call.request import head
from insum.errors import BindingError
from insum.formats.base import SparseFormat
from insum.formats.block import BlockCOO
from insum.formats.coo import COO
from insum.plan.path import Optimize

_BLOCKED = (torch.sparse_bsr, torch.sparse_bsc)
SPARSE_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, *_BLOCKED)


def taken(statement: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Operands that insum knows, in place of those that other libraries made; what is neither stays
    for the error message.

    >>> import numpy
    >>> taken("y[i] = A[i]", {"A": numpy.ones(2)})
    {'A': tensor([1., 1.], dtype=torch.float64)}
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        known = isinstance(value, SparseFormat)  # as the most are
        found[name] = value if known else _one(statement, name, value)
    return found


def _one(statement: str, name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.layout not in SPARSE_LAYOUTS:
            return value
        if value.layout in _BLOCKED:
            block = tuple(value.values().shape[-2:])
            batch = (1,) * (value.dim() - 2)
            return BlockCOO.from_torch(value, block_shape=(*batch, *block))
        return COO.from_torch(value)
    if hasattr(value, "tocoo") and hasattr(value, "format"):
        if value.format == "bsr":
            return BlockCOO.from_scipy(value, block_shape=tuple(map(int, value.blocksize)))
        return COO.from_scipy(value)
    return _array(statement, name, value) if type(value).__module__ == "numpy" else value


def _array(statement: str, name: str, value: Any) -> Any:
    """A tensor over the memory of an array, so that what is added to it is seen there."""
    import numpy as np

    if not isinstance(value, np.ndarray | np.generic):
        return value
    try:
        whole = isinstance(value, np.ndarray) and value.flags.writeable
        return torch.from_numpy(value) if whole else _copied(statement, name, value)
    except ValueError:  # strides below zero, which torch has not
        return _copied(statement, name, value)
    except TypeError:  # objects and text, which binding refuses
        return value


def _copied(statement: str, name: str, value: Any) -> Tensor:
    left = head(statement)
    if name == left.target and left.operator != "=":
        raise BindingError(
            f"{name} is an array that cannot be written to through a tensor",
            statement=statement,
            expected="an array that is writeable, with strides of 0 and above",
            remedy=f"{name} = {name}.copy()",
        )
    return torch.tensor(value.copy())


class StatementOwner:
    """An operand that runs the statements it stands in, such as a matrix whose rows are on several
    ranks.
    """

    shape: tuple[int, ...]

    def run_statement(
        self,
        text: str,
        given: Mapping[str, Any],
        *,
        dense_output: bool = False,
        optimize: Optimize = True,
    ) -> Any:
        raise NotImplementedError

    def degrees(self) -> Tensor:
        """How many entries each row has that is here."""
        raise NotImplementedError

    def ends(self) -> tuple[Tensor, Tensor]:
        """Columns and rows of all entries in rows that are here, as numbers of rows of `pulled`."""
        raise NotImplementedError

    def pulled(self, x: Tensor) -> Tensor:
        """A row for each column that `ends` names, where ``x`` has those that are here."""
        raise NotImplementedError


OWNER = Accepted(
    "a matrix whose rows are on several ranks", lambda v: isinstance(v, StatementOwner)
)


def owner_of(given: Mapping[str, object]) -> StatementOwner | None:
    """The operand that runs a statement, where there is one."""
    return next((x for x in given.values() if isinstance(x, StatementOwner)), None)


def has_format(given: Mapping[str, object]) -> bool:
    for x in given.values():  # noqa: SIM110  # on the path of every call
        if isinstance(x, SparseFormat):
            return True
    return False
