"""Dimensions that are indexed through tensors, and the range that values must keep there."""

from __future__ import annotations

from dataclasses import dataclass

from insum.lang.bind import Problem
from insum.lang.expr import Access, Affine, accesses


@dataclass(frozen=True, slots=True)
class Use:
    """One dimension of one access whose index has values of tensors in it.

    Attributes:
        access: what is indexed, ``dim`` which of its dimensions, ``index`` with what.
        is_target: whether the access is the left side, so that the limit is a size of the output.
        tensor: the index tensor where the index is that alone, or ''.
        padded: whether -1 marks an absent entry, ``wraps`` whether negative values count from the
            end.
    """

    access: Access
    dim: int
    index: Affine
    is_target: bool
    tensor: str
    padded: bool
    wraps: bool

    def low(self, problem: Problem) -> int:
        """The least value that is no error."""
        return -self.limit(problem) if self.wraps else -1 if self.padded else 0

    def limit(self, problem: Problem) -> int:
        """The length of the dimension."""
        sizes = problem.shape if self.is_target else problem.kinds[self.access.tensor].shape
        return int(sizes[self.dim])


def uses_of(problem: Problem, wraps: frozenset[str] = frozenset()) -> tuple[Use, ...]:
    """Every indexed dimension of the statement, those inside an index before those around it."""
    target = problem.statement.target
    every = (
        target,
        *(a for i in target.indices for a in accesses(i)),
        *(a for term in problem.terms for a in accesses(term.value)),
    )
    found: dict[tuple[bool, Access, int], Use] = {}
    for access in every:
        for dim, index in enumerate(access.indices):
            if any(True for _ in accesses(index)):
                key = access is target, access, dim
                found[key] = _use(problem, access, dim, index, wraps)
    return tuple(reversed(found.values()))


def _use(problem: Problem, access: Access, dim: int, index: Affine, wraps: frozenset[str]) -> Use:
    atom, is_target = index.atom, access is problem.statement.target
    alone = isinstance(atom, Access) and problem.kinds[atom.tensor].device is not None
    tensor = atom.tensor if alone and isinstance(atom, Access) else ""
    return Use(access, dim, index, is_target, tensor, tensor in problem.padded, tensor in wraps)
