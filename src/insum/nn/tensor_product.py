"""Equivariant tensor products with the weights of their namesakes in e3nn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from insum.accepted import TENSOR, Accepted, require
from insum.api import insum
from insum.errors import BindingError
from insum.nn.checks import in_irreps, layer_takes, one_device
from insum.nn.irreps import Irrep, Irreps, aligned
from insum.nn.mixing import ChannelMixing, MixingPath, columns_of
from insum.nn.paths import Group, ScalarPath
from insum.nn.patterns import arrays_of, renew
from insum.nn.product_plan import EMPTY, ProductOptions, ProductPlan, furnish
from insum.nn.row_matrices import NAMES, RowMatrices, matrix_paths

if TYPE_CHECKING:
    from typing_extensions import Self


def _broadcast(*shapes: torch.Size) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise BindingError(
            f"x, y and weight have items of shapes {', '.join(str(tuple(s)) for s in shapes)}",
            expected="leading dimensions that can be broadcast",
        ) from error


IRREP_LIST = Accepted(
    'a list of irreps, such as ["0e", "1o"]', lambda v: isinstance(v, tuple | list)
)


class TensorProduct(nn.Module):
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
        irrep_normalization: ``component`` (or None, as in e3nn), ``norm`` or ``none``.
        path_normalization: ``element`` (or None), ``path`` or ``none``.
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

    weight: Tensor
    output_mask: Tensor
    _exact: list[dict[str, Tensor]]

    def __init__(
        self,
        irreps_in1: object,
        irreps_in2: object,
        irreps_out: object,
        instructions: Sequence[Sequence[object]],
        in1_var: Sequence[float] | None = None,
        in2_var: Sequence[float] | None = None,
        out_var: Sequence[float] | None = None,
        irrep_normalization: str | None = None,
        path_normalization: str | None = None,
        internal_weights: bool | None = None,
        shared_weights: bool | None = None,
        layout: str = "mul_ir",
    ) -> None:
        super().__init__()
        options = ProductOptions(
            in1_var,
            in2_var,
            out_var,
            irrep_normalization,
            path_normalization,
            internal_weights,
            shared_weights,
            layout,
        )
        self._plan = plan = ProductPlan.of(
            (irreps_in1, irreps_in2, irreps_out),
            instructions,
            options,
            shares=True,
            scalars_apart=True,
        )
        self.irreps_in1, self.irreps_in2, self.irreps_out = plan.irreps
        self.instructions, self.weight_numel = plan.instructions, plan.weight_numel
        self.layout = plan.layout
        self.shared_weights, self.internal_weights = plan.shared_weights, plan.internal_weights
        self._mixing, self._matrices = _mixing_of(plan), _matrices_of(plan)
        furnish(self, plan, _grouped_by_path)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        renew(self)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if "_plan" not in state:
            self._plan = ProductPlan.of_older(self)
        if "_mixing" not in state:
            self._mixing = _mixing_of(self._plan)
        if "_matrices" not in state:
            self._matrices = _matrices_of(self._plan)
        renew(self)

    # --- the product ---

    @layer_takes(x=TENSOR, y=TENSOR, weight=TENSOR.optional)
    def forward(self, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        in_irreps("x", x, "irreps_in1", self.irreps_in1)
        in_irreps("y", y, "irreps_in2", self.irreps_in2)
        weight = self._plan.weights(weight, self.weight)
        one_device(module=self.output_mask, x=x, y=y, weight=weight)
        mixing, matrices = self._mixing, self._matrices
        if mixing is not None and x.dim() == y.dim() == 2 and x.shape[0] == y.shape[0]:
            if mixing.suits(x, weight, y):
                return mixing(x, weight, y)
            if matrices is not None and matrices.suits(x, y, weight):
                return matrices(x, y, weight)
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
        plan = self._plan
        outputs: dict[int, Tensor] = {}
        for number, group in enumerate(plan.groups):
            tensors = arrays_of(self, number)
            tensors["X"] = plan.by_component(x, plan.irreps_in1, group.muls[0])
            tensors["Y"] = plan.by_component(y, plan.irreps_in2, group.muls[1])
            if group.single:
                tensors["Y"] = tensors["Y"].squeeze(-1)
            if group.has_weight:
                tensors["W"] = group.weights_in(weight)
            z = insum(
                group.statement(plan.shared_weights),
                out_shape=(x.shape[0], plan.irreps_out.extents[group.muls[2]], *group.out_shape),
                padded=("I", "J", "K"),
                **tensors,
            ).flatten(2)
            before = outputs.get(group.muls[2])
            outputs[group.muls[2]] = z if before is None else before + z
        return plan.by_irrep(outputs, x, _scaled(plan, x, y, weight) if plan.scalars else EMPTY)

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
        in_irreps("y", y, "irreps_in2", self.irreps_in2)
        every = torch.eye(self.irreps_in1.dim, dtype=y.dtype, device=y.device)
        own = weight is not None and not self.shared_weights
        found: Tensor = self(every, y.unsqueeze(-2), weight[..., None, :] if own else weight)  # type: ignore[index]
        return found

    def statements(self) -> tuple[str, ...]:
        """The statements that a call runs.

        >>> FullyConnectedTensorProduct("8x0e + 8x1o", "0e + 1o", "8x0e + 8x1o").statements()
        ('Z[b,I[p,q],w] = V[p,q] * X[b,J[p,q],u] * Y[b,K[p,q]] * W[L[p],u,w]',)
        """
        plan = self._plan
        grouped = tuple(group.statement(plan.shared_weights) for group in plan.groups)
        return (*grouped, *dict.fromkeys(one.statement for one in plan.scalars))

    # --- as e3nn has them ---

    def weight_view_for_instruction(self, instruction: int, weight: Tensor | None = None) -> Tensor:
        """The weights of one path, (..., *shape of the path): a view."""
        return self._plan.weight_view(instruction, weight, self.weight)

    def weight_views(
        self, weight: Tensor | None = None, yield_instruction: bool = False
    ) -> Iterator[Any]:
        """The weights of each path that has any; ``yield_instruction``: with its number and the
        instruction itself in front.

        >>> product = FullyConnectedTensorProduct("4x0e", "2x0e", "3x0e")
        >>> [tuple(view.shape) for view in product.weight_views()]
        [(4, 2, 3)]
        """
        for one in self._plan.weight_views(weight, self.weight):
            yield one if yield_instruction else one[-1]

    def visualize(
        self, weight: Tensor | None = None, plot_weight: bool = True, ax: Any = None
    ) -> tuple[Any, Any]:
        """Draw the paths with Matplotlib; what has weights is coloured by their size.

        Returns:
            The figure and its axes.
        """
        return self._plan.drawn(weight, self.weight, plot_weight, ax)

    def extra_repr(self) -> str:
        return str(self._plan)


def _grouped_by_path(plan: ProductPlan, group: Group) -> dict[str, Tensor]:
    pattern = group.coefficients(*plan.irreps)
    i, j, k = pattern.slot_indices
    assert pattern.values is not None
    made = {"V": pattern.values, "I": i, "J": j, "K": k, "L": pattern.group_indices[0]}
    return {n: t for n, t in made.items() if n != "L" or group.has_weight} | group.pairs()


def _only_mixes(plan: ProductPlan) -> bool:
    """Whether there is nothing but products with scalars in which channels are mixed."""
    numel = sum(one.path.numel for one in plan.scalars if one.path.mode == "uvw")
    if plan.groups or not plan.scalars or numel != plan.weight_numel:
        return False
    return all(one.path.mode == "uvw" for one in plan.scalars)


def _matrices_of(plan: ProductPlan) -> RowMatrices | None:
    """Such a product by matrices of each row, where the scalars are one term."""
    if not _only_mixes(plan) or len(plan.irreps_in2) != 1:
        return None
    source = columns_of(plan.irreps_in1, plan.layout)
    target = columns_of(plan.irreps_out, plan.layout)
    paths = matrix_paths(
        [
            (source[one.path.i_in1], target[one.path.i_out], one.offset, one.scale)
            for one in plan.scalars
        ]
    )
    factors = plan.irreps_in2.dim
    widths = plan.irreps_in1.dim, plan.weight_numel // factors, plan.irreps_out.dim
    return RowMatrices(paths, factors, dict(zip(NAMES, widths)))


def _mixing_of(plan: ProductPlan) -> ChannelMixing | None:
    """A product with nothing but scalars, in which channels are mixed: one launch for all paths."""
    if not _only_mixes(plan):
        return None
    scalars = columns_of(plan.irreps_in2, plan.layout)
    paths = []
    for one in plan.scalars:
        _, v, w = one.path.shape
        for number in range(v):
            factor = scalars[one.path.i_in2].start + number
            ends, start = (one.path.i_in1, one.path.i_out), one.offset + number * w
            paths.append(MixingPath(*ends, start, (v * w, 1), one.scale, factor))
    source = columns_of(plan.irreps_in1, plan.layout)
    target = columns_of(plan.irreps_out, plan.layout)
    return ChannelMixing(source, target, tuple(paths), plan.weight_numel, factored=True)


def _scaled(plan: ProductPlan, x: Tensor, y: Tensor, weight: Tensor) -> dict[int, Tensor]:
    """What paths with scalars add to each term of the output."""
    found: dict[int, Tensor] = {}
    first, second = plan.terms(x, plan.irreps_in1), plan.terms(y, plan.irreps_in2)
    own = _own_weights(plan.scalars, weight)
    for number, one in enumerate(plan.scalars):
        path = one.path
        part = one(first[path.i_in1], second[path.i_in2].squeeze(-1), own.get(number, weight))
        before = found.get(path.i_out)
        found[path.i_out] = part if before is None else before + part
    return found


def _own_weights(paths: Sequence[ScalarPath], weight: Tensor) -> dict[int, Tensor]:
    """Those of each path that has any, by its number. They are split at once: gradients of slices
    would each be a whole tensor.
    """
    starts = {number: one.offset for number, one in enumerate(paths) if one.path.numel}
    if not starts:
        return {}
    ends = {one.offset + one.path.numel for one in paths}
    cuts = sorted({0, *starts.values(), *ends, weight.shape[0]})
    pieces = torch.split(weight, [b - a for a, b in itertools.pairwise(cuts)])
    return {number: pieces[cuts.index(start)] for number, start in starts.items()}


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
