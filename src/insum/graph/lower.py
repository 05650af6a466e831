"""Problem -> torch.fx.GraphModule: gather, einsum, scatter. The reference semantics, and what runs
where there is no faster path.

A graph is made once per *kind* of problem (statement, dtypes, ranks, device), takes sizes as
arguments, and serves every shape for which it would be made so. The stages are one class each, in
the order of the data: `graph.gather` reads, `graph.value` computes, `graph.scatter` writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule

from insum.bounded import keep
from insum.errors import UnsupportedError
from insum.graph.contraction import Pair
from insum.graph.scatter import GraphWriter
from insum.graph.value import VariablesOfFactors, best_order, is_short
from insum.lang.bind import Problem, Size, Value
from insum.lang.expand import ProductTerm
from insum.lang.expr import accesses

MOST_GRAPHS = 1024
_graphs: dict[object, list[Lowered]] = {}


@dataclass(frozen=True, slots=True)
class SizedGraph:
    """A graph of torch operations, and the sizes to call it with."""

    forward: Callable[..., Tensor]
    inputs: tuple[str, ...]
    sizes: tuple[object, ...]
    late: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lowered:
    """A graph and how to call it: the old output first (unless ``mode`` is ``new``), then
    ``inputs``, then ``sizes`` ('' is the output's shape).

    Attributes:
        late: arguments that are still read while the output is written; they must not lie in its
            memory.
        short: what sizes decided: variables, how many places are few for them, and whether theirs
            are.
        orders: what sizes decided: products, and in which order their factors are multiplied.
    """

    module: GraphModule
    inputs: tuple[str, ...]
    sizes: tuple[str, ...]
    mode: str
    late: tuple[str, ...] = ()
    short: tuple[tuple[tuple[tuple[str, ...], int], bool], ...] = ()
    orders: tuple[tuple[VariablesOfFactors, tuple[Pair, ...]], ...] = ()

    def suits(self, problem: Problem) -> bool:
        """Whether a problem of the same kind would get the same graph."""
        return all(is_short(problem, *asked) is short for asked, short in self.short) and all(
            best_order(problem, *product) == order for product, order in self.orders
        )

    def size_arguments(self, problem: Problem) -> tuple[Size | tuple[Size, ...], ...]:
        return tuple(problem.extents[s] if s else problem.shape for s in self.sizes)

    def __call__(
        self, problem: Problem, values: Mapping[str, Value], target: Tensor | None = None
    ) -> Tensor:
        arguments = (
            [values[name] for name in self.inputs]
            if target is None
            else [target, *(values[name] for name in self.inputs)]
        )
        forward: Callable[..., Tensor] = self.module.forward
        return forward(*arguments, *self.size_arguments(problem))

    @property
    def text(self) -> str:
        """The graph as readable Python."""
        code = re.sub(r";  .*= None$", "", self.module.code.strip(), flags=re.MULTILINE)
        code = re.sub(
            r"torch\.(functional|_C\._nn)\.",
            "torch.",
            code.replace("(self, ", "(").replace("(self)", "()"),
        )
        return "\n".join(line for line in code.splitlines() if line.strip())


def lower(problem: Problem, mode: str = "new") -> Lowered:
    """The graph of a problem. ``mode``: ``new`` starts from the identity, ``from`` from a given
    value, ``into`` writes in place.

    >>> from insum.lang.bind import bind
    >>> from insum.lang.parser import parse
    >>> A, B = torch.ones(4, 9), torch.ones(3, 5)
    >>> D, E = torch.tensor([0, 2, 2, 1]), torch.tensor([8, 0, 3])
    >>> statement = parse("C[D[y],x] += A[y,E[r]] * B[r,x]")
    >>> print(lower(bind(statement, dict(A=A, B=B, C=torch.zeros(4, 5), D=D, E=E)), "into").text)
    def forward(C, A, E, B, D):
        A_gathered = torch.index_select(A, 1, E)
        contracted = torch.einsum('yr,rx->yx', A_gathered, B)
        C_written = C.index_add_(0, D, contracted)
        return C
    """
    terms = live_terms(problem)
    key = _kind(problem, tuple(map(problem.terms.index, terms)), mode)
    graph = next((g for g in _graphs.get(key, ()) if g.suits(problem)), None)
    if graph is None:
        graph = _build(problem, terms, mode)
        keep(_graphs, key, [], MOST_GRAPHS).append(graph)
    return graph


def live_terms(problem: Problem) -> list[ProductTerm]:
    """Terms that contribute: their space has a point, and nothing is read from (or written to) a
    tensor without elements.

    The latter is possible with valid indices only where all of them are padding.
    """
    if 0 in problem.shape:
        return []
    return [t for t in problem.terms if not _is_empty(problem, t)]


def _is_empty(problem: Problem, term: ProductTerm) -> bool:
    reads = {a.tensor for a in accesses(term.value)} | {
        a.tensor for i in problem.statement.target.indices for a in accesses(i)
    }
    return any(problem.extents[v] == 0 for v in term.variables) or any(
        0 in problem.kinds[name].shape for name in reads
    )


def _kind(problem: Problem, live: tuple[int, ...], mode: str) -> object:
    kinds = tuple(
        (name, k.dtype, len(k.shape), k.device, k.strength) for name, k in problem.kinds.items()
    )
    return (
        problem.statement,
        kinds,
        problem.dtype,
        problem.device,
        problem.padded,
        live,
        mode,
        torch.get_default_dtype(),
    )


def _build(problem: Problem, terms: list[ProductTerm], mode: str) -> Lowered:
    if problem.statement.operator in ("max=", "min=") and problem.dtype == torch.uint64:
        raise problem.complain(
            UnsupportedError,
            f"{problem.statement.operator} is not done for uint64",
            remedy="use int64",
        )
    writer = GraphWriter(problem)
    builder, evaluator = writer.builder, writer.evaluator
    if mode != "new":
        builder.initial(problem.statement.target.tensor)
    module = builder.finish(writer.build(terms, mode))
    return Lowered(
        module,
        tuple(builder.inputs),
        tuple(builder.sizes),
        mode,
        writer.late,
        tuple(evaluator.short.items()),
        tuple(evaluator.orders.items()),
    )
