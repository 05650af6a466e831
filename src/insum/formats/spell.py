"""How a sparse operand is spelled in a statement: the rule of its layout, with names.

`A[m,k]` in GroupCOO becomes the value access `AV[p,q]`; wherever else `m` and `k` stand, they
become `AM[p]` and `AK[p,q]`. In a block format each becomes two indices, `(AM[p], bm)` and
`(AK[p,q], bk)`, and the dimensions that they index are split in two.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from insum.errors import UnsupportedError
from insum.formats import layout
from insum.formats.layout import Layout
from insum.lang.expr import Access, Affine, fresh, index_of


@dataclass(frozen=True, slots=True)
class Operand:
    """What the rewriting must know of one operand: hashable, without tensors.

    ``kind`` is the format's name, or empty for a dense tensor (or number). ``dims`` are the grouped
    dimensions, or the compressed one of a table. ``arrays`` numbers the index array of every
    dimension (-1: none), equal numbers for the same tensor object.
    """

    name: str
    rank: int
    kind: str = ""
    dims: tuple[int, ...] = ()
    block_shape: tuple[int, ...] = ()
    arrays: tuple[int, ...] = ()
    is_pattern: bool = False
    is_even: bool = True

    @property
    def layout(self) -> Layout:
        match self.kind:
            case "COO" | "BlockCOO":
                return layout.listed(self.rank, blocked=bool(self.block_shape))
            case "GroupCOO" | "BlockGroupCOO":
                return layout.grouped(self.rank, self.dims, blocked=bool(self.block_shape))
            case "ELL":
                return layout.rowwise(self.rank, self.dims)
            case "NeighborTable":
                return layout.tabled(self.rank, self.dims[0])
        raise UnsupportedError(
            f"{self.name} is a {self.kind}, a format that statements cannot read",
            expected="COO, ELL, GroupCOO, BlockCOO, BlockGroupCOO or NeighborTable, or a class "
            "derived from one",
            remedy=f"{self.name}.to_format(COO)",
        )


@dataclass(frozen=True, slots=True)
class Source:
    """How one argument of the rewritten statement is made from an operand.

    ``field``: ``values``, ``ones`` (values of 1), ``unit`` (a vector of ones along dimension
    ``number``), ``edge`` (which places of its blocks lie inside), an index array's field, or empty
    for a dense operand, whose dimensions in ``splits`` are cut into blocks: (dimension, size).
    """

    name: str
    operand: str
    field: str = ""
    number: int = 0
    splits: tuple[tuple[int, int], ...] = ()
    is_index: bool = False


@dataclass(slots=True)
class Spelling:
    """One pattern in one statement: the position variables and what each index variable becomes.

    Operands with the same index arrays at the same index variables share it.
    """

    operand: Operand
    variables: tuple[str, ...]
    positions: tuple[Affine, ...] = ()
    becomes: dict[str, tuple[Affine, ...]] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)
    padded: tuple[str, ...] = ()

    @property
    def compressed(self) -> tuple[str, ...]:
        """Index variables that are read from an array; the others stay as they are."""
        return tuple(self.becomes)

    @property
    def blocks(self) -> dict[str, int]:
        """Index variable -> block size."""
        return dict(zip(self.variables, self.operand.block_shape))


def pattern_key(operand: Operand, variables: tuple[str, ...]) -> object:
    """Equal for accesses that name the same positions: the same arrays and blocks for the same
    index variables.
    """
    return operand.kind, frozenset(
        zip(variables, operand.arrays, operand.block_shape or (0,) * operand.rank)
    )


def spell(operand: Operand, variables: tuple[str, ...], taken: set[str]) -> Spelling:
    """The spelling of ``operand[variables]`` with names that nothing else has."""
    form = operand.layout
    owners = {axis: variables[dim] for dim, axis in layout.implicit_axes(form).items()}
    axes = [
        index_of(owners[a] if a in owners else fresh(name, taken))
        for a, name in enumerate(form.axes)
    ]
    inner = [index_of(fresh(f"b{v}", taken)) for v in variables] if form.blocked else []
    spelling = Spelling(operand, variables, (*axes, *inner))
    for dim, (variable, coordinate) in enumerate(zip(variables, form.coordinates)):
        if coordinate.field is None:
            continue
        name = fresh(f"{operand.name}{variable.upper()}", taken)
        access = Affine(((1, Access(name, tuple(axes[a] for a in coordinate.axes))),))
        spelling.becomes[variable] = (access, inner[dim]) if form.blocked else (access,)
        spelling.sources[name] = Source(
            name, operand.name, coordinate.field, coordinate.number, is_index=True
        )
        spelling.padded += (name,) if coordinate.padded else ()
    return spelling
