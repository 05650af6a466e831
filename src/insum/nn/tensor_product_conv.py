"""Gather, tensor product and scatter over the edges of a graph, in one statement."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from insum.accepted import COUNT, TENSOR
from insum.api import insum
from insum.call import prepared
from insum.errors import BindingError
from insum.nn.checks import in_irreps, layer_takes, one_device
from insum.nn.edges import check_edges, endpoints
from insum.nn.paths import Group
from insum.nn.patterns import arrays_of, renew
from insum.nn.product_plan import ProductOptions, ProductPlan, furnish
from insum.plan.strategies.unrolling import UNROLL_POINTS

if TYPE_CHECKING:
    from typing_extensions import Self


class TensorProductConv(nn.Module):
    """The convolution of equivariant networks: the tensor product of what every edge starts from
    with what the edge has, weighted and summed where it ends.

    One statement for all paths with the same mode and multiplicities, in mode ``uvu``

        Z[dst[e],I[p],u] = V[p] * X[src[e],J[p],u] * Y[e,K[p]] * W[e,L[p],u]

    with the Clebsch-Gordan coefficients ``V`` as part of the program. On a GPU nothing of the size
    of edges times channels is made, neither here nor in gradients of any order, which are
    statements of the same kind; on a CPU, messages are. Edges may be new at each call, in any
    order. Where edges share their weights, products are summed first and weighted at the nodes.

    Results are those of ``e3nn.o3.TensorProduct`` on gathered rows and `torch.Tensor.index_add`;
    a state dict of that product loads unchanged. Sums have one order where
    `torch.use_deterministic_algorithms` asks for it.

    Args:
        irreps_in1: Irreps of the nodes, text such as ``"64x0e + 64x1o"`` or e3nn's own.
        irreps_in2: Irreps of the edges, mostly those of spherical harmonics.
        irreps_out: Irreps of the nodes that come out.
        instructions: ``(i_in1, i_in2, i_out, mode, has_weight[, path_weight])``, as `TensorProduct`
            has them.
        options: Those of `TensorProduct`, by name; but weights are each edge's own unless
            ``shared_weights`` is set.

    Examples:
        >>> conv = TensorProductConv(
        ...     "8x0e + 8x1o",
        ...     "0e + 1o",
        ...     "8x0e + 8x1o",
        ...     [(0, 0, 0, "uvu", True), (0, 1, 1, "uvu", True), (1, 1, 0, "uvu", True)],
        ... )
        >>> edge_index = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])
        >>> x, y = torch.randn(3, 32), torch.randn(4, 4)
        >>> conv(x, y, edge_index, torch.randn(4, conv.weight_numel)).shape
        torch.Size([3, 32])
        >>> conv.statements()
        ('Z[dst[e],I[p],u] = V[p] * X[src[e],J[p],u] * Y[e,K[p]] * W[e,L[p],u]',)
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
        **options: Any,
    ) -> None:
        super().__init__()
        self._plan = plan = ProductPlan.of(
            (irreps_in1, irreps_in2, irreps_out),
            instructions,
            ProductOptions(**options),
            shares=False,
            most=UNROLL_POINTS,  # more would not become code
        )
        self.irreps_in1, self.irreps_in2, self.irreps_out = plan.irreps
        self.instructions, self.weight_numel = plan.instructions, plan.weight_numel
        self.layout = plan.layout
        self.shared_weights, self.internal_weights = plan.shared_weights, plan.internal_weights
        furnish(self, plan, _listed)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        renew(self)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if "_plan" not in state:
            self._plan = ProductPlan.of_older(self)
        renew(self)

    @layer_takes(
        x=TENSOR, y=TENSOR, edge_index=TENSOR, weight=TENSOR.optional, num_nodes=COUNT.optional
    )
    def forward(
        self,
        x: Tensor,
        y: Tensor,
        edge_index: Tensor,
        weight: Tensor | None = None,
        num_nodes: int | None = None,
    ) -> Tensor:
        """What reaches every node.

        Args:
            x: Features of the nodes, (nodes, irreps_in1.dim).
            y: Features of the edges, (edges, irreps_in2.dim).
            edge_index: PyG's, (2, edges): sources, then targets.
            weight: (edges, weight_numel), or (weight_numel,) where edges share it.
            num_nodes: How many nodes come out, where it is not as many as go in.

        Returns:
            (nodes, irreps_out.dim).
        """
        in_irreps("x", x, "irreps_in1", self.irreps_in1)
        in_irreps("y", y, "irreps_in2", self.irreps_in2)
        weight = self._plan.weights(weight, self.weight)
        one_device(module=self.output_mask, x=x, y=y, edge_index=edge_index, weight=weight)
        nodes = x.shape[0] if num_nodes is None else num_nodes
        self._check_rows(x, y, edge_index, weight)
        return self._between(x, y, endpoints(edge_index, x.shape[0], nodes), weight, nodes)

    def _between(
        self, x: Tensor, y: Tensor, ends: tuple[Tensor, Tensor], weight: Tensor, nodes: int
    ) -> Tensor:
        """``ends``: of the edges, sources and targets."""
        outputs: dict[int, Tensor] = {}
        for number, group in enumerate(self._plan.groups):
            found = self._summed(number, group, x, y, ends, weight, nodes).flatten(2)
            before = outputs.get(group.muls[2])
            outputs[group.muls[2]] = found if before is None else before + found
        return self._plan.by_irrep(outputs, x.new_empty(nodes, 0))

    def _check_rows(self, x: Tensor, y: Tensor, edge_index: Tensor, weight: Tensor) -> None:
        edges = edge_index.shape[1] if edge_index.dim() == 2 else -1
        own = self.weight_numel and not self.shared_weights
        fit = y.dim() == 2 and y.shape[0] == edges
        fit = fit and (not own or weight.dim() == 2 and weight.shape[0] == edges)
        if fit and x.dim() == 2:
            return
        check_edges(edge_index)
        if x.dim() != 2:
            raise BindingError(f"x has shape {tuple(x.shape)}", expected="one row for each node")
        if y.dim() != 2 or y.shape[0] != edges:
            raise BindingError(
                f"y has shape {tuple(y.shape)}, but there are {edges} edges",
                expected=f"({edges}, {self.irreps_in2.dim}): one row for each edge",
            )
        raise BindingError(
            f"weight has shape {tuple(weight.shape)}, but there are {edges} edges",
            expected=f"({edges}, {self.weight_numel}): one row for each edge",
        )

    def _summed(
        self,
        number: int,
        group: Group,
        x: Tensor,
        y: Tensor,
        ends: tuple[Tensor, Tensor],
        weight: Tensor,
        nodes: int,
    ) -> Tensor:
        """(nodes, components of the output, its letters)."""
        plan, arrays = self._plan, arrays_of(self, number)
        second = plan.by_component(y, plan.irreps_in2, group.muls[1])
        along: dict[str, Any] = {
            "X": plan.by_component(x, plan.irreps_in1, group.muls[0]),
            "Y": second.squeeze(-1) if group.single else second,
            "src": ends[0],
            "dst": ends[1],
        }
        shape = nodes, plan.irreps_out.extents[group.muls[2]], *group.out_shape
        if not group.mixes(plan.shared_weights):
            given: dict[str, Any] = {**arrays, **along}
            if group.has_weight:
                given["W"] = group.weights_in(weight)
            return _along(group, given, shape)
        statements = group.along_edges(plan.shared_weights)
        mixing = {name: arrays.pop(name) for name in "IL"}
        rows = nodes, mixing["I"].shape[0], *group.summed_shape
        sums = insum(statements[0], out_shape=rows, **arrays, **along)
        mixed = group.weights_in(weight)
        return insum(statements[1], out_shape=shape, T=sums, W=mixed, **mixing)

    def statements(self) -> tuple[str, ...]:
        """The statements of a call."""
        plan = self._plan
        return tuple(s for group in plan.groups for s in group.along_edges(plan.shared_weights))

    # --- as e3nn has them ---

    def weight_view_for_instruction(self, instruction: int, weight: Tensor | None = None) -> Tensor:
        """The weights of one path, (..., *shape of the path): a view."""
        return self._plan.weight_view(instruction, weight, self.weight)

    def weight_views(
        self, weight: Tensor | None = None, yield_instruction: bool = False
    ) -> Iterator[Any]:
        """The weights of each path that has any; ``yield_instruction``: with its number and the
        instruction itself in front.

        >>> product = TensorProductConv(
        ...     "4x0e", "2x0e", "3x0e", [(0, 0, 0, "uvw", True)], shared_weights=True
        ... )
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
        shared = ", shared" if self.shared_weights and self.weight_numel else ""
        return f"{self._plan}{shared}"


def _listed(plan: ProductPlan, group: Group) -> dict[str, Tensor]:
    """The coefficients of a group in one list."""
    (i, j, k, l), values = group.entries(*plan.irreps)
    made = {"J": j, "K": k}
    if group.mixes(plan.shared_weights):
        rows, at = torch.unique(torch.stack([l, i]), dim=1, return_inverse=True)
        made |= {"H": at, "L": rows[0], "I": rows[1]}
    else:
        made |= {"I": i, **({"L": l} if group.has_weight else {})}
    return {"V": values, **{n: t.int() for n, t in made.items()}, **group.pairs()}


def _along(group: Group, given: dict[str, Any], shape: tuple[int, ...]) -> Tensor:
    """The statement of a group. Where no kernel is generated its three steps are quicker by
    themselves: rows of messages are matrix products then.
    """
    product = group.over_edges()
    if prepared.kernels_look_on(given["X"].device):
        return product(given, shape)
    x, src, dst = (given.pop(name) for name in ("X", "src", "dst"))
    rows = insum("G[e,f] = X[src[e],f]", X=x.flatten(1), src=src)
    given["X"] = rows.reshape(src.shape[0], *x.shape[1:])
    statement = product.statement().replace("src[e]", "e").replace("dst[e]", "e")
    messages = insum(statement, out_shape=(src.shape[0], *shape[1:]), **given)
    flat = shape[0], math.prod(shape[1:])
    summed = insum("Z[dst[e],f] = M[e,f]", M=messages.flatten(1), dst=dst, out_shape=flat)
    return summed.reshape(shape)
