"""The pass: chains of a graph replaced by calls of one op each."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from insum.compat.compiler import functional_call
from insum.fusion import means, parts, products, sampled, sequences, series, side_by_side
from insum.fusion.chains import Chains, find
from insum.fusion.cost import objection
from insum.fusion.hoist import hoist, still_waited_for, sweep
from insum.fusion.later import compute_again, later_of, save
from insum.fusion.op import Computed, Spec
from insum.fusion.read import CONTRACTIONS, RULES
from insum.fusion.report import (
    Fused,
    Left,
    MovedProduct,
    Once,
    Report,
    add,
    note_written,
    where_of,
)
from insum.fusion.roots import Chain
from insum.fusion.series import Series, template_of
from insum.fusion.shapes import alike, is_contiguous, same, shape_of, value_of
from insum.fusion.siblings import Siblings
from insum.fusion.trial import PassTrial
from insum.lang.bind import Size
from insum.lang.expr import accesses, fresh
from insum.settings import settings

aten = torch.ops.aten
FUSED, INTO, IN_PLACE = (
    torch.ops.insum.fused.default,
    torch.ops.insum.fused_into.default,
    torch.ops.insum.fused_into_.default,
)
SERIES, EXTREMUM = torch.ops.insum.fused_series.default, torch.ops.insum.fused_extremum.default
#: What the backward pass may do again: gathers, and what is computed point by point.
COMPUTED_AGAIN = RULES.keys() - CONTRACTIONS.keys()
#: Operations whose result lies in memory of its own whatever comes after.
_OWN = (aten.mm.default, aten.bmm.default, aten.addmm.default)


def fuse(graph: Graph, wish: str = "", *, captured: bool = False) -> Report:
    """Replace every chain that is worth it by one op. ``wish`` goes before `settings.fuse`.

    ``captured``: the graph will be replayed as a CUDA graph, on index tensors whose values nobody
    sees then. They are taken as they come.

    Args:
        graph: A graph of ATen operations, rewritten in place.
        wish: What goes before `settings.fuse`.
        captured: Whether the graph will be replayed as a CUDA graph.

    Returns:
        What was fused and what was left.

    Examples:
        >>> fuse(Graph()).fused
        ()
    """
    trial = PassTrial(graph)
    fused: list[Fused] = []
    stages: dict[str, Callable[[Graph, Chains], list[Fused] | None]] = {}
    if not captured:
        stages |= {"relations": _join_relations, "series": _join_series}
    stages["chains"] = functools.partial(_replace_each, captured=captured)
    asked = wish or settings.fuse
    moved = none = tuple[MovedProduct, ...]()
    early = {
        "matrices at places": sampled,
        "means": means,
        "parts": parts,
        "side by side": side_by_side,
    }
    for name, work in early.items():
        moved += trial.run(name, functools.partial(work.rewrite, graph, asked), none)
    search = functools.partial(_worth_it, graph, wish, captured)
    chains = trial.run("search", search, Chains((), ()))
    inside = frozenset(n for one in chains.found for n in one.inlined if n is not one.root)
    commute = functools.partial(products.rewrite, graph, asked, inside)
    commuted = trial.run("products of nodes", commute, None)
    if commuted != ():  # done or put back, as below
        moved += commuted or ()
        chains = trial.run("search", search, Chains((), ()))
    left = _left(graph, chains)
    for name, stage in stages.items():
        if not chains.found:
            break
        found = trial.run(name, functools.partial(stage, graph, chains), None)
        fused += found or []
        if found != [] and name != "chains":  # done or put back, nodes are others now
            chains = trial.run("search", search, Chains((), ()))
            left = _left(graph, chains)
    read_through = {n for chain in chains.found for n in chain.inlined}
    once: tuple[Once, ...] = ()
    if fused:
        trial.run("sums in place", functools.partial(_add_in_place, graph), None)
        once = () if captured else trial.run("hoist", functools.partial(hoist, graph), ())
        trial.run("saved values", functools.partial(save, graph), None)
        again = functools.partial(compute_again, graph, read_through, COMPUTED_AGAIN)
        trial.run("values computed again", again, None)
        if not captured:  # nothing is recognised again there
            trial.run("sequences", functools.partial(sequences.join, graph), None)
    report = Report(tuple(fused), left, once, tuple(trial.failed), moved)
    if report.fused or report.left or report.failed or report.moved:
        add(report)
    return report


def _left(graph: Graph, chains: Chains) -> tuple[Left, ...]:
    backward = later_of(graph).backward
    return tuple(
        Left(node.name, why, node in backward, where_of(node)) for node, why in chains.left
    )


def _replace_each(graph: Graph, chains: Chains, captured: bool) -> list[Fused]:
    """Every chain by an op of its own."""
    backward = later_of(graph).backward
    found = [_told(chain, chain.root in backward, captured) for chain in chains.found]
    replaced: dict[Node, Node] = {}
    for chain in chains.found:
        replaced[chain.root] = _replace(graph, chain.after(replaced), captured)
    _sweep(graph, chains.found, ())
    return found


def _join_series(graph: Graph, chains: Chains) -> list[Fused]:
    """Chains of one form that are added up, by one op for all."""
    backward = later_of(graph).backward
    together = series.find(graph, chains.found)
    found = [_told_together(one, one.top in backward) for one in together]
    joined = {piece.chain.root: one for one in together for piece in one.pieces}
    replaced: dict[Node, Node] = {}
    for chain in chains.found:
        one = joined.get(chain.root)
        if one is not None and chain is one.last:  # all that it reads is there
            replaced[one.top] = _replace_together(graph, one.after(replaced))
    gone = tuple(chain for chain in chains.found if chain.root in joined)
    _sweep(graph, gone, [node for one in together for node in (one.top, *one.between)])
    return found


def _join_relations(graph: Graph, chains: Chains) -> list[Fused]:
    """Chains that differ in their edges alone, as one each; what is told about those."""
    backward = later_of(graph).backward
    made: list[Node] = []

    def emit(chain: Chain) -> Node:
        made.extend((chain.root, *(t.base for t in chain.indices)))
        return _call(graph, chain, captured=False)

    siblings = Siblings(graph, chains.found, emit)
    siblings.run()
    # what stood for the shapes of results and for index tensors, which the ops make themselves
    sweep(graph, made)
    found = []
    for group in siblings.found:
        text, nodes = (
            template_of(group[0]) or "",
            tuple(n.name for chain in group for n in reversed(chain.inlined)),
        )
        note = (
            f"{len(group)} chains of one form, of which each has its own rows: the number "
            "of the chain is one more dimension"
        )
        found.append(
            Fused(
                text,
                group[-1].root.name,
                nodes,
                group[0].root in backward,
                sum(chain.saved for chain in group),
                (note, *group[0].notes),
                where_of(group[-1].root),
            )
        )
    return found


def _worth_it(graph: Graph, wish: str, captured: bool) -> Chains:
    """All chains that nothing speaks against. That others need a masked index too, which a chain
    could do without, is seen when all chains are there.
    """
    waited: frozenset[Node] = frozenset()
    while True:
        chains = find(
            graph, functools.partial(objection, wish=wish, captured=captured, waited=waited)
        )
        more = frozenset() if captured else still_waited_for(graph, chains.found) - waited
        if not more:
            return chains
        waited |= more


def _told(chain: Chain, backward: bool, captured: bool) -> Fused:
    origins = {} if captured else chain.origins()
    notes = [
        f"{n.name} is computed once, while {', '.join(s.name for s in o.sources)} stay the same"
        for n, o in origins.items()
    ]
    nodes = tuple(n.name for n in reversed(chain.inlined))
    text = (
        str(chain.statement).replace(" = ", " += ", 1)
        if chain.initial is not None
        else str(chain.statement)
    )
    where = where_of(chain.root)
    return Fused(text, chain.root.name, nodes, backward, chain.saved, (*notes, *chain.notes), where)


def _told_together(one: Series, backward: bool) -> Fused:
    chains = [piece.chain for piece in one.pieces]
    nodes = tuple(dict.fromkeys(n.name for chain in chains for n in reversed(chain.inlined)))
    note = f"{len(chains)} chains of one form, in one statement"
    return Fused(
        one.pieces[0].form.template,
        one.top.name,
        nodes,
        backward,
        sum(chain.saved for chain in chains),
        (note, *chains[0].notes),
        where_of(one.top),
    )


def _replace(graph: Graph, chain: Chain, captured: bool) -> Node:
    root = chain.root
    with graph.inserting_before(root):
        if chain.statement.operator == "=":
            chain = replace(chain, initial=_laid_out(graph, chain.initial))
        shaped = chain.dims == tuple(range(len(shape_of(root))))
        if chain.statement.operator != "=":
            new = _extremum(graph, chain, captured)
        elif chain.initial is not None and shaped:
            new = _into(graph, chain.initial, _arguments(graph, chain, captured), root.meta["val"])
        else:
            new = _call(graph, chain, captured)
            if not shaped:
                shape = [
                    _size(graph, chain, chain.zeros or chain.initial or root, d)
                    for d in range(len(shape_of(root)))
                ]
                new = _made(graph, aten.view.default, (new, shape), root.meta["val"])
            if chain.initial is not None:
                new = _made(graph, aten.add.Tensor, (chain.initial, new), root.meta["val"])
    for node in _between(new, root):
        node.meta = {**{k: v for k, v in root.meta.items() if k not in _OWN_META}, **node.meta}
    root.replace_all_uses_with(new)
    return new


def _laid_out(graph: Graph, initial: Node | None) -> Node | None:
    """What is added to, laid out as results are: the op that adds to it keeps its strides."""
    if initial is None or is_contiguous(value_of(initial)):
        return initial
    value = value_of(initial).clone(memory_format=torch.contiguous_format)
    new = _made(graph, aten.clone.default, (initial,), value)
    new.kwargs = {"memory_format": torch.contiguous_format}
    return new


def _replace_together(graph: Graph, one: Series) -> Node:
    """A series by one op, right before its last chain; what else is added is added where it was."""
    joined, tensors = one.joined()
    note_written(joined.template)
    value = one.top.meta["val"]
    last = one.last.root
    with graph.inserting_before(last):
        sizes = [_size(graph, one.last, one.shaped, dim) for dim in range(value.dim())]
        initial = _laid_out(graph, one.initial)
        new = _made(graph, SERIES, (initial, str(joined), tensors, sizes), value)
    for node in _between(new, last):
        node.meta = {**{k: v for k, v in last.meta.items() if k not in _OWN_META}, **node.meta}
    with graph.inserting_before(one.top):
        for other in one.rest:
            new = _made(graph, aten.add.Tensor, (new, other), value)
            new.meta = {**one.top.meta, **new.meta}
    one.top.replace_all_uses_with(new)
    return new


#: What tracing noted at a node about its value; the rest (where it comes from, whether to recompute
#: it) goes over to what replaces it.
_OWN_META = ("val", "tensor_meta", "unbacked_bindings", "eager_input_vals", "example_value")


def _between(new: Node, root: Node) -> list[Node]:
    """The nodes that were just made for a root: all of them stand right before it."""
    made, node = [], root.prev
    while node.op == "call_function" and "val" in node.meta and len(node.meta) == 1:
        made.append(node)
        node = node.prev
    return made if new in made else [new]


def _extremum(graph: Graph, chain: Chain, captured: bool) -> Node:
    """A largest or smallest value. The statement has no dimensions of size 1, what is there may
    have some.
    """
    spec, tensors, sizes = _arguments(graph, chain, captured)
    return _made(
        graph, EXTREMUM, (chain.initial, spec, tensors, sizes, chain.own), chain.root.meta["val"]
    )


def _call(graph: Graph, chain: Chain, captured: bool) -> Node:
    root = value_of(chain.root)
    sizes = [shape_of(node)[dim] for node, dim in _places(chain)]
    value = root.new_empty(sizes) if chain.dims != tuple(range(root.dim())) else root
    return _made(graph, FUSED, _arguments(graph, chain, captured), value)


def _arguments(graph: Graph, chain: Chain, captured: bool) -> tuple[Any, ...]:
    """What the op takes, in the order of its schema."""
    names: dict[Node, str] = {}
    for t in chain.indices:
        names.setdefault(t.base, f"{t.base.name}_base")
    views = tuple((t.name, names[t.base], t.selects) for t in chain.indices)
    origins = {} if captured else chain.origins()
    passing = frozenset(
        t.name
        for t in chain.indices
        if t.base not in origins and (captured or t.base.op != "placeholder")
    )
    tensors = {
        name: node
        for name, node in (*chain.tensors, *((name, node) for node, name in names.items()))
        if node not in origins
    }
    names |= {node: name for name, node in chain.tensors}
    keys, sizes = _sizes(graph, chain, shaped=bool(origins))
    computed = []
    for node, origin in origins.items():
        own = tuple(_named(source, names[node], tensors) for source in origin.sources)
        places = tuple(range(len(sizes), len(sizes) + len(origin.sizes)))
        sizes += origin.sizes
        computed.append(
            Computed(
                names[node],
                origin.program,
                own,
                places,
                str(value_of(node).dtype).removeprefix("torch."),
            )
        )
    spec = Spec(
        str(chain.statement),
        tuple(tensors),
        views,
        keys,
        frozenset(chain.wrapped),
        passing,
        tuple(computed),
    )
    note_written(spec.statement)
    return str(spec), list(tensors.values()), sizes


def _named(source: Node, of: str, tensors: dict[str, Node]) -> str:
    """The name of a tensor that something is computed from, which may be passed already."""
    for name, node in tensors.items():
        if node is source:
            return name
    name = fresh(f"{of}_of_{len(tensors)}", set(tensors))
    tensors[name] = source
    return name


_NAMES = ("spec", "tensors", "sizes")


def _into(graph: Graph, initial: Node, arguments: tuple[Any, ...], value: Any) -> Node:
    """A sum with what is there: in place where Inductor finds that nobody else reads it."""
    functional = functional_call()
    if functional is None:
        return _made(graph, INTO, (initial, *_accumulating(arguments)), value)
    called = graph.call_function(
        functional, (IN_PLACE,), {"target": initial, **dict(zip(_NAMES, _accumulating(arguments)))}
    )
    called.meta["val"] = (None, value)
    return _made(graph, operator.getitem, (called, 1), value)


def _accumulating(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return arguments[0].replace(" = ", " += ", 1), *arguments[1:]


def _add_in_place(graph: Graph) -> None:
    """``a + fused(...)`` adds to ``a`` where ``a`` is a tensor of its own, read by nobody else."""
    for node in graph.nodes:
        if (
            node.op != "call_function"
            or node.target is not aten.add.Tensor
            or node.kwargs
            or len(node.args) != 2
        ):
            continue
        for a, b in (node.args, node.args[::-1]):
            if (
                _can_take(a)
                and isinstance(b, Node)
                and a is not b  # twice the same, which is not two results
                and b.target is FUSED
                and len(b.users) == 1
                and alike(a, b, node)
            ):
                with graph.inserting_before(node):
                    new = _into(graph, a, b.args, node.meta["val"])
                node.replace_all_uses_with(new)
                graph.erase_node(node)
                graph.erase_node(b)
                break


def _can_take(node: Any) -> bool:
    if not isinstance(node, Node) or node.op != "call_function" or len(node.users) != 1:
        return False
    inner = node.args[0] if node.target is operator.getitem else None
    return (
        node.target in (FUSED, INTO, SERIES, *_OWN)
        or isinstance(inner, Node)
        and IN_PLACE in inner.args
    )


def _made(graph: Graph, target: Any, arguments: tuple[Any, ...], value: Any) -> Node:
    node = graph.call_function(target, arguments)
    node.meta["val"] = value
    return node


def _sizes(graph: Graph, chain: Chain, shaped: bool) -> tuple[str, list[Any]]:
    """The shape of a scattered result, or, ``shaped``, of any, and the extents of variables that
    stand alone in no dimension.
    """
    keys: list[str] = []
    sizes: list[Any] = []
    direct = {i.var for access in accesses(chain.statement.value) for i in access.indices}
    direct |= {
        i.var
        for index in chain.statement.target.indices
        for access in accesses(index)
        for i in access.indices
    }
    if shaped or chain.zeros is not None or chain.initial is not None:
        keys.append(f"out#{len(chain.dims)}")
        sizes += [_size(graph, chain, node, dim) for node, dim in _places(chain)]
        direct |= {i.var for i in chain.statement.target.indices}
    for name, (node, dim) in chain.extents.items():
        if name not in direct:
            keys.append(name)
            sizes.append(_size(graph, chain, node, dim))
    return ";".join(keys), sizes


def _places(chain: Chain) -> list[tuple[Node, int]]:
    """For each dimension of the statement's result a node and a dimension of the same size."""
    base = chain.zeros or chain.initial or chain.root
    return [
        (base, d) if d is not None else chain.extents[str(i.var)]
        for d, i in zip(chain.dims, chain.statement.target.indices, strict=True)
    ]


def _size(graph: Graph, chain: Chain, node: Node, dim: int) -> Any:
    """A size as a number, or as the node that gives it."""
    size: Size = shape_of(node)[dim]
    if isinstance(size, int):
        return size
    for known in graph.nodes:  # a node that is that size
        if known is chain.root:
            break
        value = known.meta.get("val")
        if isinstance(value, torch.SymInt) and same(value, size):
            return known
    source, place = _owner(chain, size) or (node, dim)
    return _made(graph, aten.sym_size.int, (source, place), size)


def _owner(chain: Chain, size: Size) -> tuple[Node, int] | None:
    """A tensor that the statement reads anyway and that has such a dimension."""
    for node in chain.leaves:
        for dim, other in enumerate(shape_of(node)):
            if not isinstance(other, int) and same(size, other):
                return node, dim
    return None


def _is_ours(node: Node) -> bool:
    return node.target in (FUSED, INTO, SERIES, EXTREMUM) or IN_PLACE in node.args


def _sweep(graph: Graph, chains: tuple[Chain, ...], more: Sequence[Node]) -> None:
    """Remove what nobody reads any more: the chains, and what only they read."""
    todo = [
        n
        for chain in chains
        for n in (
            chain.root,
            *chain.inlined,
            *chain.leaves,
            *([chain.zeros] if chain.zeros else []),
        )
    ]
    todo += [n for node in more for n in (node, *node.all_input_nodes)]
    sweep(graph, todo, _is_ours)
