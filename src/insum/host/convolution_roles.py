"""Which statements are convolutions (`host.convolution`), by their variables, and which of them a
library is to run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from insum.graph.value import meeting_dtype
from insum.host.convolution import LONG, Convolution, ConvolvedTensor
from insum.host.slices import SlicedAccess, dense_product, sliced
from insum.lang.bind import Problem, Size
from insum.lang.expr import Access, Affine, Var, affine, variables

#: Dimensions along which the library has windows.
MOST_WINDOWS = 3
#: Measured. Of fewer windows than this a product of matrices over all of them is as quick, and so
#: is a sum where the library does poorly.
LEAST_WINDOWS = 64
#: And without channels slices are added up as quickly, for so many results of so few places each:
#: in float64 the library takes one group after the other; in float32 it takes 16 at once, or less
#: well the gradients of windows whose places lie apart. Of more places, for so many results, or for
#: the gradient of a single group: what the library has 16 groups for leaves the cache.
MOST_PLACES, LEAST_RESULTS, FEW_GROUPS = 12, 10_000, 8
MOST_PLACES_OF_MANY, MANY_RESULTS = 48, 1 << 18


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


@dataclass(frozen=True, slots=True)
class ChannelRoles:
    """Variables that are no windows: shared by the result and the long tensor, by the long tensor
    and the kernel (``inner``), by the result and the kernel (``outer``), and by all three.
    """

    batch: tuple[str, ...]
    inner: tuple[str, ...]
    outer: tuple[str, ...]
    groups: tuple[str, ...]

    @classmethod
    def of(
        cls, result: Sequence[str], long: Sequence[str], kernel: Sequence[str], moved: set[str]
    ) -> ChannelRoles | None:
        """None where one of the three has a variable alone."""
        own = [v for v in dict.fromkeys((*long, *result, *kernel)) if v not in moved]
        held = {v: (v in result, v in long, v in kernel) for v in own}
        if any(sum(there) < 2 for there in held.values()):
            return None
        cases = (True, True, False), (False, True, True), (True, False, True), (True, True, True)
        return cls(*(tuple(v for v in own if held[v] == case) for case in cases))


def convolution_of(problem: Problem) -> Convolution | None:
    """None where no tensor has windows, or more than one; where one of their variables is not that
    of one other tensor alone; where something is summed, or repeated, that one tensor has alone;
    and where a library would not be the quickest.
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
    if len(views) < len(accesses):
        return None
    result, long, kernel = (view.variables for view in views)
    moved = {v for w in windows for v in (w.name, w.at, w.inside)}
    roles, dtype = ChannelRoles.of(result, long, kernel, moved), meeting_dtype(problem)
    if roles is None:
        return None
    last, groups = long[-1] in kernel, prod(extents[v] for v in roles.groups)
    spread = target == LONG and any(w.between > 1 for w in windows)
    poorly = dtype is torch.float64 or spread or groups < FEW_GROUPS and not last
    if not _is_for_library(roles, windows, extents, target, poorly):
        return None
    places = _in_order(windows, long, roles.batch, last)
    behind = {w.name for w in places}
    batch = [v for v in roles.batch if v not in behind]
    dims = (
        (batch, (*roles.groups, *roles.outer), *([w.at] for w in places)),
        (batch, (*roles.groups, *roles.inner), *([w.name] for w in places)),
        ((*roles.groups, *roles.outer), roles.inner, *([w.inside] for w in places)),
    )
    sides = []
    for k, (access, view) in enumerate(zip(accesses, views)):
        shape = problem.shape if k == target else problem.kinds[access.tensor].shape
        name = "" if k == target else access.tensor
        sides.append(_convolved(name, shape, view, dims[k], extents, last))
    return Convolution(
        problem,
        dtype,
        tuple(sides),
        target,
        tuple(w.apart for w in places),
        tuple(w.between for w in places),
        groups,
    )


def _is_for_library(
    roles: ChannelRoles,
    windows: Sequence[Window],
    extents: Mapping[str, int],
    target: int,
    poorly: bool,
) -> bool:
    """``poorly``: as it has windows without channels then."""
    at, places, batch, groups, channels = (
        prod(extents[v] for v in names)
        for names in (
            [w.at for w in windows],
            [w.inside for w in windows],
            roles.batch,
            roles.groups,
            (*roles.inner, *roles.outer),
        )
    )
    if batch * at < LEAST_WINDOWS and (channels > 1 or poorly):
        return False
    results, single = batch * at * groups, target == LONG and groups == 1
    most = MOST_PLACES_OF_MANY if single or results >= MANY_RESULTS else MOST_PLACES
    as_slices = places <= most and results >= LEAST_RESULTS
    return channels > 1 or not (poorly and as_slices)


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
    last: bool,
) -> ConvolvedTensor:
    names = view.variables
    order = tuple(names.index(v) for group in groups for v in group if v)
    sizes = tuple(prod(extents[v] for v in group if v) for group in groups)
    return ConvolvedTensor(
        name,
        None if _is_whole(view, shape, extents) else view,
        extents,
        () if order == tuple(range(len(order))) else order,
        tuple(extents[names[d]] for d in order),
        sizes,
        _innermost(sizes) if last else (),
    )


def _innermost(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor whose second dimension is the innermost.

    >>> _innermost((2, 3, 4, 5))
    (60, 1, 15, 3)
    """
    inner = [prod(shape[d + 1 :]) * shape[1] for d in range(2, len(shape))]
    return (prod(shape[1:]), 1, *inner)


def _is_whole(view: SlicedAccess, shape: Sequence[Size], extents: Mapping[str, int]) -> bool:
    return all(
        extents.get(index.var) == size and (index.offset, index.step) == (0, 1)
        for index, size in zip(view.indices, shape)
    )
