"""A call as a graph of torch operations: where no kernel is generated, and nothing is quicker."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from insum.call.overlap import shares_memory
from insum.call.prepared import BoundCall
from insum.graph.lower import SizedGraph, lower
from insum.lang.bind import Value


def run(
    call: BoundCall,
    mode: str,
    values: Mapping[str, Value],
    target: Tensor | None,
    on_host: bool = False,
) -> Tensor:
    """The result of the graph; see `running.run`. ``on_host``: with the operations that a CPU has
    of its own; nobody looks on.
    """
    graph = call.graphs.get((mode, on_host)) or _lowered(call, mode, values, on_host)
    inputs = [values[name] for name in graph.inputs]
    if target is None:
        return graph.forward(*inputs, *graph.sizes)
    shared = graph.late and shares_memory(target, map(values.get, graph.late))
    if mode == "into" and (shared or _must_copy(call, target)):
        return target.copy_(run(call, "from", values, target, on_host))
    return graph.forward(target, *inputs, *graph.sizes)


def _lowered(call: BoundCall, mode: str, values: Mapping[str, Value], on_host: bool) -> SizedGraph:
    problem = call.problem(values)
    if on_host:
        from insum.host.operations import lower_on_host  # which GPUs need not import

        lowered = lower_on_host(problem, mode)
    else:
        lowered = lower(problem, mode)
    forward: Callable[..., Tensor] = lowered.module.forward
    if call.prepared.settings.backend == "inductor":
        from insum.graph.inductor import forward_of  # which loads a good deal of torch

        forward = forward_of(lowered, problem)
    sizes = lowered.size_arguments(problem)
    found = call.graphs[mode, on_host] = SizedGraph(forward, lowered.inputs, sizes, lowered.late)
    return found


def _must_copy(call: BoundCall, target: Tensor) -> bool:
    """torch.compile takes a float64 tensor without dimensions on the CPU for a number, and
    forgets to write it.
    """
    return call.prepared.settings.backend == "inductor" and target.dim() == 0
