"""What all formats are: a frozen object over dense tensors that knows its shape, its arrays and how
they name coordinates; and the one set of names by which every format is made, changed and left.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast, overload

import torch
from torch import Tensor

from insum import facts
from insum.accepted import (
    ANY_TENSOR,
    COUNTS,
    DEVICE,
    DTYPE,
    ELEMENTS,
    FLAG,
    INTEGER,
    LAYOUT,
    SHAPE,
    TENSOR,
    TENSORS,
    TEXT,
    VALUES,
    Accepted,
    explains,
    is_size,
    require,
    require_sound,
    takes,
)
from insum.errors import FormatError, InsumError, UnsupportedError
from insum.formats import arithmetic, arrays, contents, interop, pytree, show
from insum.formats import entries as E
from insum.formats import validate as checks
from insum.formats.layout import Coordinate, Layout

if TYPE_CHECKING:
    from typing_extensions import Self

    from insum.facts import IndexFacts

#: Formats by name, for `to_format("ELL")`.
FORMATS: dict[str, type[SparseFormat]] = {}


VALUES_HERE = Accepted(VALUES.expected, lambda v: VALUES.fits(v) and ELEMENTS.fits(v))
NODES = Accepted("a number of nodes", lambda v: is_size(v, limit=2**63))
#: Index arrays as the rows of one tensor.
ROWS = Accepted("one tensor of them", lambda v: ELEMENTS.fits(v) and v.dim() > 0)


class SparseFormat:
    """A sparse tensor held in dense tensors. Base of `COO`, `ELL`, `GroupCOO`, `BlockCOO`,
    `BlockGroupCOO` and `NeighborTable`.

    Never a tensor subclass: the arrays are ordinary tensors, the object is frozen, compares by
    identity and is a pytree node. Index arrays made by conversions are int32 where the dimension
    allows it, else int64; padding in them is -1 and contributes nothing. ``values`` is ``None`` in
    a pattern, whose entries all count as 1. Gradients flow to the stored values only. A class of
    your own may derive from one of these formats: statements take it as that format, which their
    results have, and layers hold it as that.

    Conversions take the options of the class that they are called on: ``group_dims`` (`ELL`,
    `GroupCOO`, `BlockGroupCOO`), ``group_size`` (`GroupCOO`, `BlockGroupCOO`), ``block_shape``
    (`BlockCOO`, `BlockGroupCOO`), ``dim`` (`NeighborTable`).

    Examples:
        >>> from insum.formats import ELL
        >>> a = ELL.from_dense(torch.eye(3))
        >>> isinstance(a, SparseFormat), a.shape, a.nnz, a.nbytes
        (True, (3, 3), 3, 24)
    """

    values: Tensor | None
    shape: tuple[int, ...]
    #: Fields that hold tensors (values first) and fields that do not: the pytree's children and
    #: context.
    _arrays: ClassVar[tuple[str, ...]] = ("values",)
    _static: ClassVar[tuple[str, ...]] = ("shape",)
    _options: ClassVar[tuple[str, ...]] = ()
    #: The format that statements read it as, and that it is stored as; a class derived from a
    #: format is that format to them.
    _kind: ClassVar[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        pytree.register(cls)
        if not hasattr(cls, "_kind"):
            cls._kind = cls.__name__
            FORMATS[cls._kind] = cls

    # --- what each format says of itself ---

    @property
    def layout(self) -> Layout:
        """How positions name coordinates."""
        raise NotImplementedError

    @property
    def positions(self) -> tuple[int, ...]:
        """The extents of the position axes: ``(groups, group_size)`` in `GroupCOO`."""
        held = getattr(self, self._arrays[-1])  # which has all of them
        return tuple((held[0] if isinstance(held, tuple) else held).shape)

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
        arrays.begin(self)
        arrays.finish(self, validate)

    def _details(self) -> dict[str, object]:
        """What `repr` shows beside shape, dtype, nonzeros, padding and bytes."""
        return {}

    @classmethod
    def _build(cls, source: E.Entries, **options: Any) -> Self:
        """The format from entries in any order, plain or in blocks."""
        raise NotImplementedError

    @classmethod
    def _order(cls, rank: int, **options: Any) -> tuple[int, ...]:
        """The order of entries that `_build` wants, so that sources can supply it for free."""
        return tuple(range(rank))

    def _permuted(self, dims: tuple[int, ...]) -> Self:
        raise NotImplementedError

    def _plain(self) -> SparseFormat:
        """The same arrays in the format itself, where this is of a class derived from one."""
        kind = FORMATS[self._kind]
        return self if type(self) is kind else kind._make(**self._fields())

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
        arrays.declare(made, padded)
        return made

    @classmethod
    @explains(FormatError, x=VALUES_HERE)
    def from_dense(cls, x: Tensor, **options: Any) -> Self:
        """The nonzeros of a dense tensor. Differentiable: gradients flow back to the places that
        were nonzero.

        >>> from insum.formats import GroupCOO
        >>> x = torch.tensor([[1.0, 2, 3], [4, 0, 0], [0, 5, 0], [6, 0, 7]])
        >>> GroupCOO.from_dense(x, group_dims=0, group_size=2)
        GroupCOO(shape=(4, 3), float32, nnz=7, groups=5, group_size=2, group_dims=(0,),
        padding=30.0%, 100 bytes, cpu)
        """
        checks.check_dense(x)
        cls._check_options(options)
        if "block_shape" not in options:
            return cls._build(E.from_dense(x, cls._order(x.dim(), **options)), **options)
        block = checks.block_shape(options["block_shape"], x.dim())
        found = E.blocks_from_dense(x, block, cls._order(x.dim(), **options))
        return cls._build(found, **options)

    @classmethod
    @takes(FormatError, indices=TENSORS | ROWS, values=VALUES.optional, shape=SHAPE, validate=FLAG)
    def from_entries(
        cls,
        indices: Sequence[Tensor] | Tensor,
        values: Tensor | None,
        shape: Sequence[int],
        *,
        validate: bool = True,
        **options: Any,
    ) -> Self:
        """From coordinates in any order, one index array per dimension; duplicates are summed
        (merged without values).

        >>> from insum.formats import COO
        >>> coords = [torch.tensor([1, 0, 1]), torch.tensor([0, 2, 0])]
        >>> a = COO.from_entries(coords, torch.tensor([1.0, 2.0, 3.0]), shape=(2, 3))
        >>> a.to_dense()
        tensor([[0., 0., 2.],
                [4., 0., 0.]])
        """
        cls._check_options(options)
        checks.check_shape(tuple(shape))
        source = interop.from_entries(
            indices, values, tuple(shape), cls._order(len(shape), **options), validate
        )
        return cls._build(source, **options)

    @classmethod
    @takes(FormatError, x=ANY_TENSOR, validate=FLAG)
    def from_torch(cls, x: Tensor, *, validate: bool = True, **options: Any) -> Self:
        """From `torch.sparse` COO (hybrid too), CSR, CSC, BSR or BSC, batched ones included; a
        dense tensor is taken as well.

        >>> from insum.formats import COO
        >>> COO.from_torch(torch.eye(3).to_sparse_csr())
        COO(shape=(3, 3), float32, nnz=3, padding=0.0%, 36 bytes, cpu)
        """
        if isinstance(x, Tensor) and x.layout != torch.strided:
            cls._check_options(options)
            return cls._build(interop.from_torch(x, validate), **options)
        return cls.from_dense(x, **options)

    @classmethod
    @takes(FormatError, device=DEVICE.optional, dtype=DTYPE.optional, validate=FLAG)
    def from_scipy(
        cls,
        x: Any,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        validate: bool = True,
        **options: Any,
    ) -> Self:
        """From any `scipy.sparse` array or matrix; the data is copied.

        >>> import scipy.sparse
        >>> from insum.formats import ELL
        >>> ELL.from_scipy(scipy.sparse.eye_array(3, format="csr", dtype="float32"))
        ELL(shape=(3, 3), float32, nnz=3, group_dims=(0,), slots=1, padding=0.0%, 24 bytes, cpu)
        """
        cls._check_options(options)
        return cls._build(interop.from_scipy(x, device, dtype, validate), **options)

    @classmethod
    @takes(
        FormatError,
        edge_index=ELEMENTS,
        weights=VALUES_HERE.optional,
        validate=FLAG,
        num_nodes=(NODES | SHAPE).optional,
    )
    def from_edge_index(
        cls,
        edge_index: Tensor,
        weights: Tensor | None = None,
        *,
        num_nodes: int | tuple[int, int] | None = None,
        validate: bool = True,
        **options: Any,
    ) -> Self:
        """The matrix ``A[i, j]`` of a graph, one entry per edge from ``i = edge_index[0]`` to ``j =
        edge_index[1]``, as PyG's utilities have it.

        Without weights the result is a pattern and an edge that is listed twice is one edge; with
        weights they are summed. A bipartite graph has ``num_nodes=(sources, targets)``; ``None``
        reads the largest node number.

        >>> from insum.formats import COO
        >>> COO.from_edge_index(torch.tensor([[0, 1, 1], [1, 0, 2]]), num_nodes=3).to_dense()
        tensor([[0., 1., 0.],
                [1., 0., 1.],
                [0., 0., 0.]])
        """
        cls._check_options(options)
        return cls._build(
            interop.from_edge_index(
                edge_index, weights, num_nodes, cls._order(2, **options), validate
            ),
            **options,
        )

    @classmethod
    def _check_options(cls, options: dict[str, Any]) -> None:
        unknown = [name for name in options if name not in cls._options]
        if unknown:
            raise FormatError(
                f"{cls.__name__} has no option {unknown[0]!r}",
                expected=f"options of {cls.__name__}: {', '.join(cls._options) or 'none'}",
            )
        if "block_shape" in cls._options and "block_shape" not in options:
            raise FormatError(
                f"{cls.__name__} needs a block shape",
                remedy="block_shape=(32, 32), or one integer for all dimensions",
            )

    def _same_options(self) -> dict[str, Any]:
        """Options that give another tensor of this rank the same layout."""
        return {name: getattr(self, name) for name in self._options}

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
        return next(self.tensors()).device if self.values is None else self.values.device

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
        return contents.count_entries(self)

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
        return contents.coordinates(self)

    def entries(self) -> E.Entries:
        """Coordinates and values without the padding."""
        arrays.look(self)
        return contents.entries_of(self)

    @takes(dtype=DTYPE.optional)
    def ones(self, dtype: torch.dtype | None = None) -> Tensor:
        """Values of 1 at every position; where blocks reach over the edge, 0 there."""
        return contents.ones(self, dtype or torch.get_default_dtype())

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
        now = self.values
        alike = now is not None and values is not None and values.dtype is now.dtype
        alike = alike and values.shape == now.shape and values.device == now.device  # type: ignore[union-attr]
        if values is not None and not alike:
            checks.check_values(self, values)
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
        return arrays.moved(self, device, dtype, non_blocking)

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

    # --- the same tensor in another order ---

    def permute(self, *dims: int) -> Self:
        """The same tensor with its dimensions in another order, in the same format.

        >>> from insum.formats import GroupCOO
        >>> a = GroupCOO.from_dense(torch.tensor([[1.0, 2.0], [0.0, 3.0]]), group_size=2)
        >>> b = a.permute(1, 0)
        >>> b.group_dims, b.values is a.values
        ((1,), True)
        """
        order = checks.permutation(
            dims[0] if len(dims) == 1 and isinstance(dims[0], tuple | list) else dims, self.ndim
        )
        return self if order == tuple(range(self.ndim)) else self._permuted(order)

    def transpose(self, dim0: int, dim1: int) -> Self:
        """Two dimensions swapped."""
        dims = list(range(self.ndim))
        a, b = checks.dimension(dim0, self.ndim), checks.dimension(dim1, self.ndim)
        dims[a], dims[b] = dims[b], dims[a]
        return self.permute(*dims)

    @property
    def T(self) -> Self:
        """All dimensions in reverse order."""
        return self.permute(*reversed(range(self.ndim)))

    # --- leaving it ---

    @takes(dtype=DTYPE.optional)
    def to_dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The dense tensor, exactly. A pattern gives ones of ``dtype`` (torch's default where it is
        not said).

        >>> from insum.formats import BlockCOO
        >>> BlockCOO.from_dense(torch.eye(3), block_shape=2).to_dense().equal(torch.eye(3))
        True
        """
        return contents.dense(self, dtype)

    @takes(FormatError, layout=LAYOUT, block_shape=COUNTS.optional)
    def to_torch(
        self, layout: torch.layout = torch.sparse_coo, *, block_shape: tuple[int, int] | None = None
    ) -> Tensor:
        """A `torch.sparse` tensor of the layout asked for; the block layouts take block formats, or
        any with ``block_shape``.

        >>> from insum.formats import COO
        >>> COO.from_dense(torch.eye(2)).to_torch(torch.sparse_csr).crow_indices()
        tensor([0, 1, 2])
        """
        return interop.to_torch(self, layout, block_shape)

    @takes(FormatError, format=TEXT.optional)
    def to_scipy(self, format: Literal["coo", "csr", "csc", "bsr"] | None = None) -> Any:
        """A `scipy.sparse` array: CSR for a matrix, COO for other ranks, BSR for blocks, unless
        told.

        >>> from insum.formats import COO
        >>> COO.from_dense(torch.eye(2)).to_scipy("csc").nnz
        2
        """
        return interop.to_scipy(self, format)

    def to_edge_index(self) -> tuple[Tensor, Tensor | None]:
        """``edge_index`` and weights of the graph that this matrix describes.

        >>> from insum.formats import COO
        >>> COO.from_dense(torch.tensor([[0.0, 5.0], [0.0, 0.0]])).to_edge_index()
        (tensor([[0],
                [1]]), tensor([5.]))
        """
        return interop.to_edge_index(self)

    @overload
    def to_format(self, format: type[Other], **options: Any) -> Other: ...
    @overload
    def to_format(self, format: str, **options: Any) -> SparseFormat: ...
    def to_format(self, format: type[SparseFormat] | str, **options: Any) -> SparseFormat:
        """The same tensor in another format, by class or by name, with that format's options.

        >>> from insum.formats import COO
        >>> COO.from_dense(torch.eye(4)).to_format("ELL")
        ELL(shape=(4, 4), float32, nnz=4, group_dims=(0,), slots=1, padding=0.0%, 32 bytes, cpu)
        """
        cls = _class_of(format)
        cls._check_options(options)
        return cls._build(self.entries(), **options)

    def matmul(self, other: Tensor) -> Tensor:
        """``self @ other`` for a matrix; under torch.compile, which breaks its graph at ``@``
        between an object and a tensor, write this.

        >>> from insum.formats import COO
        >>> COO.from_dense(torch.eye(2) * 3).matmul(torch.ones(2))
        tensor([3., 3.])
        """
        product: Tensor = _matmul(self, other)
        return product

    # --- arithmetic, as a tensor has it ---

    #: NumPy leaves operators between its numbers and a sparse tensor to us.
    __array_ufunc__ = None

    def _operate(self, function: Callable[..., Any], other: Any, *more: Any) -> Any:
        known = torch.compiler.is_compiling() or isinstance(other, SparseFormat)
        if known or arithmetic.is_operand(other):
            return _told(function, self, other, *more)
        return NotImplemented

    def __mul__(self, other: Any) -> Any:
        return self._operate(arithmetic.scaled, other, operator.mul)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._operate(arithmetic.scaled, other, operator.truediv)

    def __add__(self, other: Any) -> Any:
        return self._operate(arithmetic.added, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._operate(arithmetic.added, other, -1)

    def __rsub__(self, other: Any) -> Any:
        return self._operate(arithmetic.taken_from, other)

    def __neg__(self) -> Self:
        return cast("Self", arithmetic.negated(self))

    def __abs__(self) -> Self:
        return self.abs()

    def abs(self) -> Self:
        """The absolute values, in the same pattern.

        Examples:
            >>> from insum.formats import COO
            >>> (-COO.from_dense(torch.eye(2))).abs().to_dense()
            tensor([[1., 0.],
                    [0., 1.]])
        """
        return cast("Self", arithmetic.absolute(self))

    @takes(FormatError, keepdim=FLAG)
    def sum(self, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
        """The sum over some dimensions, or over all of them, as a dense tensor.

        Args:
            dim: One dimension, several, or all where it is not said.
            keepdim: Keep summed dimensions with size 1.

        Raises:
            FormatError: There is no such dimension.

        Examples:
            >>> from insum.formats import COO
            >>> a = COO.from_dense(torch.tensor([[1.0, 2.0], [0.0, 4.0]]))
            >>> a.sum(), a.sum(1), a.sum(0, keepdim=True)
            (tensor(7.), tensor([3., 4.]), tensor([[1., 6.]]))
        """
        return cast(Tensor, _told(arithmetic.summed, self, dim, keepdim))

    def size(self, dim: int | None = None) -> torch.Size | int:
        """As `torch.Tensor.size`.

        Examples:
            >>> from insum.formats import COO
            >>> a = COO.from_dense(torch.ones(2, 3))
            >>> a.size(), a.size(-1), len(a), a.numel()
            (torch.Size([2, 3]), 3, 2, 6)
        """
        if dim is None:
            return torch.Size(self.shape)
        return self.shape[checks.dimension(dim, self.ndim)]

    def numel(self) -> int:
        """Elements of the tensor, zeros included; `nnz` counts entries."""
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> SparseFormat | Tensor:
        """Integers, slices and ``...``: in the same format where all dimensions stay, else in COO;
        a single element is a tensor.
        """
        return cast("SparseFormat | Tensor", _told(arithmetic.sliced, self, key))

    def __iter__(self) -> Iterator[SparseFormat | Tensor]:
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        """That it is there, whatever its size: formats compare by identity."""
        return True

    def __matmul__(self, other: Any) -> Any:
        return _matmul(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return _matmul(other, self)

    # --- keeping it ---

    @property
    def signature(self) -> tuple[Any, ...]:
        """What rewriting depends on, without tensors: rank, kind, grouped dimensions, blocks, which
        index arrays are the same, whether blocks divide.
        """
        if torch.compiler.is_compiling():
            return contents.signature_of(self)
        known: tuple[Any, ...] | None = self.__dict__.get("_signature")
        if known is None:
            known = contents.signature_of(self)
            object.__setattr__(self, "_signature", known)
        return known

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*self._arrays, *self._static)}

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


def _sound(x: SparseFormat) -> None:
    """Raise where a format is not what its constructor made."""
    checks.check_shape(x.shape)
    checks.check(x)


FORMAT = Accepted("a format of insum.formats", lambda v: isinstance(v, SparseFormat), _sound)
#: Where a function says itself what it takes: only that a format is as it was made.
UNBROKEN = Accepted(
    FORMAT.expected, lambda v: True, lambda v: _sound(v) if FORMAT.fits(v) else None
)


def refuse_broken(given: Mapping[str, object]) -> None:
    """After a failure: say so where a format among the operands was tampered with."""
    for name, x in given.items():
        if isinstance(x, SparseFormat):
            require_sound(name, x, FORMAT, FormatError)


Other = TypeVar("Other", bound=SparseFormat)
_MATMUL = {
    (2, 2): "C[m,n] = A[m,k] * B[k,n]",
    (2, 1): "C[m] = A[m,k] * B[k]",
    (1, 2): "C[n] = A[k] * B[k,n]",
}


def _class_of(format: type[SparseFormat] | str) -> type[SparseFormat]:
    if isinstance(format, type) and issubclass(format, SparseFormat):
        return format
    found = FORMATS.get(format) if isinstance(format, str) else None
    if found is None:
        raise FormatError(
            f"there is no format {format!r}",
            expected=f"one of {', '.join(FORMATS)}, by name or as a class",
        )
    return found


def _matmul(left: Any, right: Any) -> Any:
    """``A @ B``, where at least one is a format."""
    return _told(_product, left, right)


def _told(function: Callable[..., Any], *operands: Any) -> Any:
    """An operation; where it fails because a format was tampered with, the error says so."""
    try:
        return function(*operands)
    except InsumError:
        raise
    except Exception:
        refuse_broken(dict(zip("AB", operands)))
        raise


def _product(left: Any, right: Any) -> Any:
    ranks, matrices = [], True
    for name, x in (("A", left), ("B", right)):
        if isinstance(x, SparseFormat):
            matrices = matrices and len(x.shape) == 2
            ranks.append(len(x.shape))
        elif isinstance(x, Tensor):
            require(name, x, TENSOR)
            ranks.append(x.ndim)
    if len(ranks) < 2:
        return NotImplemented
    statement = _MATMUL.get((ranks[0], ranks[1]))
    if statement is None or not matrices:
        raise UnsupportedError(
            f"@ between {ranks[0]} and {ranks[1]} dimensions",
            expected="a 2-D format and a vector or matrix",
            remedy='insum.einsum("...", ...) for other ranks',
        )
    from insum.formats.run import run_formats

    return run_formats(statement, {"A": left, "B": right})
