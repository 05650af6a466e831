"""The arrays of a format: brought into their form and checked where a user made it, vouched for
towards the planner, moved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from insum import facts
from insum.accepted import FLAG, require
from insum.compat.placed import is_placed
from insum.errors import FormatError
from insum.formats import validate
from insum.formats.layout import has_padding

if TYPE_CHECKING:
    from insum.formats.base import SparseFormat

F = TypeVar("F", bound="SparseFormat")
#: Options that formats have as fields, as they are kept for a tensor of so many dimensions.
KEPT_AS: dict[str, Callable[[Any, int], object]] = {
    "block_shape": validate.block_shape,
    "group_dims": validate.group_dims,
    "dim": validate.dimension,
}


def begin(x: SparseFormat) -> None:
    """The beginning of every constructor: lists become tuples, the shape is one, and options are
    as they are kept.
    """
    for name in (*x._arrays[1:], *x._static):
        value = getattr(x, name)
        if isinstance(value, list | torch.Size):
            object.__setattr__(x, name, tuple(value))
    validate.check_shape(x.shape)
    validate.check_kinds(x)
    for name in x._static:
        if name in KEPT_AS:
            kept = KEPT_AS[name](getattr(x, name), len(x.shape))
            object.__setattr__(x, name, kept)


def finish(x: SparseFormat, check: bool) -> None:
    """The end of every constructor: check, declare."""
    require("validate", check, FLAG, FormatError)
    declare(x, validate.check(x) if check else has_padding(x.layout))


def look(x: SparseFormat) -> None:
    """Check arrays that nobody has vouched for, as they come out of a file, a pytree or the hands
    of a user who wrote into them; nothing where all are known.
    """
    if torch.compiler.is_compiling() or x.device.type == "meta":
        return
    for name in x._arrays[1:]:  # loops: a layer looks at every call
        held = getattr(x, name)
        for array in held if isinstance(held, tuple) else (held,):
            if facts.known(array) is None:
                if not is_placed(x.tensors()):
                    declare(x, validate.check(x), only_new=True)
                return


def declare(x: SparseFormat, padded: bool, *, only_new: bool = False) -> None:
    """Hand the index facts on to the planner. They are bounds, so that nothing is asked of the
    device.
    """
    if torch.compiler.is_compiling():
        return
    for dim, coordinate, array in x.index_arrays():
        if only_new and facts.known(array) is not None:
            continue
        first = x.sorted_dims[:1] == (dim,)
        facts.declare(
            array,
            low=0,
            high=x.grid[dim] - 1,
            sorted=first,
            unique=first and x.ndim == 1,
            padded=coordinate.padded and padded,
        )


def may_be_padded(x: SparseFormat) -> bool:
    """Whether padding is possible, without asking the device."""
    for _, coordinate, array in x.index_arrays():
        if coordinate.padded:
            known = facts.known(array)
            return known is None or known.padded
    return False


def moved(x: F, device: Any, dtype: torch.dtype | None, non_blocking: bool) -> F:
    """The values in a dtype, all arrays on a device."""
    values = (
        None
        if x.values is None
        else x.values.to(device=device, dtype=dtype, non_blocking=non_blocking)
    )
    if device is None:
        return x._make(**{**x._fields(), "values": values})
    elsewhere = {
        name: mapped(lambda t: t.to(device, non_blocking=non_blocking), getattr(x, name))
        for name in x._arrays[1:]
    }
    made = x._make(**{**x._fields(), **elsewhere, "values": values})
    for (_, _, old), (_, _, new) in zip(x.index_arrays(), made.index_arrays()):
        hand_on(old, new)
    return made


def hand_on(old: Tensor, new: Tensor) -> None:
    """What is known of an array holds for a copy of it."""
    found = None if torch.compiler.is_compiling() or new is old else facts.known(old)
    if found is not None and facts.known(new) is None:
        facts.declare(
            new,
            low=found.low,
            high=found.high,
            sorted=found.sorted,
            unique=found.unique,
            padded=found.padded,
        )


def mapped(
    function: Callable[[Tensor], Tensor], value: Tensor | tuple[Tensor, ...]
) -> Tensor | tuple[Tensor, ...]:
    return tuple(function(t) for t in value) if isinstance(value, tuple) else function(value)
