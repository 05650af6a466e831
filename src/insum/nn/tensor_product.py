"""Equivariant tensor products with the weights of their namesakes in e3nn."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

import insum
from insum.accepted import (
    FLAG,
    NUMBERS,
    TENSOR,
    TEXT,
    Accepted,
    is_integer,
    require,
    takes,
)
from insum.errors import BindingError, UnsupportedError
from insum.nn.checks import last_size, layer_takes, one_device
from insum.nn.irreps import Irrep, Irreps, aligned
from insum.nn.paths import (
    Group,
    Normalisation,
    ScalarPath,
    components,
    groups_of,
    paths_of,
    scalar_paths_of,
)
from insum.nn.patterns import PatternModule, without_compiled_parts

LAYOUTS = ("mul_ir", "ir_mul")
EMPTY: Mapping[int, Tensor] = MappingProxyType({})


def _broadcast(*shapes: torch.Size) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise BindingError(
            f"x, y and weight have items of shapes {', '.join(str(tuple(s)) for s in shapes)}",
            expected="leading dimensions that can be broadcast",
        ) from error


INSTRUCTIONS = Accepted(
    "a list of (i_in1, i_in2, i_out, mode, has_weight[, path_weight])",
    lambda v: isinstance(v, tuple | list) and all(isinstance(one, tuple | list) for one in v),
)


IRREP_LIST = Accepted(
    'a list of irreps, such as ["0e", "1o"]', lambda v: isinstance(v, tuple | list)
)


class PathProduct(PatternModule):
    """What products over paths share: irreps, instructions, weights, and coefficients that move
    with the module; `TensorProduct` says what the arguments mean.
    """

    weight: Tensor
    output_mask: Tensor
    #: Whether weights are shared where nobody says.
    shares = True
    #: Coefficients of one statement.
    most_points = 2**31

    @takes(
        in1_var=NUMBERS.optional,
        in2_var=NUMBERS.optional,
        out_var=NUMBERS.optional,
        internal_weights=FLAG.optional,
        shared_weights=FLAG.optional,
        irrep_normalization=TEXT,
        path_normalization=TEXT,
        layout=TEXT,
        instructions=INSTRUCTIONS,
    )
    def __init__(
        self,
        irreps_in1: object,
        irreps_in2: object,
        irreps_out: object,
        instructions: Sequence[Sequence[object]],
        in1_var: Sequence[float] | None = None,
        in2_var: Sequence[float] | None = None,
        out_var: Sequence[float] | None = None,
        irrep_normalization: str = "component",
        path_normalization: str = "element",
        internal_weights: bool | None = None,
        shared_weights: bool | None = None,
        layout: str = "mul_ir",
    ) -> None:
        super().__init__()
        if layout not in LAYOUTS:
            raise UnsupportedError(
                f"there is no layout {layout!r}", expected=" or ".join(map(repr, LAYOUTS))
            )
        self.irreps_in1, self.irreps_in2, self.irreps_out = (
            Irreps.of(irreps) for irreps in (irreps_in1, irreps_in2, irreps_out)
        )
        irreps = self.irreps_in1, self.irreps_in2, self.irreps_out
        rule = Normalisation(
            irrep_normalization,
            path_normalization,
            *(None if v is None else tuple(map(float, v)) for v in (in1_var, in2_var, out_var)),
        )
        self.instructions = paths_of(*irreps, instructions, rule)
        self.weight_numel = sum(path.numel for path in self.instructions)
        self.layout = layout
        self.shared_weights = self.shares if shared_weights is None else shared_weights
        self.internal_weights = (
            self.shared_weights and self.weight_numel > 0
            if internal_weights is None
            else internal_weights
        )
        if self.internal_weights and not self.shared_weights:
            raise BindingError(
                "internal weights that are not shared",
                expected="weights for each item are passed to the call",
                remedy="internal_weights=False",
            )
        self._scalars = self._scalar_paths()
        apart = {one.path for one in self._scalars}
        self._groups = groups_of(self.instructions, *irreps, most=self.most_points, apart=apart)
        self._register()
        self.register_load_state_dict_pre_hook(without_compiled_parts)  # type: ignore[no-untyped-call]

    def _register(self) -> None:
        if self.internal_weights:
            self.weight = nn.Parameter(torch.randn(self.weight_numel))
        else:
            self.register_buffer("weight", torch.empty(0))
        reached = {path.i_out for group in self._groups for path in group.paths}
        reached |= {one.path.i_out for one in self._scalars}
        mask = [
            torch.full((mul * ir.dim,), float(i in reached))
            for i, (mul, ir) in enumerate(self.irreps_out)
        ]
        self.register_buffer("output_mask", torch.cat([*mask, torch.ones(0)]))
        self._hold([self._pattern(group) for group in self._groups], self.output_mask)

    def _pattern(self, group: Group) -> dict[str, Tensor]:
        """The coefficients of a group, exact, by the names that they have in its statements."""
        raise NotImplementedError

    def _scalar_paths(self) -> tuple[ScalarPath, ...]:
        """Paths that are no part of a group, for they have nothing to couple."""
        return ()

    # --- what goes into statements, and comes out ---

    def _weights(self, weight: Tensor | None) -> Tensor:
        if weight is None:
            if self.weight_numel and not self.internal_weights:
                raise BindingError(
                    "this product has no weights of its own",
                    expected=f"weight= with {self.weight_numel} in the last dimension",
                )
            return self.weight
        if (
            self.shared_weights
            and tuple(weight.shape) != (self.weight_numel,)
            or not weight.dim()
            or weight.shape[-1] != self.weight_numel
        ):
            lead = "" if self.shared_weights else "..., "
            raise BindingError(
                f"weight has shape {tuple(weight.shape)}",
                expected=f"({lead}{self.weight_numel}{',' if self.shared_weights else ''})",
            )
        return weight

    def _by_component(self, x: Tensor, irreps: Irreps, mul: int) -> Tensor:
        """(b, components of all terms with this multiplicity, multiplicity)."""
        b, terms = (
            x.shape[0],
            [(place, ir.dim) for place, (m, ir) in zip(irreps.slices(), irreps) if m == mul],
        )
        if mul != 1 and self.layout == "mul_ir":
            return torch.cat(
                [x[:, place].reshape(b, mul, dim).transpose(1, 2) for place, dim in terms], 1
            )
        if len(terms) == len(irreps):
            return x.reshape(b, irreps.dim // mul, mul)
        return torch.cat([x[:, place].reshape(b, dim, mul) for place, dim in terms], 1)

    def _by_irrep(
        self, outputs: dict[int, Tensor], like: Tensor, terms: Mapping[int, Tensor] = EMPTY
    ) -> Tensor:
        """The terms of the output in their order, zeros where no path leads: from all components of
        one multiplicity, and by themselves, each as (b, multiplicity, components).
        """
        if (
            self.layout == "ir_mul"
            and not terms
            and len(outputs) == 1
            and all(mul in outputs for mul, _ in self.irreps_out)
        ):
            return next(iter(outputs.values())).flatten(1)
        parts = [like.new_zeros(like.shape[0], 0)]
        for number, (mul, ir) in enumerate(self.irreps_out):
            part = terms.get(number)
            if mul in outputs:
                start = components(self.irreps_out, mul)[number]
                found = outputs[mul][:, start : start + ir.dim].transpose(1, 2)
                part = found if part is None else part + found
            if part is None:
                part = like.new_zeros(like.shape[0], mul, ir.dim)
            parts.append((part if self.layout == "mul_ir" else part.transpose(1, 2)).flatten(1))
        return torch.cat(parts, 1)

    def _terms(self, x: Tensor, irreps: Irreps) -> list[Tensor]:
        """Every term as (b, multiplicity, components)."""
        parts = torch.split(x, [mul * ir.dim for mul, ir in irreps], 1)
        by_channel = self.layout == "mul_ir"
        found = []
        for part, (mul, ir) in zip(parts, irreps):
            shape = (mul, ir.dim) if by_channel else (ir.dim, mul)
            term = part.reshape(part.shape[0], *shape)
            found.append(term if by_channel else term.transpose(1, 2))
        return found

    def _weights_of(self, group: Group, weight: Tensor) -> Tensor:
        """([b,] paths, u, v, w): a view where the paths of the group follow each other."""
        size, first = group.paths[0].numel, group.offsets[0]
        if group.offsets == tuple(range(first, first + size * len(group.paths), size)):
            # a narrower view has a gradient that is filled and copied
            whole = size * len(group.paths) == weight.shape[-1]
            flat = weight if whole else weight.narrow(-1, first, size * len(group.paths))
        else:
            flat = torch.cat([weight.narrow(-1, offset, size) for offset in group.offsets], -1)
        return flat.reshape(*weight.shape[:-1], len(group.paths), *group.weight_shape)

    # --- as e3nn has them ---

    def weight_view_for_instruction(self, instruction: int, weight: Tensor | None = None) -> Tensor:
        """The weights of one path, (..., *shape of the path): a view."""
        require("weight", weight, TENSOR.optional)
        if not is_integer(instruction) or not 0 <= instruction < len(self.instructions):
            raise BindingError(
                f"there is no instruction {instruction}",
                expected=f"a number from 0 to {len(self.instructions) - 1}",
            )
        path = self.instructions[instruction]
        if not path.has_weight:
            raise BindingError(
                f"instruction {instruction} has no weights", expected="one with has_weight"
            )
        weight = self._weights(weight)
        start = sum(p.numel for p in self.instructions[:instruction])
        return weight.narrow(-1, start, path.numel).view(*weight.shape[:-1], *path.shape)

    def weight_views(
        self, weight: Tensor | None = None, yield_instruction: bool = False
    ) -> Iterator[Any]:
        """The weights of each path that has any; ``yield_instruction``: with its number and the
        instruction itself in front.

        >>> product = FullyConnectedTensorProduct("4x0e", "2x0e", "3x0e")
        >>> [tuple(view.shape) for view in product.weight_views()]
        [(4, 2, 3)]
        """
        for number, path in enumerate(self.instructions):
            if path.has_weight:
                view = self.weight_view_for_instruction(number, weight)
                yield (number, path, view) if yield_instruction else view

    def visualize(
        self, weight: Tensor | None = None, plot_weight: bool = True, ax: Any = None
    ) -> tuple[Any, Any]:
        """Draw the paths with Matplotlib; what has weights is coloured by their size.

        Returns:
            The figure and its axes.
        """
        from insum.nn.drawn import paths_drawn

        sizes: dict[int, float] = {}
        if plot_weight and (weight is not None or self.internal_weights):
            for number, _, view in self.weight_views(weight, yield_instruction=True):
                sizes[number] = float(view.detach().square().mean().sqrt())
        irreps = self.irreps_in1, self.irreps_in2, self.irreps_out
        return paths_drawn(irreps, self.instructions, sizes, ax)

    def extra_repr(self) -> str:
        return (
            f"{self.irreps_in1} x {self.irreps_in2} -> {self.irreps_out} | "
            f"{len(self.instructions)} paths | {self.weight_numel} weights"
        )


class TensorProduct(PathProduct):
    """A weighted tensor product of two vectors of irreps, path for path and weight for weight
    `e3nn.o3.TensorProduct`.

    One statement for all paths with the same multiplicities, for mode ``uvw`` and a second input of
    multiplicity 1

        Z[b,I[p,q],w] = V[p,q] * X[b,J[p,q],u] * Y[b,K[p,q]] * W[b,L[p],u,w]

    with the Clebsch-Gordan coefficients ``V`` grouped by path. They are part of the program
    (`insum.constant`) and no parameters. Gradients of every order are further statements, so that
    forces can be trained on. Paths whose second input is scalars couple nothing and are left to
    dense products: in mode ``uuu`` without weights, and in mode ``uvw`` with weights that all items
    share and a multiplicity above 1.

    A state dict of e3nn's module loads unchanged.

    Args:
        irreps_in1: Irreps of the first input, as text such as ``"16x0e + 16x1o"`` or e3nn's own.
        irreps_in2: Those of the second.
        irreps_out: Those of the result.
        instructions: ``(i_in1, i_in2, i_out, mode, has_weight[, path_weight])`` for each path;
            modes ``uvw uvu uvv uuw uuu uvuv uvu<v u<vw``.
        in1_var: Variances of the terms of the first input, as in e3nn 0.6.
        in2_var: Those of the second.
        out_var: Those of the result.
        irrep_normalization: ``component``, ``norm`` or ``none``.
        path_normalization: ``element``, ``path`` or ``none``.
        internal_weights: Whether the weight is a parameter; by default where it is shared.
        shared_weights: One weight vector (weight_numel,) for all items, or one for each, (...,
            weight_numel).
        layout: ``"mul_ir"`` as in e3nn, each term as (multiplicity, components), or ``"ir_mul"``,
            (components, multiplicity), which needs no reordering.

    Examples:
        >>> cross = TensorProduct("16x1o", "16x1o", "16x1e", [(0, 0, 0, "uuu", False)])
        >>> x, y = torch.randn(5, 48), torch.randn(5, 48)
        >>> by_hand = torch.linalg.cross(x.view(5, 16, 3), y.view(5, 16, 3)).reshape(5, 48) / 2**0.5
        >>> torch.allclose(cross(x, y), by_hand, atol=1e-6)
        True
    """

    def _pattern(self, group: Group) -> dict[str, Tensor]:
        pattern = group.coefficients(self.irreps_in1, self.irreps_in2, self.irreps_out)
        i, j, k = pattern.slot_indices
        assert pattern.values is not None
        made = {"V": pattern.values, "I": i, "J": j, "K": k, "L": pattern.group_indices[0]}
        return {n: t for n, t in made.items() if n != "L" or group.has_weight} | group.pairs()

    def _scalar_paths(self) -> tuple[ScalarPath, ...]:
        return scalar_paths_of(
            self.instructions, self.irreps_in1, self.irreps_in2, shared=self.shared_weights
        )

    # --- the product ---

    @layer_takes(x=TENSOR, y=TENSOR, weight=TENSOR.optional)
    def forward(self, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        last_size("x", x, self.irreps_in1.dim, f"irreps_in1 {self.irreps_in1}")
        last_size("y", y, self.irreps_in2.dim, f"irreps_in2 {self.irreps_in2}")
        weight = self._weights(weight)
        one_device(module=self.output_mask, x=x, y=y, weight=weight)
        own = () if self.shared_weights else (weight.shape[:-1],)
        lead = _broadcast(x.shape[:-1], y.shape[:-1], *own)
        x, y = (t.expand(*lead, t.shape[-1]).reshape(math.prod(lead), t.shape[-1]) for t in (x, y))
        weight = (
            weight
            if self.shared_weights
            else weight.expand(*lead, -1).reshape(math.prod(lead), self.weight_numel)
        )
        return self._product(x, y, weight).reshape(*lead, self.irreps_out.dim)

    def _product(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        outputs: dict[int, Tensor] = {}
        for number, group in enumerate(self._groups):
            tensors = self._arrays(number)
            tensors["X"] = self._by_component(x, self.irreps_in1, group.muls[0])
            tensors["Y"] = self._by_component(y, self.irreps_in2, group.muls[1])
            if group.single:
                tensors["Y"] = tensors["Y"].squeeze(-1)
            if group.has_weight:
                tensors["W"] = self._weights_of(group, weight)
            shape = (
                x.shape[0],
                sum(ir.dim for mul, ir in self.irreps_out if mul == group.muls[2]),
                *group.out_shape,
            )
            z = insum.insum(
                group.statement(self.shared_weights),
                out_shape=shape,
                padded=("I", "J", "K"),
                **tensors,
            ).flatten(2)
            before = outputs.get(group.muls[2])
            outputs[group.muls[2]] = z if before is None else before + z
        return self._by_irrep(outputs, x, self._scaled(x, y, weight) if self._scalars else EMPTY)

    def _scaled(self, x: Tensor, y: Tensor, weight: Tensor) -> dict[int, Tensor]:
        """What paths with scalars add to each term of the output."""
        found: dict[int, Tensor] = {}
        first, second = self._terms(x, self.irreps_in1), self._terms(y, self.irreps_in2)
        for one in self._scalars:
            path = one.path
            part = one(first[path.i_in1], second[path.i_in2].squeeze(-1), weight)
            before = found.get(path.i_out)
            found[path.i_out] = part if before is None else before + part
        return found

    @layer_takes(y=TENSOR, weight=TENSOR.optional)
    def right(self, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """The matrices (..., irreps_in1.dim, irreps_out.dim) by which items of the second input
        act on the first.

        >>> product = FullyConnectedTensorProduct("4x0e + 4x1o", "0e + 1o", "4x0e + 4x1o")
        >>> x, y = torch.randn(5, 16), torch.randn(5, 4)
        >>> by_matrix = torch.einsum("bi,bij->bj", x, product.right(y))
        >>> torch.allclose(by_matrix, product(x, y), atol=1e-5)
        True
        """
        last_size("y", y, self.irreps_in2.dim, f"irreps_in2 {self.irreps_in2}")
        every = torch.eye(self.irreps_in1.dim, dtype=y.dtype, device=y.device)
        own = weight is not None and not self.shared_weights
        found: Tensor = self(every, y.unsqueeze(-2), weight[..., None, :] if own else weight)  # type: ignore[index]
        return found

    def statements(self) -> tuple[str, ...]:
        """The statements that a call runs.

        >>> FullyConnectedTensorProduct("8x0e + 8x1o", "0e + 1o", "8x0e + 8x1o").statements()
        ('Z[b,I[p,q],w] = V[p,q] * X[b,J[p,q],u] * Y[b,K[p,q]] * W[L[p],u,w]',)
        """
        grouped = tuple(group.statement(self.shared_weights) for group in self._groups)
        return (*grouped, *dict.fromkeys(one.statement for one in self._scalars))


class FullyConnectedTensorProduct(TensorProduct):
    """Every path that the selection rules allow, in mode ``uvw``: weight for weight
    `e3nn.o3.FullyConnectedTensorProduct`.

    Args:
        irreps_in1: Irreps of the first input, as text such as ``"16x0e + 16x1o"`` or e3nn's own.
        irreps_in2: Those of the second.
        irreps_out: Those of the result.
        options: Those of `TensorProduct`.

    Examples:
        >>> product = FullyConnectedTensorProduct("16x0e + 16x1o", "1x0e + 1x1o", "16x0e + 16x1o")
        >>> product
        FullyConnectedTensorProduct(16x0e+16x1o x 1x0e+1x1o -> 16x0e+16x1o | 4 paths | 1024 weights)
        >>> product(torch.randn(10, 64), torch.randn(10, 4)).shape
        torch.Size([10, 64])
    """

    def __init__(
        self, irreps_in1: object, irreps_in2: object, irreps_out: object, **options: Any
    ) -> None:
        in1, in2, out = (Irreps.of(irreps) for irreps in (irreps_in1, irreps_in2, irreps_out))
        instructions = [
            (a, b, c, "uvw", True)
            for a, (_, ir1) in enumerate(in1)
            for b, (_, ir2) in enumerate(in2)
            for c, (_, ir3) in enumerate(out)
            if ir3 in ir1 * ir2
        ]
        super().__init__(in1, in2, out, instructions, **options)


class ElementwiseTensorProduct(TensorProduct):
    """Irrep by irrep, in mode ``uuu`` and without weights: `e3nn.o3.ElementwiseTensorProduct`.

    Args:
        irreps_in1: Irreps of the first input, as text such as ``"16x0e + 16x1o"`` or e3nn's own.
        irreps_in2: Those of the second.
        filter_ir_out: Irreps such as ``["0e", "1o"]``; all others are left out of the result.
        options: Those of `TensorProduct`.

    Examples:
        >>> ElementwiseTensorProduct("5x1o + 5x1e", "10x1e", ["0e", "0o"])
        ElementwiseTensorProduct(5x1o+5x1e x 5x1e+5x1e -> 5x0o+5x0e | 2 paths | 0 weights)
    """

    def __init__(
        self,
        irreps_in1: object,
        irreps_in2: object,
        filter_ir_out: Sequence[object] | None = None,
        **options: Any,
    ) -> None:
        in1, in2 = (Irreps.of(irreps).simplified() for irreps in (irreps_in1, irreps_in2))
        both = tuple(aligned(in1, in2))
        wanted = _wanted(filter_ir_out)
        out: list[tuple[int, Irrep]] = []
        instructions: list[tuple[object, ...]] = []
        for number, (mul, one, two) in enumerate(both):
            for ir in one * two:
                if wanted is None or ir in wanted:
                    instructions.append((number, number, len(out), "uuu", False))
                    out.append((mul, ir))
        first = Irreps(tuple((mul, one) for mul, one, _ in both))
        second = Irreps(tuple((mul, two) for mul, _, two in both))
        super().__init__(first, second, Irreps(tuple(out)), instructions, **options)


class FullTensorProduct(TensorProduct):
    """Every product of an irrep of the first input with one of the second, in mode ``uvuv`` and
    without weights, sorted by irrep: `e3nn.o3.FullTensorProduct`.

    Args:
        irreps_in1: Irreps of the first input, as text such as ``"16x0e + 16x1o"`` or e3nn's own.
        irreps_in2: Those of the second.
        filter_ir_out: Irreps such as ``["0e", "1o"]``; all others are left out of the result.
        options: Those of `TensorProduct`.

    Examples:
        >>> FullTensorProduct("2x0e + 1x1o", "1x1o").irreps_out
        Irreps.of('1x0e+2x1o+1x1e+1x2e')
    """

    def __init__(
        self,
        irreps_in1: object,
        irreps_in2: object,
        filter_ir_out: Sequence[object] | None = None,
        **options: Any,
    ) -> None:
        in1, in2 = (Irreps.of(irreps).simplified() for irreps in (irreps_in1, irreps_in2))
        wanted = _wanted(filter_ir_out)
        found = [
            (ir, mul1 * mul2, a, b)
            for a, (mul1, one) in enumerate(in1)
            for b, (mul2, two) in enumerate(in2)
            for ir in one * two
            if wanted is None or ir in wanted
        ]
        order = sorted(range(len(found)), key=lambda n: found[n][0])
        place = {n: number for number, n in enumerate(order)}
        instructions = [(a, b, place[n], "uvuv", False) for n, (_, _, a, b) in enumerate(found)]
        out = Irreps(tuple((found[n][1], found[n][0]) for n in order))
        super().__init__(in1, in2, out, instructions, **options)


def _wanted(filter_ir_out: Sequence[object] | None) -> set[Irrep] | None:
    require("filter_ir_out", filter_ir_out, IRREP_LIST.optional)
    return None if filter_ir_out is None else {Irrep.of(ir) for ir in filter_ir_out}
