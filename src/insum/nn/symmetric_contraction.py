"""Symmetric powers of features, contracted with Clebsch-Gordan coefficients: the many-body step of
MACE.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from insum.accepted import SIZE, TENSOR, Accepted, is_size, takes
from insum.errors import BindingError
from insum.lang.types import promoted
from insum.memory import unchanging
from insum.nn.checks import layer_takes, one_device
from insum.nn.irreps import Irrep, Irreps
from insum.nn.multilinear import Multilinear
from insum.nn.patterns import arrays_of, hold, renew, without_compiled_parts
from insum.nn.reordering import in_order, irrep_order
from insum.nn.wigner import wigner_3j

if TYPE_CHECKING:
    from typing_extensions import Self

CORRELATION = Accepted("1, 2, 3 or 4", lambda v: is_size(v, 1) and bool(v <= 4))
#: Products of two factors, and of the halves of monomials with their coefficients.
PAIRS = Multilinear("P", {"X": "b,A[p],c", "Y": "b,B[p],c", "P": "b,p,c"}, ("X", "Y"))
MONOMIALS = Multilinear(
    "Z",
    {"X": "b,J[p],c", "Y": "b,K[p],c", "W": "b,p,c", "Z": "b,I[p],c"},
    ("X", "Y", "W"),
)
#: Monomials are many: loops over them take next to no time to compile, are the same code for all
#: layers, and are bound by memory as straight-line code is.
PROMISE = unchanging
#: Products of four are coupled through irreps of natural parity below this degree, as in MACE.
MOST_COUPLED = 12


class Powers(nn.Module):
    """The weights of one term of the output, by the names that MACE gives them: ``weights_max`` of
    the highest power, (elements, couplings, channels), and ``weights`` of the lower ones,
    downwards.
    """

    def __init__(self, couplings: Sequence[int], elements: int, channels: int) -> None:
        """``couplings``: how many there are, from the highest power down."""
        super().__init__()
        drawn = [nn.Parameter(torch.randn(elements, k, channels) / k) for k in couplings]
        self.weights_max = drawn[0]
        self.weights = nn.ParameterList(drawn[1:])

    def upwards(self) -> list[Tensor]:
        """The weights of each power, from the first upwards."""
        return [*reversed(self.weights), self.weights_max]


class SymmetricContraction(nn.Module):
    """Sums of products of up to ``correlation`` factors of one node's features, coupled to irreps
    and weighted by element: the values and the weights of ``mace.modules.SymmetricContraction``.

    One statement for all powers, over the monomials that any coupling has,

        Z[b,I[p],c] = X[b,J[p],c] * Y[b,K[p],c] * W[b,p,c]

    of products ``X`` of the first half of the factors and ``Y`` of the others; what a lower
    power has fewer are ones. Monomials that differ by the order of their factors are one, and the
    couplings that have it are summed before there are nodes: its coefficient is one number for
    each element and channel.

    Args:
        irreps_in: Features, one multiplicity for all: ``"16x0e + 16x1o + 16x2e"``.
        irreps_out: What comes out, of the same multiplicity.
        correlation: The highest power, up to 4.
        num_elements: Kinds of nodes.

    Examples:
        >>> contraction = SymmetricContraction("8x0e + 8x1o", "8x0e + 8x1o", 2, num_elements=3)
        >>> kinds = torch.nn.functional.one_hot(torch.tensor([0, 2, 1, 1, 0]), 3).float()
        >>> contraction(torch.randn(5, 8, 4), kinds).shape
        torch.Size([5, 32])
        >>> for statement in contraction.statements():
        ...     print(statement)
        Z[b,I[p],c] = X[b,J[p],c] * Y[b,K[p],c] * W[b,p,c]
    """

    output_mask: Tensor
    _exact: list[dict[str, Tensor]]

    @takes(correlation=CORRELATION, num_elements=SIZE)
    def __init__(
        self, irreps_in: object, irreps_out: object, correlation: int, num_elements: int
    ) -> None:
        first, out = Irreps.of(irreps_in), Irreps.of(irreps_out)
        single = tuple(ir for _, ir in first)
        bases = [
            [coupled(single, ir, power) for power in range(1, correlation + 1)] for _, ir in out
        ]
        self._set_up(first, out, num_elements, bases)

    @classmethod
    def with_bases(
        cls, irreps_in: object, irreps_out: object, elements: int, bases: list[list[Tensor]]
    ) -> SymmetricContraction:
        """The same with a basis of other couplings: of each term of the output and each power from
        1 upwards a tensor (components of the term, inputs, ..., inputs, couplings).
        """
        made = cls.__new__(cls)
        made._set_up(Irreps.of(irreps_in), Irreps.of(irreps_out), elements, bases)
        return made

    def _set_up(self, first: Irreps, out: Irreps, elements: int, bases: list[list[Tensor]]) -> None:
        super().__init__()
        muls = {mul for irreps in (first, out) for mul, _ in irreps}
        if len(muls) != 1 or not len(out):
            raise BindingError(
                f"{first} and {out} have different multiplicities", expected="one for all terms"
            )
        self.irreps_in, self.irreps_out, self.num_elements = first, out, elements
        (self.channels,) = muls
        self.correlation = len(bases[0])
        self.contractions = nn.ModuleList(
            Powers([basis.shape[-1] for basis in reversed(powers)], elements, self.channels)
            for powers in bases
        )
        self.register_buffer("output_mask", torch.ones(out.dim), persistent=False)
        couplings = sum(basis.shape[-1] for powers in bases for basis in powers)
        patterns = _patterns(_monomials(bases), couplings, self.correlation, _size(first))
        hold(self, patterns, self.output_mask, PROMISE)
        self.register_load_state_dict_pre_hook(without_compiled_parts)  # type: ignore[no-untyped-call]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        renew(self, PROMISE)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        renew(self, PROMISE)

    @layer_takes(x=TENSOR, y=TENSOR)
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """From features (nodes, channels, components) and kinds of nodes, (nodes, elements), one of
        them 1, to (nodes, irreps_out.dim).
        """
        size = _size(self.irreps_in)
        if x.dim() != 3 or tuple(x.shape[1:]) != (self.channels, size):
            raise BindingError(
                f"x has shape {tuple(x.shape)}",
                expected=f"(nodes, {self.channels}, {size}): channels, components",
            )
        if tuple(y.shape) != (x.shape[0], self.num_elements):
            raise BindingError(
                f"y has shape {tuple(y.shape)}",
                expected=f"({x.shape[0]}, {self.num_elements}): nodes, elements",
            )
        one_device(module=self.output_mask, x=x, y=y)
        total = self._summed(x, y)
        whole = in_order(irrep_order, self.irreps_out, total.flatten(1))
        if whole is not None:
            return whole
        parts = torch.split(total, [ir.dim for _, ir in self.irreps_out], 1)
        return torch.cat([part.transpose(1, 2).flatten(1) for part in parts], 1)

    def _summed(self, x: Tensor, y: Tensor) -> Tensor:
        """(nodes, components of the output, channels)."""
        nodes, shape = x.shape[0], (x.shape[0], _size(self.irreps_out), self.channels)
        single = torch.cat([x.transpose(1, 2), x.new_ones(nodes, 1, self.channels)], 1)
        pairs = arrays_of(self, 0)
        if self.correlation > 2:
            rows = nodes, pairs["A"].shape[0], self.channels
            double = PAIRS({**pairs, "X": single, "Y": single}, rows)
        left = double if self.correlation > 2 else single
        right = double if self.correlation > 3 else single
        powers: list[Any] = [*self.contractions]
        weights = torch.cat([one for part in powers for one in part.upwards()], 1)
        arrays = arrays_of(self, 1)
        of_element = torch.matmul(arrays.pop("U"), weights)
        if y.dtype != of_element.dtype:  # as products of statements: kinds are often integers
            common = promoted(y.dtype, of_element.dtype)
            y, of_element = y.to(common), of_element.to(common)
        own = torch.matmul(y, of_element.flatten(1)).view(nodes, *of_element.shape[1:])
        return MONOMIALS({**arrays, "X": left, "Y": right, "W": own}, shape)

    def statements(self) -> tuple[str, ...]:
        """The statements of a call: of pairs, where monomials are longer, and of monomials."""
        pairs = (PAIRS.statement(),) if self.correlation > 2 else ()
        return (*pairs, MONOMIALS.statement())

    def extra_repr(self) -> str:
        return f"{self.irreps_in} -> {self.irreps_out}, correlation={self.correlation}"


# --- bases ----------------------------------------------------------------------------------------


def coupled(single: tuple[Irrep, ...], target: Irrep, power: int) -> Tensor:
    """All ways to couple a vector of irreps with itself, one factor after the other, to an irrep:
    (components, inputs, ..., inputs, couplings), in MACE's order; one coupling of zeros where there
    is none.

    >>> coupled((Irrep(0, 1), Irrep(1, -1)), Irrep(0, 1), 2).shape
    torch.Size([1, 4, 4, 2])
    """
    size = sum(ir.dim for ir in single)
    found = [table for ir, table in _couplings(single, power) if ir == target]
    if not found:
        return torch.zeros(target.dim, *(size,) * power, 1, dtype=torch.float64, device="cpu")
    return torch.stack(found, -1)


def _couplings(single: tuple[Irrep, ...], power: int) -> list[tuple[Irrep, Tensor]]:
    """Of every coupling its irrep and (components, inputs, ..., inputs), sorted by irrep."""
    starts = list(itertools.accumulate((ir.dim for ir in single), initial=0))
    unit = torch.eye(starts[-1], dtype=torch.float64, device="cpu")
    found = [(ir, unit[start : start + ir.dim]) for ir, start in zip(single, starts)]
    for _ in range(power - 1):
        longer = []
        for left, table in found:
            for right, start in zip(single, starts):
                for ir in left * right:
                    if power < 4 or ir.l < MOST_COUPLED and ir.p == (-1) ** ir.l:
                        step = wigner_3j(ir.l, left.l, right.l) * ir.dim**0.5
                        # by the last factor's own components, zero at all others
                        whole = unit.new_zeros(ir.dim, left.dim, starts[-1])
                        whole[..., start : start + right.dim] = step
                        longer.append(
                            (ir, torch.tensordot(whole, table, ([1], [0])).movedim(1, -1))
                        )
        found = sorted(longer, key=lambda one: one[0])
    return sorted(found, key=lambda one: one[0])


def _size(irreps: Irreps) -> int:
    return sum(ir.dim for _, ir in irreps)


#: By component of the output and factors in one order: couplings, each with its coefficient.
Monomials: TypeAlias = dict[tuple[int, tuple[int, ...]], dict[int, float]]


def _monomials(bases: Sequence[Sequence[Tensor]]) -> Monomials:
    """The monomials of bases, of each term of the output one for each power. Couplings are numbered
    as `Powers.upwards` has their weights.
    """
    found: Monomials = {}
    first = coupling = 0
    for powers in bases:
        for basis in powers:
            basis = basis.detach().cpu().double()
            for place, value in zip(basis.nonzero().tolist(), basis[basis != 0].tolist()):
                i, *factors, k = place
                sums = found.setdefault((i + first, tuple(sorted(factors))), {})
                sums[k + coupling] = sums.get(k + coupling, 0.0) + value
            coupling += basis.shape[-1]
        first += powers[0].shape[0]
    real = {
        key: {k: value for k, value in sums.items() if abs(value) > 1e-12}
        for key, sums in sorted(found.items())
    }
    return {key: sums for key, sums in real.items() if sums}


def _patterns(
    monomials: Monomials, couplings: int, correlation: int, extent: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Factors ``A`` and ``B`` of pairs; and of monomials their components ``I`` of the output,
    first and second halves ``J`` and ``K``, and coefficients ``U`` by coupling. A factor that is
    not there is the one behind all components.
    """
    half = 2 if correlation > 2 else 1
    pairs: dict[tuple[int, ...], int] = {}

    def place(factors: tuple[int, ...], paired: bool) -> int:
        return pairs.setdefault(factors, len(pairs)) if paired else factors[0]

    rows = []
    table = torch.zeros(len(monomials), couplings, dtype=torch.float64, device="cpu")
    for number, ((i, factors), those) in enumerate(monomials.items()):
        every = (*factors, *[extent] * (2 * half - len(factors)))
        left, right = every[:half], every[half:]
        rows.append((i, place(left, correlation > 2), place(right, correlation > 3)))
        for k, value in those.items():
            table[number, k] = value
    return _columns("AB", list(pairs)), {"U": table, **_columns("IJK", rows)}


def _columns(names: str, rows: Sequence[tuple[int, ...]]) -> dict[str, Tensor]:
    places = torch.tensor(rows, dtype=torch.int32, device="cpu").reshape(-1, len(names))
    return {name: places[:, n].contiguous() for n, name in enumerate(names)}
