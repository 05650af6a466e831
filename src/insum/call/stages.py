"""A statement as several, where its order of contraction has buffers, or where factors are copied
into another layout first.

The statements before the last each fill a buffer; the last has the left side of the whole, its
operator and its other terms. Each is a call of its own, of a kind of its own: it is planned, bound,
checked and launched as if a user had written it, and so may be left to a library or to the graph.
Buffers have the dtype in which contributions meet, so that nothing is rounded between statements;
but for half precision on GPUs, where they are rounded as the intermediates of PyTorch are, and for
copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from insum.call.request import Form
from insum.errors import UnsupportedError
from insum.lang import expand
from insum.lang.bind import Problem, Size, Value
from insum.lang.expr import (
    Access,
    Expr,
    Number,
    Statement,
    Var,
    accesses,
    names_of,
    product,
    tensors_of,
    total,
    variables,
)
from insum.lang.types import Typed, accumulator, infer, is_rounded, promoted
from insum.plan.library import HALVES
from insum.plan.order import (
    CannotOrder,
    Ordered,
    Path,
    adds_up_first,
    is_worth_an_order,
    ordered,
)
from insum.plan.path import NEVER, is_path, operands_of, wish_of
from insum.plan.reversed_path import reversed_path
from insum.plan.sizes import MemoryLayout, layout_of, typical
from insum.plan.steps import Place, Step, Term
from insum.plan.substitution import determined
from insum.runtime.classify import example

#: Statements of more products than this run as they are.
MOST_TERMS = 16
#: Up to so many places a side of a factor is short.
SHORT_SIDE = 512
#: How much more an order may cost whose buffers other statements have as well.
NEARLY, NEARLY_ON_A_CPU = 1.25, 1.5
#: Dtypes that matrix units multiply.
_MULTIPLIED = (torch.float16, torch.bfloat16, torch.float32)
#: How every tensor of a call lies in memory, by name.
Layouts: TypeAlias = tuple[tuple[str, MemoryLayout], ...]
#: Where a size is found in the whole: the extent of a variable, or a dimension of a tensor.
SizeSource: TypeAlias = str | Place


@dataclass(frozen=True, slots=True)
class Stage:
    """One statement of several.

    Attributes:
        fills: the buffer that it makes, or '' for the last.
        reads: tensors and buffers, by name.
        sizes: where the sizes that its form asks for are found.
        positions: what it takes of the factors that are left, as in opt_einsum.
    """

    form: Form
    fills: str
    reads: tuple[str, ...]
    sizes: tuple[SizeSource, ...]
    positions: tuple[int, ...]

    def size_values(self, problem: Problem) -> tuple[Size, ...]:
        """The sizes that its form asks for, in a call of these."""
        return tuple([_size(problem, found) for found in self.sizes])


def is_orderable(problem: Problem, form: Form) -> bool:
    """Whether a call may be worth several statements, whatever its sizes. A config is one for a
    single kernel; a maximum is no contraction; truth values are not added up.
    """
    return (
        form.config is None
        and form.optimize != NEVER
        and problem.statement.operator in ("=", "+=")
        and problem.dtype != torch.bool
        and len(problem.terms) <= MOST_TERMS
        and (
            is_path(form.optimize) or any(_may_have_orders(problem, term) for term in problem.terms)
        )
    )


def _may_have_orders(problem: Problem, term: expand.ProductTerm) -> bool:
    """Three and more factors may; fewer where that may ever pay: others are not asked at each
    call.
    """
    operands, target = operands_of(term), problem.statement.target
    if len(operands) >= 3 or len(operands) == 2 and is_worth_an_order(target, *operands):
        return True
    return problem.device.type != "cpu" and adds_up_first(target, operands)


def is_copyable(problem: Problem, form: Form) -> bool:
    """Whether kernels may be better off with factors in another layout, whatever the sizes: in
    products of dense tensors, which matrix units multiply.
    """
    if form.config is not None or form.optimize == NEVER or is_path(form.optimize):
        return False
    if len(problem.terms) != 1:
        return False
    operands = operands_of(problem.terms[0])
    kinds = [problem.kinds[a.tensor] for f in operands for a in accesses(f)]
    return (
        problem.statement.operator in ("=", "+=")
        and not problem.target_read
        and len(operands) >= 2
        and all(map(_is_dense, operands))
        and all(isinstance(a, Var) for i in problem.statement.target.indices for _, a in i.terms)
        and all(kind.dtype in _MULTIPLIED and kind.device == problem.device for kind in kinds)
    )


def _is_dense(factor: Expr) -> bool:
    """Whether a factor reads one tensor, by variables alone."""
    return isinstance(factor, Access) and all(
        isinstance(atom, Var) for index in factor.indices for _, atom in index.terms
    )


def layouts_of(problem: Problem, values: Mapping[str, Value]) -> Layouts:
    """How the tensors that a call reads lie in memory."""
    found = {name: values[name] for name in tensors_of(problem.statement)}
    return tuple(
        (name, layout_of(value.shape, value.stride(), value.itemsize))
        for name, value in found.items()
        if isinstance(value, Tensor)
    )


def size_key(sizes: Iterable[Any]) -> tuple[int, ...]:
    """What of all sizes decides: their powers of two, as numbers below zero.

    >>> size_key([0, 2, 3, 4, 5])
    (0, 2, -2, -2, -3)
    """
    known = [n if type(n) is int else example(n) for n in sizes]
    return tuple([n if n < 3 else -(n - 1).bit_length() for n in known])


def stages_of(
    problem: Problem, form: Form, *, may_index: bool = True, layouts: Layouts = ()
) -> tuple[Stage, ...]:
    """The statements of a call, none where one is best. ``may_index``: whether those before the
    last may read or write through index tensors. ``layouts``: of a call whose factors may be
    copied into others.

    >>> import torch
    >>> from insum.call.request import request_of
    >>> request = request_of("Y[i,l] = A[i,j] * B[j,k] * C[k,l]", None, None, ())
    >>> problem = request.bind(dict.fromkeys("ABC", torch.empty(1024, 1024, device="meta")))
    >>> [stage.form.statement for stage in stages_of(problem, request.form)]
    ['A_B[i,k] = A[i,j] * B[j,k]', 'Y[i,l] = A_B[i,k] * C[k,l]']
    """
    chosen = _Chosen(problem, may_index, layouts)
    paths: list[Ordered | None] = []
    if is_orderable(problem, form):
        wish = wish_of(problem, form.optimize)
        paths = [chosen.path(term, wish) for term in problem.terms]
    if layouts and all(path is None or len(path.steps) == 1 for path in paths):
        paths = [chosen.copies(problem.terms[0], layouts)]
    if all(path is None or len(path.steps) == 1 for path in paths):
        return ()
    return _StageWriter(problem, form).written(paths)


def along_path(problem: Problem, form: Form, path: Path, factors: tuple[str, ...]) -> Path:
    """The path by which a gradient is computed of buffers that gradients by other ``factors`` have,
    too, where that takes about as long as the best one: the ``path`` of the product, reversed.
    """
    if len(problem.terms) != 1 or not is_orderable(problem, form):
        return ()
    (term,) = problem.terms
    found = reversed_path(path, factors, tuple(map(str, operands_of(term))))
    if found is None:
        return ()
    try:
        along = _Chosen(problem, True, ()).path(term, found)
    except UnsupportedError:
        return ()
    best = _Chosen(problem, True, ()).path(term, "auto")
    nearly = NEARLY_ON_A_CPU if problem.device.type == "cpu" else NEARLY
    near = along is not None and best is not None and along.cost <= nearly * best.cost
    return found if near else ()


class _Chosen:
    """Decides on terms, one after the other, so that their names do not meet."""

    def __init__(self, problem: Problem, may_index: bool, layouts: Layouts) -> None:
        self.problem, self.may_index, self.layouts = problem, may_index, layouts
        self.types = {name: kind.type for name, kind in problem.kinds.items()}
        self.taken = names_of(problem.statement) | set(problem.kinds)
        self.extents = {v: typical(example(n)) for v, n in problem.extents.items()}
        self.shapes = {name: _typical(kind.shape) for name, kind in problem.kinds.items()}

    def path(self, term: expand.ProductTerm, wish: str | Path) -> Ordered | None:
        operands = operands_of(term)
        asked = not isinstance(wish, str)
        if not asked and not _may_have_orders(self.problem, term):
            return None
        if infer(term.value, self.types).dtype == torch.bool:
            return None
        try:
            found = ordered(self.described(term, operands), wish)
        except CannotOrder as reason:
            raise self.problem.complain(
                UnsupportedError,
                f"the factors at {reason.positions} of optimize cannot be a statement of their own",
                expected="factors with a precision of their own, something that is left to do "
                "behind them, and no padded index whose variable others have",
                remedy='optimize="auto"',
            ) from None
        self.taken |= {step.target.tensor for step in found.steps} | set(found.places)
        return found

    def copies(self, term: expand.ProductTerm, layouts: Layouts) -> Ordered | None:
        from insum.plan.layouts import copied  # which takes a while to import

        return copied(self.described(term, operands_of(term)), dict(layouts))

    def described(self, term: expand.ProductTerm, operands: tuple[Expr, ...]) -> Term:
        number = infer(term.value, self.types).dtype
        exact = number.is_floating_point or number.is_complex
        loose = [not is_rounded(f, self.types) for f in operands]
        found = Term(
            self.problem.statement.target,
            operands,
            frozenset(k for k, f in enumerate(operands) if loose[k] and _has_call(f)),
            frozenset(k for k in range(len(operands)) if exact and loose[k]),
            self.extents,
            self.shapes,
            _typical(self.problem.shape),
            self.problem.padded,
            frozenset(self.taken),
            may_scatter=len(self.problem.terms) == 1,
            may_index=self.may_index,
            # matrix units that read half precision add up what is gathered as quickly as it comes
            adds_first=number not in HALVES or self.problem.device.type != "cuda",
            on_cpu=self.problem.device.type == "cpu",
        )
        uneven = self.has_uneven_sides() and not found.on_cpu and found.is_three_way
        return replace(found, uneven=uneven)

    def has_uneven_sides(self) -> bool:
        """Whether short dimensions of dense factors end inside of a load."""
        return any(
            not fills and self.shapes[name][dim] <= SHORT_SIDE
            for name, layout in self.layouts
            for dim, fills in enumerate(layout.fills)
        )


def _typical(shape: tuple[Size, ...]) -> tuple[int, ...]:
    return tuple(typical(example(size)) for size in shape)


def _has_call(factor: Expr) -> bool:
    return not isinstance(factor, Access)


class _StageWriter:
    """Writes paths down as statements with their options."""

    def __init__(self, problem: Problem, form: Form) -> None:
        self.problem, self.form = problem, form
        self.types = {name: kind.type for name, kind in problem.kinds.items()}
        self.wide: set[str] = set()  # buffers that are wider than what is multiplied

    def written(self, paths: list[Ordered | None]) -> tuple[Stage, ...]:
        stages: list[Stage] = []
        values: list[Expr] = []
        places: dict[str, Place] = {}
        target = self.problem.statement.target
        positions: tuple[int, ...] = ()
        for term, path in zip(self.problem.terms, paths, strict=True):
            if path is None:
                values.append(term.value)
                continue
            places |= path.places
            dtype = self.dtype_of(term)
            for step in path.steps[:-1]:
                exact = self.is_exact(step, path)
                stages.append(self.filling(step, accumulator(dtype) if exact else dtype, places))
                if exact:
                    self.wide.add(step.target.tensor)
            numbers = [f for f in term.factors if isinstance(f, Number)]
            values.append(product([*numbers, *path.steps[-1].factors]))
            if len(path.steps) > 1:
                # of several terms none is scattered early, so that the left side is the same
                target, positions = path.steps[-1].target, path.steps[-1].positions
        whole = Statement(target, self.problem.statement.operator, total(values))
        dims: tuple[SizeSource, ...] = tuple(("", d) for d in range(len(target.indices)))
        return *stages, self.stage(whole, "", dims, places, self.problem.dtype, positions)

    def dtype_of(self, term: expand.ProductTerm) -> torch.dtype:
        """Of buffers: what contributions meet in, and never narrower than the product. Between
        products of half precision on a GPU it is that, as in ``(A @ B) @ C``: matrix units multiply
        nothing wider at their speed.
        """
        dtype = promoted(infer(term.value, self.types).dtype, self.problem.dtype)
        if self.problem.device.type == "cuda" and dtype in HALVES:
            return dtype
        return accumulator(dtype)

    def is_exact(self, step: Step, path: Ordered) -> bool:
        """Whether a buffer is as precise as a kernel's sums: where all of them are little, where it
        is a sum and nothing is a product of matrices, and where it is what is scattered.
        """
        last = path.steps[-1].factors
        if path.exact or _adds(step) and not any(one.multiplied for one in path.steps):
            return True
        return len(last) == 1 and step.target.tensor in {a.tensor for a in accesses(last[0])}

    def filling(self, step: Step, dtype: torch.dtype, places: Mapping[str, Place]) -> Stage:
        value, adds = product(list(step.factors)), _adds(step)
        if isinstance(value, Access) and not adds:
            dtype = self.types[value.tensor].dtype
        elif len(step.factors) == 1 and adds or self.wide & {a.tensor for a in accesses(value)}:
            # a sum may be too large for half precision where that of the products is not
            dtype = accumulator(dtype)
            self.wide.add(step.target.tensor)
        real = not infer(value, self.types).dtype.is_complex and dtype.is_complex
        dtype = dtype.to_real() if real else dtype
        self.types[step.target.tensor] = Typed(dtype, 2 if step.dims else 1)
        dims = tuple(places.get(v, v) for v in step.dims)
        statement = Statement(step.target, "=", value)
        return self.stage(statement, step.target.tensor, dims, places, dtype, step.positions)

    def stage(
        self,
        statement: Statement,
        fills: str,
        dims: tuple[SizeSource, ...],
        places: Mapping[str, Place],
        dtype: torch.dtype,
        positions: tuple[int, ...],
    ) -> Stage:
        used = dict.fromkeys((*variables(statement.target), *variables(statement.value)))
        reads = tensors_of(statement)
        form = Form(
            str(statement),
            (*((d, None) for d in range(len(dims))), *((v, None) for v in used)),
            tuple(name for name in self.form.padded if name in _indexing(statement)),
            dtype,
            None,
            self.form.wraps & frozenset(reads),
            NEVER,
        )
        return Stage(form, fills, reads, (*dims, *(places.get(v, v) for v in used)), positions)


def _adds(step: Step) -> bool:
    """Whether several points meet in a place of what a step makes."""
    read = {v for factor in step.factors for v in variables(factor)}
    return not read <= determined(step.target.indices)


def _indexing(statement: Statement) -> set[str]:
    """The index tensors of a statement."""
    every = (statement.target, *accesses(statement.target), *accesses(statement.value))
    return {a.tensor for access in every for index in access.indices for a in accesses(index)}


def _size(problem: Problem, found: SizeSource) -> Size:
    if isinstance(found, str):
        return problem.extents[found]
    tensor, dim = found
    return problem.kinds[tensor].shape[dim] if tensor else problem.shape[dim]
