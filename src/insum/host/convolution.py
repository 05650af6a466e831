"""Windows of one tensor that another is a kernel for: a convolution, or a gradient of one, which a
library has. Of three tensors the ``long`` one is read or written through windows; which of them
is on the left side says which it is:

    y[b,o,i] = w[o,c,r] * x[b,c,i+r]        the convolution
    x[b,c,i+r] = y[b,o,i] * w[o,c,r]        its gradient by the long tensor
    w[o,c,r] = y[b,o,i] * x[b,c,i+r]        and by the kernel

What two of them share is the batch (b) and channels of what is read (c) and of the result (o); what
all three do are groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from insum.graph.value import meeting_dtype
from insum.host.arguments import HostCall
from insum.host.roles import as_tensor, cast
from insum.host.slices import SlicedAccess, dense_product, sliced
from insum.lang.bind import Problem, Size
from insum.lang.expr import Access, Affine, Var, affine, variables

#: Dimensions along which the library has windows.
MOST_WINDOWS = 3
#: The three, and what it is where each of them is on the left side.
RESULT, LONG, KERNEL = range(3)
_WHICH = "a convolution", "the gradient of a convolution", "the gradient of its kernel"


@dataclass(frozen=True, slots=True)
class Window:
    """``apart*at + between*inside``, as one variable ``name`` of the long tensor. What has no
    ``inside`` is a variable that lies behind windows, or nothing: a dimension of size 1.
    """

    name: str = ""
    at: str = ""
    inside: str = ""
    apart: int = 1
    between: int = 1

    @property
    def turned(self) -> Window:
        """Begins and places are alike: which is which depends on the kernel."""
        return Window(self.name, self.inside, self.at, self.between, self.apart)

    def reach(self, extents: Mapping[str, int]) -> int:
        return 1 + self.apart * (extents[self.at] - 1) + self.between * (extents[self.inside] - 1)


@dataclass(frozen=True, slots=True, eq=False)
class ConvolvedTensor:
    """One of the three, as the library has it: ``view`` is the part that is read or written, None
    where that is all of it, whose dimensions in this ``order`` (empty: as they are) have
    ``ordered`` as their sizes and are those of ``shape``.
    """

    name: str
    view: SlicedAccess | None
    extents: Mapping[str, int]
    order: tuple[int, ...]
    ordered: tuple[int, ...]
    shape: tuple[int, ...]

    def read(self, tensor: Tensor) -> Tensor:
        if self.view is not None:
            tensor = self.view.of(tensor, {}, self.extents)
        if self.order:
            tensor = tensor.permute(self.order)
        return tensor if tensor.shape == self.shape else tensor.reshape(self.shape)

    def written(self, found: Tensor, shape: Sequence[int]) -> Tensor:
        """The reverse of it: a tensor of this shape, zero where nothing is written."""
        found = found if found.shape == self.ordered else found.reshape(self.ordered)
        if self.order:
            found = found.permute(sorted(range(len(self.order)), key=self.order.__getitem__))
        if self.view is None:
            return found.contiguous()
        result = found.new_zeros(shape)
        self.view.of(result, {}, self.extents).copy_(found)
        return result


@dataclass(frozen=True, slots=True, eq=False)
class Convolution:
    """The one of ``sides`` that stands at ``target``, of the other two. ``channels_last``: those of
    the long one are innermost.
    """

    problem: Problem
    dtype: torch.dtype
    sides: tuple[ConvolvedTensor, ...]
    target: int
    apart: tuple[int, ...]
    between: tuple[int, ...]
    groups: int
    channels_last: bool
    name, slowness = "convolution", 0

    @property
    def why(self) -> str:
        return f"windows, multiplied with a kernel: {_WHICH[self.target]}, which a library runs"

    def __call__(self, call: HostCall) -> Tensor:
        result, long, kernel = (
            side.read(cast(as_tensor(call.values[side.name]), self.dtype)) if side.name else None
            for side in self.sides
        )
        found = self.computed(result, long, kernel)
        shape = [int(n) for n in self.problem.shape]
        return cast(self.sides[self.target].written(found, shape), self.problem.dtype)

    def computed(self, result: Tensor | None, long: Tensor | None, kernel: Tensor | None) -> Tensor:
        none, count = [0] * len(self.apart), self.groups
        if long is not None and kernel is not None:
            return torch.convolution(
                long, kernel, None, self.apart, none, self.between, False, none, count
            )
        found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            result,
            self.asked() if long is None else long,
            self.asked() if kernel is None else kernel,
            None,
            self.apart,
            none,
            self.between,
            False,
            none,
            count,
            [long is None, kernel is None, False],
        )
        return found[self.target - LONG]

    def asked(self) -> Tensor:
        """What stands for a gradient: its shape and its layout are read alone."""
        shape = self.sides[self.target].shape
        if self.target == KERNEL or not self.channels_last:
            return torch.empty((), dtype=self.dtype).expand(shape)
        last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
        return torch.empty(shape, dtype=self.dtype, memory_format=last)


# --- taking a statement apart ---------------------------------------------------------------------


def convolution_of(problem: Problem) -> Convolution | None:
    """None where no tensor has windows, or more than one; where one of their variables is not that
    of one other tensor alone; and where something is summed, or repeated, that one tensor has
    alone.
    """
    every = dense_product(problem)
    if every is None or len(every) != 3:
        return None
    longs = [k for k, access in enumerate(every) if any(map(_is_window, access.indices))]
    if len(longs) != 1:
        return None
    extents = {v: int(n) for v, n in problem.extents.items()}
    (long,) = longs
    result, kernel = (k for k in range(3) if k != long)
    windows = _windows(every[long], {*variables(every[result])}, {*variables(every[kernel])})
    if windows is None:
        return None
    if prod(extents[w.at] for w in windows) < prod(extents[w.inside] for w in windows):
        result, kernel = kernel, result
        windows = [w.turned for w in windows]
    places = [result, long, kernel]
    accesses = [_with_windows(every[k]) if k == long else every[k] for k in places]
    reaches = {w.name: w.reach(extents) for w in windows}
    return _convolution(problem, accesses, windows, {**extents, **reaches}, places.index(0))


def _convolution(
    problem: Problem,
    accesses: Sequence[Access],
    windows: Sequence[Window],
    extents: Mapping[str, int],
    target: int,
) -> Convolution | None:
    """``accesses`` are those of result, long and kernel, with one variable for each window."""
    views = [view for access in accesses if (view := sliced(access, ())) is not None]
    if len(views) < 3:
        return None
    result, long, kernel = (view.variables for view in views)
    moved = {v for w in windows for v in (w.name, w.at, w.inside)}
    own = [v for v in dict.fromkeys((*long, *result, *kernel)) if v not in moved]
    held = {v: (v in result, v in long, v in kernel) for v in own}
    if any(sum(there) < 2 for there in held.values()):
        return None
    last = long[-1] in kernel
    places = _in_order(windows, long, [v for v in own if v not in kernel], last)
    inside = {w.name for w in places}
    batch = [v for v in own if v not in kernel and v not in inside]
    inner, outer = ([v for v in own if v not in side] for side in (result, long))
    groups = [v for v in own if all(held[v])]
    grouped = (
        (batch, [*groups, *outer], *([w.at] for w in places)),
        (batch, [*groups, *inner], *([w.name] for w in places)),
        ([*groups, *outer], inner, *([w.inside] for w in places)),
    )
    shapes = [
        problem.shape if k == target else problem.kinds[access.tensor].shape
        for k, access in enumerate(accesses)
    ]
    sides = [
        _convolved(
            "" if k == target else accesses[k].tensor, shapes[k], views[k], grouped[k], extents
        )
        for k in range(3)
    ]
    return Convolution(
        problem,
        meeting_dtype(problem),
        tuple(sides),
        target,
        tuple(w.apart for w in places),
        tuple(w.between for w in places),
        prod(extents[v] for v in groups),
        last,
    )


def _is_window(index: Affine) -> bool:
    return len(index.terms) > 1


def _windows(access: Access, first: set[str], second: set[str]) -> list[Window] | None:
    """Windows that begin at a variable of the first and run along one of the second, which nobody
    else has.
    """
    found = list[Window]()
    taken = [v for index in access.indices for v in variables(index)]
    for index in filter(_is_window, access.indices):
        steps = {atom.name: by for by, atom in index.terms if isinstance(atom, Var)}
        at, inside = steps.keys() & first, steps.keys() & second
        apart = len(steps) == 2 and len(at) == len(inside) == 1 and at != inside
        if not apart or min(steps.values()) < 1 or any(taken.count(v) > 1 for v in steps):
            return None
        (begin,), (place,) = at, inside
        found.append(Window(_name(index), begin, place, steps[begin], steps[place]))
    return found if len(found) <= MOST_WINDOWS else None


def _name(index: Affine) -> str:
    return str(Affine(index.terms))


def _with_windows(access: Access) -> Access:
    """With one variable for each window."""
    indices = (
        affine([(1, Var(_name(index)))], index.offset) if _is_window(index) else index
        for index in access.indices
    )
    return Access(access.tensor, tuple(indices))


def _in_order(
    windows: Sequence[Window], long: Sequence[str], batch: Sequence[str], last: bool
) -> list[Window]:
    """As they lie in the long tensor. What of the batch lies behind one of them is not moved before
    it, while there is room; and where channels come ``last``, the library takes them there with two
    dimensions of windows or more.
    """
    names = {w.name: w for w in windows}
    start = min(map(long.index, names))
    room = MOST_WINDOWS - len(windows)
    behind = [v for v in reversed(batch) if long.index(v) > start][:room]
    found = [names.get(v) or Window(v, v) for v in long if v in names or v in behind]
    return [Window(), *found] if last and len(found) == 1 else found


def _convolved(
    name: str,
    shape: Sequence[Size],
    view: SlicedAccess,
    groups: Sequence[Sequence[str]],
    extents: Mapping[str, int],
) -> ConvolvedTensor:
    names = view.variables
    order = tuple(names.index(v) for group in groups for v in group if v)
    return ConvolvedTensor(
        name,
        None if _is_whole(view, shape, extents) else view,
        extents,
        () if order == tuple(range(len(order))) else order,
        tuple(extents[names[d]] for d in order),
        tuple(prod(extents[v] for v in group if v) for group in groups),
    )


def _is_whole(view: SlicedAccess, shape: Sequence[Size], extents: Mapping[str, int]) -> bool:
    return all(
        extents.get(index.var) == size and (index.offset, index.step) == (0, 1)
        for index, size in zip(view.indices, shape)
    )
