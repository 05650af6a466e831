"""What autograd's engine tells about the pass that it runs, and functions recorded for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def in_backward() -> bool:
    """Whether autograd's engine calls; False where this torch does not tell."""
    return _graph_task() != -1


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` where no transform of torch.func is active: the part of it that is
    compiled. torch's own checks for transforms take longer than recording the call.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[misc,no-any-return]


_will_run: Any = getattr(torch._C, "_will_engine_execute_node", None)


def wanted_gradients(ctx: Any) -> tuple[bool, ...]:
    """In the ``backward`` of a function of autograd, for all that it was applied to: whether the
    pass that runs is for its gradient. ``ctx.needs_input_grad`` tells what requires one at all, as
    weights do while the pass is one for positions alone.
    """
    required: tuple[bool, ...] = ctx.needs_input_grad
    if _will_run is None:
        return required
    nodes = []  # a loop: before Python 3.12 a comprehension is a call
    for node, _ in getattr(ctx, "next_functions", ()):
        if node is not None:
            nodes.append(node)
    if len(nodes) != sum(required):
        return required
    found, left, any_yet = [], len(nodes), False
    for requires in required:
        if requires:
            left -= 1
            # a pass that comes here is for one of them; and it takes torch long to raise
            if left or any_yet:
                try:
                    requires = bool(_will_run(nodes[-left - 1]))
                except (RuntimeError, TypeError):  # of what a pass ends at, or none torch knows
                    requires = True
            any_yet = any_yet or requires
        found.append(requires)
    return tuple(found)


_top_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def keeps_as_they_are() -> bool:
    """Whether what is saved for backward passes stays as it is: no hooks, as those of activation
    checkpoints, count it or put other tensors in its place. False where this torch does not tell.
    """
    return _top_hooks is not None and _top_hooks(False) is None
