"""The size class of a call: what about its sizes and strides decides a plan, as a key.

Made for every call with sizes that were not met before, so that the quick part is a tuple, and a
`SizeClass` is put together only where there is no program yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from insum.compat.sizes import size_or
from insum.lang.bind import Problem
from insum.lang.expr import Access, accesses, tensors_of, variables
from insum.plan.sizes import (
    BASE,
    FEW,
    LOADS,
    MOST_MULTIPLE,
    NEW,
    OUT,
    Extent,
    SizeClass,
    Strides,
    Walked,
    class_of,
    spread_strides,
    strides_of,
    typical,
    unit_of,
)

_INDICES = (
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
)


def running(problem: Problem) -> frozenset[str]:
    """Variables that index tensors are read at: their extents change from call to call. But not
    the columns of a result: what divides them decides how its rows are written.
    """
    written = problem.statement.target.indices
    columns = written[-1].var if len(written) > 1 else None
    return frozenset(
        v
        for _, _, index in problem.index_uses()
        for inner in accesses(index)
        for v in variables(inner)
        if v != columns
    )


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def classified(
    problem: Problem,
    runs: frozenset[str],
    values: Mapping[str, Any],
    extents: Sequence[int],
    shape: tuple[int, ...],
    target: Tensor | None,
) -> SizeClass:
    """The class of one call."""
    tensors = {name: values[name] for name in _read(problem)}
    strides: dict[str, Strides] = {}
    # extents and strides are passed, also those that lead nowhere: of a dimension of one place, of
    # one that was expanded
    reach, numel = max([math.prod(shape), *extents]), {}
    for name, tensor in tensors.items():
        sizes, steps = tensor.shape, tensor.stride()
        vector = tensor.dtype not in _INDICES
        strides[name] = strides_of(sizes, steps, tensor.itemsize, vector=vector)
        reach = max(reach, _reach(tensor))
        numel[name] = typical(tensor.numel())
    if isinstance(base := values.get(BASE), Tensor):
        steps = spread_strides(base.shape, base.stride(), shape)
        strides[BASE] = strides_of(shape, steps, base.itemsize, vector=True)
        reach = max(reach, _reach(base))
    itemsize = problem.dtype.itemsize
    steps = contiguous_strides(shape)
    strides[NEW] = strides[OUT] = strides_of(shape, steps, itemsize, vector=True)
    if target is not None:
        strides[OUT] = strides_of(shape, target.stride(), itemsize, vector=True)
        reach = max(reach, _reach(target))
    return SizeClass(
        {v: class_of(n, runs=v in runs) for v, n in zip(problem.extents, extents)},
        tuple(map(typical, shape)),
        numel,
        strides,
        wide=reach >= 2**31 - 1,
        runs=runs,
        walked=_walked(problem),
    )


def _walked(problem: Problem) -> dict[str, Walked]:
    """What the dimensions of tensors are walked by, where they are read first."""
    statement = problem.statement
    found = {OUT: _dimensions(statement.target)}
    for read in (*accesses(statement.value), *accesses(statement.target)):
        found.setdefault(read.tensor, _dimensions(read))
    return found


def _dimensions(read: Access) -> Walked:
    return tuple(None if any(accesses(i)) else variables(i) for i in read.indices)


def symbolic(problem: Problem, runs: frozenset[str], values: Mapping[str, Any]) -> SizeClass:
    """The class of a call some of whose sizes are symbols: what is true of every size they may
    have. A tensor of changing size may grow past what 32 bits can address.
    """
    strides: dict[str, Strides] = {}
    numel: dict[str, int] = {}
    for name, tensor in values.items():
        if isinstance(tensor, Tensor):
            vector = tensor.dtype not in _INDICES
            strides[name] = _of_symbols(tensor.stride(), tensor.itemsize, vector=vector)
            numel[name] = typical(math.prod(example(n) for n in tensor.shape))
    shape = problem.shape
    steps = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    strides[NEW] = strides[OUT] = _of_symbols(steps, problem.dtype.itemsize, vector=True)
    return SizeClass(
        {
            v: class_of(n, runs=v in runs)
            if isinstance(n, int)
            else Extent(typical(example(n)), open=True)
            for v, n in problem.extents.items()
        },
        tuple(typical(example(n)) for n in shape),
        numel,
        strides,
        wide=True,
        runs=runs,
    )


def _of_symbols(strides: Sequence[Any], itemsize: int, *, vector: bool) -> Strides:
    units = tuple(
        unit_of(s, itemsize, vector=vector) if isinstance(s, int) else -1 for s in strides
    )
    return Strides(units, (False,) * max(0, len(units) - 1))


def classifier(
    problem: Problem, runs: frozenset[str], *, into: bool, based: bool = False
) -> Callable[[Mapping[str, Any], tuple[int, ...], tuple[int, ...], Any], tuple[Any, ...]]:
    """Straight-line code for a key that is equal exactly where `classified` gives the same: a
    function of the values, the extents, the shape, and what is written to (where ``into``).
    ``based``: what is accumulated from is among the values.
    """
    lines, parts, reaches = [], [], []
    x = [f"x{k}" for k in range(len(problem.extents))]
    d = [f"d{k}" for k in range(len(problem.shape))]
    lines += [_unpacked(x, "x"), _unpacked(d, "d")]
    for size, name in zip(x, problem.extents):
        parts.append(_extent_code(size, runs=name in runs))
    parts += map(_size_code, d)
    whole = " * ".join(d) or "1"
    reaches += [whole, *x]
    for number, name in enumerate(_read(problem)):
        kind = problem.kinds[name]
        sizes = [f"s{number}_{k}" for k in range(len(kind.shape))]
        strides = [f"r{number}_{k}" for k in range(len(kind.shape))]
        lines.append(f"t = v[{name!r}]")
        lines += [_unpacked(sizes, "t.shape"), _unpacked(strides, "t.stride()")]
        lines.append(f"n{number} = {' * '.join(sizes) or '1'}")
        parts.append(_size_code(f"n{number}"))
        vector = kind.dtype not in _INDICES
        parts += _strides_code(sizes, strides, kind.dtype.itemsize, vector)
        reaches += [_last(sizes, strides), *strides]
    if based:
        b = [f"b{k}" for k in range(len(d))]
        lines.append(f"t = v[{BASE!r}]")
        lines.append(_unpacked(b, "spread(t.shape, t.stride(), d)"))
        parts += _strides_code(
            d, b, problem.kinds[problem.statement.target.tensor].dtype.itemsize, True
        )
        reaches += [_last(d, b), *b]
    itemsize = problem.dtype.itemsize
    o = [f"o{k}" for k in range(len(d))]
    lines += [f"{one} = {' * '.join(d[k + 1 :]) or '1'}" for k, one in enumerate(o)]
    parts += _strides_code(d, o, itemsize, True)
    if into:
        w = [f"w{k}" for k in range(len(d))]
        lines.append(_unpacked(w, "t_.stride()"))
        parts += _strides_code(d, w, itemsize, True)
        reaches += [_last(d, w), *w]
    parts.append(f"{' or '.join(f'{r} >= {2**31 - 1}' for r in reaches)}")
    body = "\n".join([*filter(None, lines), f"return ({', '.join(parts)},)"])
    names: dict[str, Any] = {"spread": spread_strides}
    indented = body.replace("\n", "\n    ")
    exec(f"def classify(v, x, d, t_):\n    {indented}\n", names)
    found: Callable[..., tuple[Any, ...]] = names["classify"]
    return found


def _unpacked(names: Sequence[str], values: str) -> str:
    """Every value under a name of its own: each is used several times."""
    return f"{', '.join(names)}, = {values}" if names else ""


def _read(problem: Problem) -> list[str]:
    """Tensors that are read; what is written to is passed on its own."""
    names = tensors_of(problem.statement)
    return [name for name in names if problem.kinds[name].device is not None]


def _size_code(n: str) -> str:
    """The power of two of a size; see `typical`."""
    return f"({n} if {n} < 3 else ({n} - 1).bit_length() + 2)"


def _extent_code(x: str, *, runs: bool) -> str:
    """The power of two of an extent and what it is a multiple of, in one number; see `class_of`."""
    most = f"({x} - 1).bit_length()"
    divides = f"(512 if {x} < 3 or not {x} & ({x} - 1) else min({x} & -{x}, {MOST_MULTIPLE}))"
    both = f"({x} if {x} < 3 else {most} << 10 | {divides})"
    return f"({most} << 10 if {x} > {FEW} else {both})" if runs else both


def _strides_code(
    sizes: Sequence[str], strides: Sequence[str], itemsize: int, vector: bool
) -> list[str]:
    found = []
    units = [w // itemsize for w in LOADS if w > itemsize] if vector else []
    for k, s in enumerate(strides):
        code = "-1"
        for unit in reversed(units):
            code = f"{-unit} if not {s} % {unit} else {code}"
        found.append(f"({s} if {s} < 2 else {code})")
        if k + 1 < len(strides):
            before = " * ".join(sizes[: k + 1])
            found.append(f"({before} < 2 or {s} == {strides[k + 1]} * {sizes[k + 1]})")
    return found


def _last(sizes: Sequence[str], strides: Sequence[str]) -> str:
    """One more than the offset of the last element, see `_reach`; of a tensor without elements it
    may say more.
    """
    return " + ".join(["1", *(f"({n} - 1) * {s}" for n, s in zip(sizes, strides))])


#: Sizes for which a kernel is laid out where a size is a symbol that gives no example.
TYPICAL = 4096


def example(size: Any) -> int:
    """A size, or one that a symbol may well have."""
    return size if isinstance(size, int) else size_or(size, 0) or TYPICAL


def _reach(tensor: Tensor) -> int:
    """Offsets and strides of a tensor are at most this."""
    sizes, steps = tensor.shape, tensor.stride()
    last = sum((n - 1) * s for n, s in zip(sizes, steps, strict=True)) if tensor.numel() else 0
    return max([last + 1, *steps])
