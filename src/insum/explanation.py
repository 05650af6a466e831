"""What a call would do, as text: extents, roles, tensors, the graph, work and traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from insum import memory
from insum.call.prepared import is_fusable, prepare
from insum.call.request import Request, head
from insum.call.stages import is_orderable
from insum.graph.lower import lower
from insum.host.arguments import HostCall
from insum.host.choose import choose
from insum.host.patterns import Patterns
from insum.host.places import Lowering
from insum.host.roles import as_tensor
from insum.lang.bind import Problem, Value
from insum.lang.expand import ProductTerm
from insum.lang.expr import Call, Expr, Number, Product, Sum, accesses, tensors_of, variables
from insum.plan.config import Choice
from insum.plan.library import WHY
from insum.plan.path import operands_of
from insum.settings import settings


@dataclass(frozen=True, slots=True)
class Explanation:
    """The parts of an explanation; prints as a page of text, in notebooks too.

    Attributes:
        statement: What was asked for.
        roles: Name, extent and role of each index.
        tensors: Name, dtype, shape and device of each tensor.
        graph: The torch operations that define it, as Python.
        flops: Additions and multiplications.
        bytes: What is read and written at least.
        fused: Plan, cost and text of the generated kernel, or why there is none.
        order: The statements that the order of contraction makes, where there are several.
        host: How a CPU runs it.

    Examples:
        >>> import insum, torch
        >>> explanation = insum.explain("y[i] = A[i,j] * x[j]", A=torch.ones(2, 3), x=torch.ones(3))
        >>> explanation.roles, explanation.flops
        ((('i', 2, 'free'), ('j', 3, 'reduced')), 12)
    """

    statement: str
    roles: tuple[tuple[str, int, str], ...]
    tensors: tuple[tuple[str, str, str, str], ...]
    graph: str
    flops: int
    bytes: int
    fused: str = ""
    order: str = ""
    host: str = ""

    @property
    def intensity(self) -> float:
        """FLOPs per byte of unavoidable traffic."""
        return self.flops / self.bytes if self.bytes else 0.0

    def __str__(self) -> str:
        work = (
            f"{self.flops:,} FLOPs, {self.bytes:,} bytes at least, {self.intensity:.1f} "
            "FLOPs per byte"
        )
        indices = _table(("index", "extent", "role"), self.roles)
        tensors = _table(("tensor", "dtype", "shape", "device"), self.tensors)
        return "\n\n".join(
            part
            for part in (
                self.statement,
                indices,
                tensors,
                self.order,
                self.graph,
                self.host,
                work,
                self.fused,
            )
            if part
        )

    def _repr_html_(self) -> str:
        import html

        return f"<pre>{html.escape(str(self))}</pre>"


def explained(request: Request, values: Mapping[str, Value], gpu: str = "") -> Explanation:
    """What a call would do; ``gpu``: the kernel as one of that architecture would get it."""
    problem = request.bind(values)
    left = head(request.statement)
    target = values.get(left.target) if left.operator != "=" else None
    parts = parts_of(request, values)
    modes = [*["new"] * (len(parts) - 1), "new" if target is None else "into"]
    described = tuple((v, int(problem.extents[v]), role) for v, role in roles(problem).items())
    graphs = [lower(part.problem, mode).text for part, mode in zip(parts, modes, strict=True)]
    fused = [
        _fused_elsewhere(part, request.config, gpu)
        if gpu
        else _fused(part, request.config, accumulates=mode == "into")
        for part, mode in zip(parts, modes, strict=True)
    ]
    hosts = [
        _host(part.problem, part.values, new=mode == "new")
        for part, mode in zip(parts, modes, strict=True)
    ]
    work = sum(flops(part.problem) for part in parts)
    return Explanation(
        str(problem.statement),
        described,
        _tensors(problem),
        "\n\n".join(graphs),
        work,
        traffic(problem, target is not None),
        "\n\n".join(filter(None, fused)),
        _order(problem, request, parts, work),
        "\n\n".join(filter(None, hosts)),
    )


@dataclass(frozen=True, slots=True)
class ExplainedStatement:
    """One statement of those that a call runs: bound, with the values and buffers that it reads,
    and what it takes of the factors that are left.
    """

    problem: Problem
    values: Mapping[str, Value]
    positions: tuple[int, ...] = ()


def parts_of(request: Request, values: Mapping[str, Value]) -> tuple[ExplainedStatement, ...]:
    """The statements that a call runs. Buffers have no values: nothing is computed."""
    target = values.get(head(request.statement).target)
    in_place = head(request.statement).operator != "=" and isinstance(target, Tensor)
    call = prepare(request, values)
    stages = call.staged(values, in_place=in_place) if call.prepared.orderable else ()
    if not stages:
        return (ExplainedStatement(request.bind(values), values),)
    known, parts = dict(values), []
    for one in stages:
        given = one.given(known)
        initial = target if in_place and one is stages[-1] else None
        found = one.kinds.form.request(one.sizes).bind(given, initial)  # type: ignore[arg-type]
        parts.append(ExplainedStatement(found, given, one.stage.positions))
        shape = [int(size) for size in found.shape]
        known[one.stage.fills] = torch.empty(shape, dtype=found.dtype, device=found.device)
    return tuple(parts)


def _order(
    problem: Problem, request: Request, parts: Sequence[ExplainedStatement], work: int
) -> str:
    """The path that a product of several factors takes, and what it saves; what is copied
    into another layout first.
    """
    if len(parts) > 1 and not parts[-1].positions:
        lines = [f"  {part.problem.statement}" for part in parts]
        return "\n".join(["layouts: copies first, so that kernels read in wide loads", *lines])
    if not is_orderable(problem, request.form):
        return ""
    if len(parts) == 1:
        counts = ", ".join(str(tuple(range(len(operands_of(term))))) for term in problem.terms)
        return f"order of contraction: one statement, path [{counts}]"
    path = ", ".join(str(part.positions) for part in parts)
    head = f"order of contraction: {len(parts)} statements, path [{path}], {work:,} FLOPs instead "
    lines = [f"  {part.problem.statement}" for part in parts]
    return "\n".join([f"{head}of {flops(problem):,}", *lines])


def roles(problem: Problem) -> dict[str, str]:
    """What each index variable does: free, batch (free and in every factor), scattered (in the
    output through an index) or reduced.
    """
    target = problem.statement.target
    plain = {index.var for index in target.indices}
    written = set(variables(target))
    factors = [set(variables(f)) for term in problem.terms for f in term.factors if variables(f)]
    result = {}
    for var in problem.extents:
        everywhere = len(factors) > 1 and all(var in f for f in factors)
        free = "batch" if everywhere else "free"
        result[var] = free if var in plain else "scattered" if var in written else "reduced"
    return result


def roles_line(problem: Problem) -> str:
    return (
        "; ".join(f"{var}: {role}, {problem.extents[var]}" for var, role in roles(problem).items())
        or "no index"
    )


def flops(problem: Problem) -> int:
    """Multiplications, additions and function values, as a loop over every point of every term
    would do them.
    """
    return sum(
        prod(int(problem.extents[v]) for v in term.variables) * _operations(term)
        for term in problem.terms
    )


def _operations(term: ProductTerm) -> int:
    return _count(term.value) + 1  # the one is the accumulation


def _count(node: Expr) -> int:
    match node:
        case Call(_, args):
            return 1 + sum(map(_count, args))
        case Product(parts) | Sum(parts):
            return len(parts) - 1 + sum(map(_count, parts))
        case Number():
            return 0
    return 0


def traffic(problem: Problem, in_place: bool) -> int:
    """Bytes when every argument is read once and the output written once (and read once, where it
    is accumulated into).
    """
    read = {*tensors_of(problem.statement)}
    total = sum(
        prod(map(int, k.shape)) * k.dtype.itemsize
        for name, k in problem.kinds.items()
        if name in read and k.device is not None
    )
    return total + (2 if in_place else 1) * prod(map(int, problem.shape)) * problem.dtype.itemsize


def _tensors(problem: Problem) -> tuple[tuple[str, str, str, str], ...]:
    rows = []
    target = problem.statement.target.tensor
    indexing = {
        inner.tensor
        for a in (problem.statement.target, *accesses(problem.statement.value))
        for i in a.indices
        for inner in accesses(i)
    }
    for name, kind in problem.kinds.items():
        if name != target or name in tensors_of(problem.statement):
            use = "padded" if name in problem.padded else "index" if name in indexing else ""
            where = "number" if kind.device is None else str(kind.device)
            rows.append(
                (
                    name,
                    str(kind.dtype).removeprefix("torch."),
                    str(tuple(kind.shape)),
                    f"{where} ({use})" if use else where,
                )
            )
    rows.append(
        (
            target,
            str(problem.dtype).removeprefix("torch."),
            str(tuple(problem.shape)),
            f"{problem.device} (result)",
        )
    )
    return tuple(rows)


def _fused(part: ExplainedStatement, config: Choice | None, *, accumulates: bool) -> str:
    """The plan and the kernel, where a call would look for one."""
    problem, now = part.problem, settings.values
    if (
        now.backend in ("graph", "inductor")
        or now.backend == "auto"
        and problem.device.type != "cuda"
        and not now.require_fused
    ):
        return ""
    if not is_fusable(problem, now, config is not None, accumulates=accumulates):
        return f"no fused kernel: {WHY}"
    from insum.runtime import inspection

    return inspection.describe(problem, part.values, config=config)


def _fused_elsewhere(part: ExplainedStatement, config: Choice | None, gpu: str) -> str:
    """The same for a GPU that need not be here."""
    from insum.runtime import inspection

    look = inspection.elsewhere(part.problem, part.values, config=config, architecture=gpu)
    return inspection.described(look, anywhere=True)


def _host(problem: Problem, values: Mapping[str, Value], *, new: bool) -> str:
    """The way that a CPU takes instead of the graph, and why."""
    if settings.backend != "auto" or settings.require_fused or problem.device.type != "cpu":
        return ""
    found = way_of(problem, values, new=new)
    return "" if found is None or not found.why else f"on the CPU: {found.name}: {found.why}"


def way_of(problem: Problem, values: Mapping[str, Value], *, new: bool) -> Lowering | None:
    """The way that a CPU takes with these values; None: one graph."""
    found = choose(problem, new=new)
    if not isinstance(found, Patterns):
        return found
    entries = {n: memory.entry_of(as_tensor(values[n])) for n in problem.index_names()}
    return found.chosen(HostCall(values, entries))


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns of equal width; numbers to the right."""
    if not rows:
        return ""
    cells = [tuple(head), *(tuple(map(str, row)) for row in rows)]
    widths = [max(len(row[k]) for row in cells) for k in range(len(head))]
    right = [all(isinstance(row[k], int) for row in rows) for k in range(len(head))]
    lines = [
        "  ".join(
            cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right)
        ).rstrip()
        for row in cells
    ]
    return "\n".join(lines)
