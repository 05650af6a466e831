"""What a product over paths runs: its irreps and paths, how vectors are laid out, whose the weights
are, and the groups of paths that are one statement each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from insum.accepted import FLAG, NUMBERS, TENSOR, TEXT, Accepted, require
from insum.errors import BindingError, UnsupportedError
from insum.nn.checks import instruction_number, refuse_own_for_each
from insum.nn.instructions import Normalisation, paths_of
from insum.nn.irreps import Irreps
from insum.nn.paths import (
    Group,
    Instruction,
    ScalarPath,
    groups_of,
    scalar_paths_of,
)
from insum.nn.patterns import hold, mask_of, without_compiled_parts
from insum.nn.reordering import component_order, in_order, irrep_order

LAYOUTS = ("mul_ir", "ir_mul")
EMPTY: Mapping[int, Tensor] = MappingProxyType({})
INSTRUCTIONS = Accepted(
    "a list of (i_in1, i_in2, i_out, mode, has_weight[, path_weight])",
    lambda v: isinstance(v, tuple | list) and all(isinstance(one, tuple | list) for one in v),
)


@dataclass(frozen=True)
class ProductOptions:
    """What the constructors of all products take besides irreps and instructions, in the order and
    by the names that e3nn has; `TensorProduct` says what each means.
    """

    in1_var: Sequence[float] | None = None
    in2_var: Sequence[float] | None = None
    out_var: Sequence[float] | None = None
    irrep_normalization: str | None = None
    path_normalization: str | None = None
    internal_weights: bool | None = None
    shared_weights: bool | None = None
    layout: str = "mul_ir"

    def __post_init__(self) -> None:
        for name in ("in1_var", "in2_var", "out_var"):
            require(name, getattr(self, name), NUMBERS.optional)
        for name in ("internal_weights", "shared_weights"):
            require(name, getattr(self, name), FLAG.optional)
        for name in ("irrep_normalization", "path_normalization"):
            require(name, getattr(self, name), TEXT.optional)
        require("layout", self.layout, TEXT)
        if self.layout not in LAYOUTS:
            raise UnsupportedError(
                f"there is no layout {self.layout!r}", expected=" or ".join(map(repr, LAYOUTS))
            )

    def normalisation(self) -> Normalisation:
        return Normalisation.of(
            "component" if self.irrep_normalization is None else self.irrep_normalization,
            "element" if self.path_normalization is None else self.path_normalization,
            self.in1_var,
            self.in2_var,
            self.out_var,
        )


@dataclass(frozen=True)
class ProductPlan:
    """The plan of a product, which modules hold; the names are those that e3nn has."""

    irreps_in1: Irreps
    irreps_in2: Irreps
    irreps_out: Irreps
    instructions: tuple[Instruction, ...]
    layout: str
    shared_weights: bool
    internal_weights: bool
    weight_numel: int
    groups: tuple[Group, ...]
    #: Paths that are no part of a group, for they have nothing to couple.
    scalars: tuple[ScalarPath, ...]

    @classmethod
    def of(
        cls,
        irreps: tuple[object, object, object],
        instructions: Sequence[Sequence[object]],
        options: ProductOptions,
        *,
        shares: bool,
        scalars_apart: bool = False,
        most: int = 2**31,
    ) -> ProductPlan:
        """``shares``: whether items share weights where no option says so; ``scalars_apart``:
        whether there is another way for paths with scalars; ``most``: coefficients of one
        statement.
        """
        require("instructions", instructions, INSTRUCTIONS)
        in1, in2, out = map(Irreps.of, irreps)
        paths = paths_of(in1, in2, out, instructions, options.normalisation())
        numel = sum(path.numel for path in paths)
        shared = shares if options.shared_weights is None else options.shared_weights
        internal = options.internal_weights
        internal = shared and numel > 0 if internal is None else internal
        refuse_own_for_each(internal, shared)
        scalars = scalar_paths_of(paths, in1, in2, shared=shared) if scalars_apart else ()
        groups = groups_of(paths, in1, in2, out, most, apart={one.path for one in scalars})
        return cls(in1, in2, out, paths, options.layout, shared, internal, numel, groups, scalars)

    @classmethod
    def of_older(cls, product: Any) -> ProductPlan:
        """That of a module which was stored when modules did not hold plans."""
        first = [field.name for field in fields(cls)][:-2]
        held = {name: getattr(product, name) for name in first}
        return cls(**held, groups=product._groups, scalars=product._scalars)

    @property
    def irreps(self) -> tuple[Irreps, Irreps, Irreps]:
        return self.irreps_in1, self.irreps_in2, self.irreps_out

    def output_mask(self) -> Tensor:
        """1 where a path leads, 0 elsewhere."""
        reached = {path.i_out for group in self.groups for path in group.paths}
        reached |= {one.path.i_out for one in self.scalars}
        return mask_of(self.irreps_out, reached)

    def __str__(self) -> str:
        return (
            f"{self.irreps_in1} x {self.irreps_in2} -> {self.irreps_out} | "
            f"{len(self.instructions)} paths | {self.weight_numel} weights"
        )

    # --- what goes into statements, and comes out ---

    def by_component(self, x: Tensor, irreps: Irreps, mul: int) -> Tensor:
        """(b, components of all terms with this multiplicity, multiplicity)."""
        b, alike = x.shape[0], irreps.extents.keys() <= {mul}
        if alike and (mul == 1 or self.layout != "mul_ir"):
            return x.reshape(b, irreps.dim // mul, mul)
        if alike and (found := in_order(component_order, irreps, x)) is not None:
            return found.view(b, irreps.dim // mul, mul)
        if alike:  # split at once, for the gradients
            parts: Sequence[Tensor] = torch.split(x, list(irreps.widths), 1)
        else:
            parts = [x[:, place] for place, (m, _) in zip(irreps.slices(), irreps) if m == mul]
        dims = [part.shape[1] // mul for part in parts]
        if mul != 1 and self.layout == "mul_ir":
            return torch.cat(
                [part.reshape(b, mul, dim).transpose(1, 2) for part, dim in zip(parts, dims)], 1
            )
        return torch.cat([part.reshape(b, dim, mul) for part, dim in zip(parts, dims)], 1)

    def by_irrep(
        self, outputs: dict[int, Tensor], like: Tensor, terms: Mapping[int, Tensor] = EMPTY
    ) -> Tensor:
        """The terms of the output in their order, zeros where no path leads: from all components of
        one multiplicity, and by themselves, each as (b, multiplicity, components).
        """
        if not terms and len(outputs) == 1 and self.irreps_out.extents.keys() <= outputs.keys():
            (found,) = outputs.values()
            if self.layout == "ir_mul":
                return found.flatten(1)
            whole = in_order(irrep_order, self.irreps_out, found.flatten(1))
            if whole is not None:
                return whole
        # split at once: gradients of slices would each be a whole tensor
        pieces = {
            mul: iter(torch.split(found, [ir.dim for m, ir in self.irreps_out if m == mul], 1))
            for mul, found in outputs.items()
        }
        parts = []
        for number, (mul, ir) in enumerate(self.irreps_out):
            part = terms.get(number)
            if mul in pieces:
                found = next(pieces[mul]).transpose(1, 2)
                part = found if part is None else part + found
            if part is None:
                part = like.new_zeros(like.shape[0], mul, ir.dim)
            parts.append((part if self.layout == "mul_ir" else part.transpose(1, 2)).flatten(1))
        return torch.cat(parts, 1) if parts else like.new_zeros(like.shape[0], 0)

    def terms(self, x: Tensor, irreps: Irreps) -> list[Tensor]:
        """Every term as (b, multiplicity, components)."""
        parts = torch.split(x, list(irreps.widths), 1)
        by_channel = self.layout == "mul_ir"
        found = []
        for part, (mul, ir) in zip(parts, irreps):
            shape = (mul, ir.dim) if by_channel else (ir.dim, mul)
            term = part.reshape(part.shape[0], *shape)
            found.append(term if by_channel else term.transpose(1, 2))
        return found

    # --- weights: those that were passed, or else the module's own ---

    def weights(self, weight: Tensor | None, own: Tensor) -> Tensor:
        numel = self.weight_numel
        if weight is None:
            if numel and not self.internal_weights:
                raise BindingError(
                    "this product has no weights of its own",
                    expected=f"weight= with {numel} in the last dimension",
                )
            return own
        if (
            self.shared_weights
            and tuple(weight.shape) != (numel,)
            or not weight.dim()
            or weight.shape[-1] != numel
        ):
            lead = "" if self.shared_weights else "..., "
            raise BindingError(
                f"weight has shape {tuple(weight.shape)}",
                expected=f"({lead}{numel}{',' if self.shared_weights else ''})",
            )
        return weight

    def weight_view(self, instruction: int, weight: Tensor | None, own: Tensor) -> Tensor:
        """Those of one path."""
        require("weight", own if weight is None else weight, TENSOR)
        instruction_number(instruction, len(self.instructions))
        path = self.instructions[instruction]
        if not path.has_weight:
            raise BindingError(
                f"instruction {instruction} has no weights", expected="one with has_weight"
            )
        weight = self.weights(weight, own)
        start = sum(p.numel for p in self.instructions[:instruction])
        return weight.narrow(-1, start, path.numel).view(*weight.shape[:-1], *path.shape)

    def weight_views(
        self, weight: Tensor | None, own: Tensor
    ) -> Iterator[tuple[int, Instruction, Tensor]]:
        """Of every path that has any its number, itself and its weights."""
        for number, path in enumerate(self.instructions):
            if path.has_weight:
                yield number, path, self.weight_view(number, weight, own)

    def drawn(self, weight: Tensor | None, own: Tensor, coloured: bool, ax: Any) -> tuple[Any, Any]:
        """The paths in a figure; ``coloured``: by the size of their weights."""
        from insum.nn.drawn import paths_drawn

        sizes: dict[int, float] = {}
        if coloured and (weight is not None or self.internal_weights):
            for number, _, view in self.weight_views(weight, own):
                sizes[number] = float(view.detach().square().mean().sqrt())
        return paths_drawn(self.irreps, self.instructions, sizes, ax)


#: What makes the arrays of a group.
GroupPattern: TypeAlias = Callable[[ProductPlan, Group], dict[str, Tensor]]


def furnish(product: nn.Module, plan: ProductPlan, pattern: GroupPattern) -> None:
    """A module gets the weights of a plan, its mask, and the coefficients of its groups: each as
    ``pattern`` makes it, exact, by the names that it has in statements.
    """
    if plan.internal_weights:
        product.weight = nn.Parameter(torch.randn(plan.weight_numel))
    else:
        product.register_buffer("weight", torch.empty(0))
    mask = plan.output_mask()
    product.register_buffer("output_mask", mask)
    hold(product, [pattern(plan, group) for group in plan.groups], mask)
    product.register_load_state_dict_pre_hook(without_compiled_parts)  # type: ignore[no-untyped-call]
