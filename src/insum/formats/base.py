"""What all formats are: a frozen object over dense tensors that knows its shape, its arrays and how
they name coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from insum import facts
from insum.accepted import DTYPE, FLAG, INTEGER, TENSOR, require, takes
from insum.compat.placed import is_placed
from insum.errors import FormatError
from insum.formats import entries as E
from insum.formats import show, validate
from insum.formats.layout import Coordinate, Layout, fixed, has_padding

if TYPE_CHECKING:
    from typing_extensions import Self

    from insum.facts import IndexFacts


class FormatBase:
    """The object itself: its arrays, what they say, what is known about them. Conversions are in
    `SparseFormat`.
    """

    values: Tensor | None
    shape: tuple[int, ...]
    #: Fields that hold tensors (values first) and fields that do not: the pytree's children and
    #: context.
    _arrays: ClassVar[tuple[str, ...]] = ("values",)
    _static: ClassVar[tuple[str, ...]] = ("shape",)

    # --- what each format says of itself ---

    @property
    def layout(self) -> Layout:
        """How positions name coordinates."""
        raise NotImplementedError

    @property
    def positions(self) -> tuple[int, ...]:
        """The extents of the position axes: ``(groups, group_size)`` in `GroupCOO`."""
        raise NotImplementedError

    @property
    def block_shape_or_none(self) -> tuple[int, ...] | None:
        """The shape of one entry's block; ``None`` where entries are single values."""
        return None

    @property
    def sorted_dims(self) -> tuple[int, ...]:
        """The dimensions by which positions are sorted, most significant first; all of them have
        one index per `p`.
        """
        return ()

    def __post_init__(self, validate: bool) -> None:
        """Bring the fields into their form, check them and declare what follows."""
        raise NotImplementedError

    def _details(self) -> dict[str, object]:
        """What `repr` shows beside shape, dtype, nonzeros, padding and bytes."""
        return {}

    # --- making one ---

    @classmethod
    def _make(cls, **fields: Any) -> Self:
        """An object from its fields as they are: no checks, no facts. For arrays that are known, or
        that may be anything.
        """
        made = object.__new__(cls)
        for name, value in fields.items():
            object.__setattr__(made, name, value)
        return made

    @classmethod
    def _trusted(cls, *, padded: bool, **fields: Any) -> Self:
        """An object whose arrays were just built here: no checks, facts declared."""
        made = cls._make(**fields)
        made._declare(padded)
        return made

    def _begin(self) -> None:
        """The beginning of every constructor: lists become tuples, and the shape is one."""
        for name in (*self._arrays[1:], *self._static):
            value = getattr(self, name)
            if isinstance(value, list | torch.Size):
                object.__setattr__(self, name, tuple(value))
        validate.check_shape(self.shape)
        validate.check_kinds(self)

    def _finish(self, check: bool) -> None:
        """The end of every constructor: check, declare."""
        require("validate", check, FLAG, FormatError)
        padded = validate.check(self) if check else has_padding(self.layout)
        self._declare(padded)

    def _look(self) -> None:
        """Check arrays that nobody has vouched for, as they come out of a file, a pytree or the
        hands of a user who wrote into them; nothing where all are known.
        """
        if torch.compiler.is_compiling() or self.device.type == "meta":
            return
        if any(facts.known(array) is None for _, _, array in self.index_arrays()):
            if not is_placed(self.tensors()):
                self._declare(validate.check(self), only_new=True)

    def _declare(self, padded: bool, *, only_new: bool = False) -> None:
        """Hand the index facts on to the planner. They are bounds, so that nothing is asked of the
        device.
        """
        if torch.compiler.is_compiling():
            return
        for dim, coordinate, array in self.index_arrays():
            if only_new and facts.known(array) is not None:
                continue
            first = self.sorted_dims[:1] == (dim,)
            alone = first and self.ndim == 1
            facts.declare(
                array,
                low=0,
                high=self.grid[dim] - 1,
                sorted=first,
                unique=alone,
                padded=coordinate.padded and padded,
            )

    # --- looking at it ---

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the values; ``None`` for a pattern."""
        return None if self.values is None else self.values.dtype

    @property
    def device(self) -> torch.device:
        return next(self.tensors()).device

    @property
    def requires_grad(self) -> bool:
        return self.values is not None and self.values.requires_grad

    @property
    def grid(self) -> tuple[int, ...]:
        """The range of the index arrays: the shape, or the number of blocks in each dimension."""
        block = self.block_shape_or_none
        return E.grid_of(self.shape, block) if block else self.shape

    @property
    def stored(self) -> int:
        """How many values there is room for, padding included."""
        return math.prod(self.positions) * math.prod(self.block_shape_or_none or ())

    @property
    def nnz(self) -> int:
        """How many entries there are: for blocks their nonzero values, for the other formats
        everything that is not padding.
        """
        mask, block = self.mask(), self.block_shape_or_none
        if block is None:
            return self.stored if mask is None else int(mask.sum())
        filled = (
            E.inside(self.coordinates(), block, self.shape)
            if self.values is None
            else self.values.detach() != 0
        )
        per_block = (
            filled.flatten(len(self.positions)).sum(-1)
            if self.stored
            else torch.zeros(self.positions, device=self.device)
        )
        return int(per_block.sum() if mask is None else per_block[mask].sum())

    @property
    def padding(self) -> float:
        """The share of stored values that are not entries."""
        return 1 - self.nnz / self.stored if self.stored else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def tensors(self) -> Iterator[Tensor]:
        """Every dense tensor of the format, values first."""
        for name in self._arrays:
            value = getattr(self, name)
            yield from value if isinstance(value, tuple) else () if value is None else (value,)

    def index_arrays(self) -> Iterator[tuple[int, Coordinate, Tensor]]:
        """Dimension, its `Coordinate` and its index array, for every dimension that has one."""
        for dim, coordinate in enumerate(self.layout.coordinates):
            if coordinate.field is not None:
                held = getattr(self, coordinate.field)
                yield dim, coordinate, held[coordinate.number] if isinstance(held, tuple) else held

    def facts(self) -> dict[int, IndexFacts]:
        """What is known about the index array of each compressed dimension: range, order,
        uniqueness, padding.

        >>> from insum.formats import COO
        >>> COO.from_dense(torch.eye(2)).facts()[0]
        IndexFacts(low=0, high=1, sorted=True, unique=False, padded=False...)
        """
        return {dim: facts.facts_of(array) for dim, _, array in self.index_arrays()}

    @takes(FormatError, dim=INTEGER.optional)
    def segment_pointers(self, dim: int | None = None) -> Tensor:
        """``ptr`` with the positions of coordinate ``r`` at ``ptr[r] .. ptr[r+1]``, for the
        dimension that is sorted first.

        >>> from insum.formats import COO
        >>> COO.from_dense(torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 0.0]])).segment_pointers()
        tensor([0, 2, 2, 3], dtype=torch.int32)
        """
        if not self.sorted_dims or dim not in (None, self.sorted_dims[0]):
            raise FormatError(
                f"a {type(self).__name__} has no segments along dimension {dim}",
                expected=f"dim in {list(self.sorted_dims[:1])}",
            )
        array = next(a for d, _, a in self.index_arrays() if d == self.sorted_dims[0])
        return facts.segment_pointers(array, self.grid[self.sorted_dims[0]])

    def mask(self) -> Tensor | None:
        """True at positions that hold an entry; ``None`` where all do."""
        return next((array >= 0 for _, c, array in self.index_arrays() if c.padded), None)

    def coordinates(self) -> tuple[Tensor, ...]:
        """For every dimension the coordinate at every position, -1 at padding of the dimensions
        that mark it.
        """
        found: list[Tensor] = []
        positions = self.positions
        arrays = {dim: array for dim, _, array in self.index_arrays()}
        for dim, coordinate in enumerate(self.layout.coordinates):
            array = (
                arrays[dim]
                if dim in arrays
                else torch.arange(
                    positions[coordinate.axes[0]],
                    device=self.device,
                    dtype=E.index_dtype(self.shape[dim]),
                )
            )
            view = [positions[a] if a in coordinate.axes else 1 for a in range(len(positions))]
            found.append(array.reshape(view).expand(positions))
        return tuple(found)

    def entries(self) -> E.Entries:
        """Coordinates and values without the padding."""
        self._look()
        mask, block = self.mask(), self.block_shape_or_none
        values = (
            None
            if self.values is None
            else self.values.reshape(math.prod(self.positions), *(block or ()))
        )
        if mask is None:
            return E.Entries(
                tuple(c.reshape(-1) for c in self.coordinates()),
                values,
                self.shape,
                self.sorted_dims,
                block,
            )
        keep = mask.reshape(-1).nonzero().squeeze(1)
        coords = tuple(c.reshape(-1).index_select(0, keep) for c in self.coordinates())
        return E.Entries(
            coords, None if values is None else values.index_select(0, keep), self.shape, (), block
        )

    __repr__ = show.text
    _repr_html_ = show.html

    # --- the same pattern with other values, elsewhere ---

    @takes(FormatError, values=TENSOR.optional)
    def with_values(self, values: Tensor | None) -> Self:
        """The same pattern, the very same index arrays, with other values.

        >>> from insum.formats import COO
        >>> a = COO.from_dense(torch.eye(2))
        >>> a.with_values(a.values * 3).to_dense()
        tensor([[3., 0.],
                [0., 3.]])
        """
        if values is not None:
            validate.check_values(self, values)
        made = type(self)._make(**{**self._fields(), "values": values})
        if not torch.compiler.is_compiling():
            object.__setattr__(made, "_signature", self.signature)
        return made

    def pattern(self) -> Self:
        """The same entries, each counting as 1."""
        return self.with_values(None)

    def detach(self) -> Self:
        """Without the history of the values."""
        return self.with_values(None if self.values is None else self.values.detach())

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Ask for gradients of the values, in place as `torch.Tensor.requires_grad_`."""
        if self.values is None:
            raise FormatError(
                f"this {type(self).__name__} is a pattern: it has no values that could have a "
                "gradient",
                remedy="with_values(...)",
            )
        self.values.requires_grad_(requires_grad)
        return self

    def to(
        self,
        *args: Any,
        device: Any = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
    ) -> Self:
        """As `torch.Tensor.to`: a dtype concerns the values, a device all arrays.

        >>> from insum.formats import COO
        >>> COO.from_dense(torch.eye(2)).to(torch.float16)
        COO(shape=(2, 2), float16, nnz=2, padding=0.0%, 20 bytes, cpu)
        """
        for arg in args:
            if isinstance(arg, torch.dtype):
                dtype = arg
            elif isinstance(arg, Tensor):
                device, dtype = arg.device, arg.dtype
            else:
                device = arg
        values = (
            None
            if self.values is None
            else self.values.to(device=device, dtype=dtype, non_blocking=non_blocking)
        )
        if device is None:
            return type(self)._make(**{**self._fields(), "values": values})
        moved = {
            name: mapped(lambda t: t.to(device, non_blocking=non_blocking), getattr(self, name))
            for name in self._arrays[1:]
        }
        made = type(self)._make(**{**self._fields(), **moved, "values": values})
        for (_, _, old), (_, _, new) in zip(self.index_arrays(), made.index_arrays()):
            hand_on(old, new)
        return made

    def cpu(self) -> Self:
        return self.to("cpu")

    def cuda(self, device: torch.device | int | None = None) -> Self:
        return self.to(
            "cuda"
            if device is None
            else torch.device("cuda", device)
            if isinstance(device, int)
            else device
        )

    # --- keeping it ---

    @property
    def signature(self) -> tuple[Any, ...]:
        """What rewriting depends on, without tensors: rank, kind, grouped dimensions, blocks, where
        coordinates are found, whether blocks divide.
        """
        if torch.compiler.is_compiling():
            return self._make_signature()
        known: tuple[Any, ...] | None = self.__dict__.get("_signature")
        if known is None:
            known = self._make_signature()
            object.__setattr__(self, "_signature", known)
        return known

    def _make_signature(self) -> tuple[Any, ...]:
        block = self.block_shape_or_none or ()
        dims = getattr(self, "group_dims", (getattr(self, "dim", 0),))
        places = tuple(
            -1 - c.axes[0] if c.field is None else (c.field, c.number)
            for c in self.layout.coordinates
        )
        even = all(size % b == 0 for size, b in zip(self.shape, block))
        return self.ndim, type(self).__name__, fixed(dims), fixed(block), places, even

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*self._arrays, *self._static)}

    def _may_be_padded(self) -> bool:
        """Whether padding is possible, without asking the device."""
        for _, coordinate, array in self.index_arrays():
            if coordinate.padded:
                known = facts.known(array)
                return known is None or known.padded
        return False

    @takes(dtype=DTYPE.optional)
    def ones(self, dtype: torch.dtype | None = None) -> Tensor:
        """Values of 1 at every position; where blocks reach over the edge, 0 there."""
        block, dtype = self.block_shape_or_none, dtype or torch.get_default_dtype()
        if block is not None and any(size % b for size, b in zip(self.shape, block)):
            return E.inside(self.coordinates(), block, self.shape).to(dtype)
        return torch.ones((), dtype=dtype, device=self.device).expand(
            *self.positions, *(block or ())
        )

    def __getstate__(self) -> dict[str, Any]:
        return self._fields()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What is read is checked as what a user passes: a file may be broken."""
        for name in (*self._arrays, *self._static):
            if name not in state:
                raise FormatError(
                    f"a stored {type(self).__name__} has no {name}",
                    expected=", ".join((*self._arrays, *self._static)),
                )
            object.__setattr__(self, name, state[name])
        self.__post_init__(True)


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
