"""Where a tensor that a graph computes comes from: a pure function of integer tensors that are
passed to the graph.

While those are the same and unchanged from call to call, so is the tensor; what was found out about
it once stays true, and it need not be computed again. The function is kept as text, one line
without quotes, which `evaluate` runs: ``aten.eq.Scalar(s1,0)~aten.index.Tensor(s0,[None,v0])``.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Graph, Node

from insum.compat.sizes import is_hinted

aten, prims = torch.ops.aten, torch.ops.prims

#: Operations whose result depends on nothing but their arguments, to the last bit and in its order
#: (sorting, for one, may break ties either way).
_EXACT: set[Any] = {
    *(
        aten.index.Tensor,
        aten.index_select.default,
        aten.gather.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.unbind.int,
        operator.getitem,
    ),
    *(
        aten.cat.default,
        aten.stack.default,
        aten.arange.default,
        aten.arange.start,
        aten.arange.start_step,
        prims.iota.default,
        aten.full.default,
    ),
    *(
        aten.eq.Scalar,
        aten.eq.Tensor,
        aten.ne.Scalar,
        aten.ne.Tensor,
        aten.lt.Scalar,
        aten.lt.Tensor,
        aten.le.Scalar,
        aten.le.Tensor,
    ),
    *(
        aten.gt.Scalar,
        aten.gt.Tensor,
        aten.ge.Scalar,
        aten.ge.Tensor,
        aten.bitwise_and.Tensor,
        aten.bitwise_or.Tensor,
        aten.bitwise_not.default,
    ),
    *(
        aten.logical_and.default,
        aten.logical_or.default,
        aten.logical_not.default,
        aten.where.self,
        aten.masked_select.default,
        aten.nonzero.default,
    ),
    *(
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.mul.Tensor,
        aten.add.Scalar,
        aten.sub.Scalar,
        aten.mul.Scalar,
        aten.flip.default,
        prims.rev.default,
    ),
    *(
        aten.repeat.default,
        aten.div.Tensor,
        aten.pow.Tensor_Scalar,
        aten.rsqrt.default,
        aten.sqrt.default,
        aten.reciprocal.default,
        aten.neg.default,
    ),
    *(
        aten.clamp_min.default,
        aten.clamp_max.default,
        aten.clamp.default,
        aten.maximum.default,
        aten.minimum.default,
        aten.scalar_tensor.default,
    ),
    *(
        aten.view.default,
        aten.reshape.default,
        aten.expand.default,
        aten.permute.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
    ),
    *(
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.clone.default,
        aten.alias.default,
        aten._to_copy.default,
        prims.convert_element_type.default,
    ),
    *(aten.sym_size.int, operator.add, operator.sub, operator.mul),
}
#: Sums of numbers, whose order and so whose last bits may be others each time. No index tensor may
#: come from them.
SUMS: set[Any] = {aten.scatter_add.default, aten.index_add.default, aten.index_put.default}
_SYMBOLIC_SUM = getattr(torch, "sym_sum", None)
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"operator.{target.__name__}"
    if getattr(target, "__module__", "") == "_operator"
    else str(target): target
    for target in (*_EXACT, *SUMS)
} | ({"sym_sum": _SYMBOLIC_SUM} if _SYMBOLIC_SUM is not None else {})
_NAMES = {target: name for name, target in _FUNCTIONS.items()}
_NUMBERS = {"inf": float("inf"), "nan": float("nan")}
_MOST_SOURCES = 4
_MOST_NODES = 1024
_LINE = "~"
#: Tensors, sizes and lines in a program.
_WORD = r"\b[snv]\d+\b"


@dataclass(frozen=True, slots=True)
class Origin:
    """A function as text, and what it is applied to.

    Attributes:
        costly: whether it waits for the device, because a mask is counted out, or sums up.
    """

    program: str
    sources: tuple[Node, ...]
    sizes: tuple[Node, ...]
    costly: bool


def waits(node: Node) -> bool:
    """Whether the shape of a node's result depends on values: whoever computes it waits for the
    device.
    """
    if node.target in (aten.nonzero.default, aten.masked_select.default):
        return True
    return node.target is aten.index.Tensor and any(
        _is_mask(t)
        for t in node.args[1]  # type: ignore[union-attr]
        if t is not None
    )


def _is_mask(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, Tensor) and value.dtype == torch.bool


def origin_of(*nodes: Node, sums: bool = False) -> Origin | None:
    """The origin of computed tensors, or None where one depends on more than a few integer tensors
    and sizes. Several, of one shape, are stacked.

    ``sums``: numbers may be added up on the way, in whatever order.
    """
    below = None if any(node.op == "placeholder" for node in nodes) else _below(nodes)
    if below is None:
        return None
    # What is passed comes first: what a graph makes out of nothing is made on its device.
    sources: dict[Node, str] = {}
    sizes: dict[Node, str] = {}
    names = {one: _placeholder(one, sources, sizes) for one in below if one.op == "placeholder"}
    if None in names.values() or not 0 < len(sources) <= _MOST_SOURCES:
        return None
    devices = {
        value.device for source in sources if isinstance(value := source.meta["val"], Tensor)
    }
    calls = [one for one in below if one.op != "placeholder"]
    lines: list[str] = []
    for one in calls:
        arguments = [_text(a, names, devices) for a in one.args] + [
            f"{k}={_text(a, names, devices)}" for k, a in one.kwargs.items()
        ]
        if (
            one.target in SUMS
            and not _may_sum(one, sums)
            or any(_UNWRITABLE in a for a in arguments)
        ):
            return None
        names[one] = f"v{len(lines)}"
        lines.append(f"{_NAMES[one.target]}({','.join(arguments)})")  # type: ignore[index]
    if len(nodes) > 1:
        lines.append(f"aten.stack.default([{','.join(str(names[node]) for node in nodes)}])")
    return Origin(
        _LINE.join(lines),
        tuple(sources),
        tuple(sizes),
        any(one.target in SUMS or waits(one) for one in calls),
    )


def _may_sum(node: Node, sums: bool) -> bool:
    value = node.meta.get("val")
    exact = isinstance(value, Tensor) and not value.dtype.is_floating_point
    adds = node.target is not aten.index_put.default or len(node.args) > 3 and node.args[3] is True
    return adds and (sums or exact)


def _below(nodes: Sequence[Node]) -> list[Node] | None:
    """All that nodes depend on, and they themselves, each after what it depends on; None where that
    is much, or more than pure functions.
    """
    found: dict[Node, None] = {}
    todo = [(node, False) for node in reversed(nodes)]
    while todo:
        node, is_entered = todo.pop()
        if is_entered:
            found.setdefault(node)
        elif node not in found:
            if (
                node.op != "placeholder"
                and (node.op != "call_function" or node.target not in _NAMES)
                or len(found) >= _MOST_NODES
            ):
                return None
            todo += [(node, True), *((n, False) for n in reversed(node.all_input_nodes))]
    return list(found)


def pure_nodes(graph: Graph) -> set[Node]:
    """Nodes that may have an origin: they depend on integer tensors and sizes alone. One look at
    each node, for graphs may be long.
    """
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            pure = _placeholder(node, {}, {}) is not None
        else:
            pure = (
                node.op == "call_function"
                and node.target in _NAMES
                and all(n in found for n in node.all_input_nodes)
            )
        if pure:
            found.add(node)
    return found


def is_unknown(node: Node, captured: bool) -> bool:
    """Whether nothing can be known of an index tensor before it is used: it is computed anew, or
    will be there when a CUDA graph is replayed.
    """
    return captured or node.op != "placeholder" and origin_of(node) is None


def has_known_shape(node: Node) -> bool:
    """Whether the shape of a tensor does not come from values."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and all(map(is_hinted, value.shape))


def _placeholder(node: Node, sources: dict[Node, str], sizes: dict[Node, str]) -> str | None:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        is_integer = not (value.dtype.is_floating_point or value.dtype.is_complex)
        return sources.setdefault(node, f"s{len(sources)}") if is_integer else None
    return (
        sizes.setdefault(node, f"n{len(sizes)}") if isinstance(value, int | torch.SymInt) else None
    )


#: In place of an argument that has no text.
_UNWRITABLE = "?"


def _text(argument: Any, known: dict[Node, Any], devices: set[torch.device]) -> str:
    match argument:
        case Node():
            return str(known[argument])
        case list() | tuple():
            return f"[{','.join(_text(a, known, devices) for a in argument)}]"
        case None | bool() | int() | float():
            return repr(argument)
        case torch.dtype() | torch.layout() | torch.memory_format():
            return str(argument)
        case torch.device():
            return "device" if devices == {argument} else _UNWRITABLE
    return _UNWRITABLE


# --- running it -----------------------------------------------------------------------------------

OriginValues: TypeAlias = dict[str, Any]
#: What waits for the device: a name for it, the tensors and sizes that it is a function of, and how
#: to run it.
Share: TypeAlias = Callable[[str, tuple[Tensor, ...], tuple[int, ...], Callable[[], Any]], Any]


@dataclass(frozen=True, slots=True)
class Line:
    """One call of a program: the function, and how its arguments come out of the values so far.

    Attributes:
        name: a digest of the whole expression, in which tensors and sizes are numbered as they
            appear: the same in every program that has it.
        reads: those tensors and sizes.
    """

    function: Callable[..., Any]
    arguments: tuple[Callable[[OriginValues], Any], ...]
    more: tuple[tuple[str, Callable[[OriginValues], Any]], ...]
    name: str
    reads: tuple[str, ...]


@functools.lru_cache(maxsize=1024)
def _parsed(program: str) -> tuple[Line, ...]:
    lines: list[Line] = []
    for text in program.split(_LINE):
        one = ast.parse(text, mode="eval").body
        if not isinstance(one, ast.Call):
            raise ValueError(f"not a call: {text}")
        arguments = tuple(_argument(a) for a in one.args)
        more = tuple((str(a.arg), _argument(a.value)) for a in one.keywords)
        lines.append(Line(_FUNCTIONS[ast.unparse(one.func)], arguments, more, *_named(text, lines)))
    return tuple(lines)


def _named(text: str, before: Sequence[Line]) -> tuple[str, tuple[str, ...]]:
    """A name for what a line computes, the same in every program that computes it, and the tensors
    and sizes that it depends on.
    """
    of = {f"v{k}": line for k, line in enumerate(before)}
    words = [found[0] for found in re.finditer(_WORD, text)]
    reads = tuple(
        dict.fromkeys(
            read for word in words for read in (of[word].reads if word in of else (word,))
        )
    )
    place = {read: f"{read[0]}{k}" for k, read in enumerate(reads)}
    place |= {
        word: f"{line.name}({','.join(place[read] for read in line.reads)})"
        for word, line in of.items()
        if word in words
    }
    numbered = re.sub(_WORD, lambda found: place[found[0]], text)
    return hashlib.sha256(numbered.encode()).hexdigest(), reads


def evaluate(
    program: str, sources: Sequence[Tensor], sizes: Sequence[int], share: Share | None = None
) -> Any:
    """What a program gives for tensors and sizes. What waits for the device goes through ``share``,
    so that programs that have it in common wait once.

    >>> sources = [torch.tensor([[1, 2], [3, 4]]), torch.tensor([0, 1])]
    >>> evaluate("aten.eq.Scalar(s1,0)~aten.index.Tensor(s0,[None,v0])", sources, [])
    tensor([[1],
            [3]])
    """
    values: OriginValues = {f"s{k}": source for k, source in enumerate(sources)} | {
        f"n{k}": size for k, size in enumerate(sizes)
    }
    values["device"] = sources[0].device
    result: Any = None
    for k, line in enumerate(_parsed(program)):
        arguments = [argument(values) for argument in line.arguments]
        run = functools.partial(
            line.function, *arguments, **{key: argument(values) for key, argument in line.more}
        )
        if share is not None and _is_masked(line.function, arguments):
            reads = [values[name] for name in line.reads]
            result = share(
                line.name,
                tuple(r for r in reads if isinstance(r, Tensor)),
                tuple(r for r in reads if not isinstance(r, Tensor)),
                run,
            )
        else:
            result = run()
        values[f"v{k}"] = result
    return result


def _is_masked(function: Any, arguments: list[Any]) -> bool:
    if function in (aten.nonzero.default, aten.masked_select.default):
        return True
    return function is aten.index.Tensor and any(
        t is not None and t.dtype == torch.bool for t in arguments[1]
    )


def _argument(one: ast.expr) -> Callable[[OriginValues], Any]:
    match one:
        case ast.Name(name) if name in _NUMBERS:
            return _constant(_NUMBERS[name])
        case ast.Name(name):
            return operator.itemgetter(name)
        case ast.Constant(value):
            return _constant(value)
        case ast.List(items):
            parts = [_argument(item) for item in items]
            return lambda values: [part(values) for part in parts]
        case ast.UnaryOp(ast.USub(), operand):
            part = _argument(operand)
            return lambda values: -part(values)
        case ast.Attribute(ast.Name("torch"), name):
            return _constant(getattr(torch, name))
    raise ValueError(f"no such argument: {ast.unparse(one)}")


def _constant(value: Any) -> Callable[[OriginValues], Any]:
    return lambda values: value
