"""Symmetric powers of features, contracted with Clebsch-Gordan coefficients: the many-body step of
MACE.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import insum
from insum.accepted import SIZE, TENSOR, Accepted, is_size, takes
from insum.errors import BindingError
from insum.nn.checks import layer_takes, one_device
from insum.nn.irreps import Irrep, Irreps
from insum.nn.patterns import PatternModule, without_compiled_parts
from insum.nn.wigner import wigner_3j

#: Names of the index arrays of the factors.
FACTORS = "ABCD"
CORRELATION = Accepted("1, 2, 3 or 4", lambda v: is_size(v, 1) and bool(v <= len(FACTORS)))
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

    def of(self, power: int) -> Tensor:
        below = len(self.weights) + 1 - power
        return self.weights[below - 1] if below else self.weights_max


class SymmetricContraction(PatternModule):
    """Sums of products of up to ``correlation`` factors of one node's features, coupled to irreps
    and weighted by element: the values and the weights of ``mace.modules.SymmetricContraction``.

    One statement for each power, over the monomials that are not zero, for three factors

        Z[b,I[p],c] = V[p] * X[b,A[p],c] * X[b,B[p],c] * X[b,C[p],c] * W[b,K[p],c]

    with the weights of each node's element, ``W[b,k,c] = Y[b,e] * W[e,k,c]``. Monomials that differ
    by the order of their factors are one.

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
        Z[b,I[p],c] = V[p] * X[b,A[p],c] * W[b,K[p],c]
        Z[b,I[p],c] = V[p] * X[b,A[p],c] * X[b,B[p],c] * W[b,K[p],c]
    """

    output_mask: Tensor

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
        by_power = list(zip(*bases, strict=True))
        self._hold([_monomials(basis) for basis in by_power], self.output_mask)
        self.register_load_state_dict_pre_hook(without_compiled_parts)  # type: ignore[no-untyped-call]

    @layer_takes(x=TENSOR, y=TENSOR)
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """From features (nodes, channels, components) and kinds of nodes, (nodes, elements), one of
        them 1, to (nodes, irreps_out.dim).
        """
        size = sum(ir.dim for _, ir in self.irreps_in)
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
        shape = x.shape[0], sum(ir.dim for _, ir in self.irreps_out), self.channels
        total: Tensor | None = None
        for power, statement in enumerate(self.statements(), 1):
            arrays = self._arrays(power - 1)
            if not arrays["V"].numel():
                continue
            weights = torch.cat([part.of(power) for part in self.contractions], 1)  # type: ignore[operator]
            own = insum.insum("W[b,k,c] = Y[b,e] * V[e,k,c]", Y=y, V=weights)
            found = insum.insum(statement, out_shape=shape, X=x.transpose(1, 2), W=own, **arrays)
            total = found if total is None else total + found
        if total is None:
            return x.new_zeros(x.shape[0], self.irreps_out.dim)
        parts = torch.split(total, [ir.dim for _, ir in self.irreps_out], 1)
        return torch.cat([part.transpose(1, 2).flatten(1) for part in parts], 1)

    def statements(self) -> tuple[str, ...]:
        """The statements of the powers, from the first upwards."""
        found = []
        for power in range(1, self.correlation + 1):
            factors = " * ".join(f"X[b,{name}[p],c]" for name in FACTORS[:power])
            found.append(f"Z[b,I[p],c] = V[p] * {factors} * W[b,K[p],c]")
        return tuple(found)

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
        return torch.zeros(target.dim, *(size,) * power, 1, dtype=torch.float64)
    return torch.stack(found, -1)


def _couplings(single: tuple[Irrep, ...], power: int) -> list[tuple[Irrep, Tensor]]:
    """Of every coupling its irrep and (components, inputs, ..., inputs), sorted by irrep."""
    starts = list(itertools.accumulate((ir.dim for ir in single), initial=0))
    unit = torch.eye(starts[-1], dtype=torch.float64)
    found = [(ir, unit[start : start + ir.dim]) for ir, start in zip(single, starts)]
    for _ in range(power - 1):
        longer = []
        for left, table in found:
            for right, start in zip(single, starts):
                for ir in left * right:
                    if power < 4 or ir.l < MOST_COUPLED and ir.p == (-1) ** ir.l:
                        step = wigner_3j(ir.l, left.l, right.l) * ir.dim**0.5
                        # by the last factor's own components, zero at all others
                        whole = torch.zeros(ir.dim, left.dim, starts[-1], dtype=torch.float64)
                        whole[..., start : start + right.dim] = step
                        longer.append(
                            (ir, torch.tensordot(whole, table, ([1], [0])).movedim(1, -1))
                        )
        found = sorted(longer, key=lambda one: one[0])
    return sorted(found, key=lambda one: one[0])


def _monomials(bases: Sequence[Tensor]) -> dict[str, Tensor]:
    """The entries of bases, one for each term of the output: values ``V``, components of the output
    ``I``, couplings ``K``, and the factors' components; factors in one order, entries that are then
    the same added up.
    """
    keys: dict[tuple[int, ...], float] = {}
    first = coupling = 0
    for basis in bases:
        basis = basis.detach().cpu().double()
        for place, value in zip(basis.nonzero().tolist(), basis[basis != 0].tolist()):
            i, *factors, k = place
            key = (i + first, k + coupling, *sorted(factors))
            keys[key] = keys.get(key, 0.0) + value
        first, coupling = first + basis.shape[0], coupling + basis.shape[-1]
    entries = sorted((key, value) for key, value in keys.items() if abs(value) > 1e-12)
    power = bases[0].dim() - 2
    places = torch.tensor([key for key, _ in entries], dtype=torch.int32).reshape(-1, 2 + power)
    names = ("I", "K", *FACTORS[:power])
    made: dict[str, Any] = {name: places[:, n].contiguous() for n, name in enumerate(names)}
    return {"V": torch.tensor([value for _, value in entries], dtype=torch.float64), **made}
