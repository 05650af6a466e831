"""Models that were built of e3nn's layers, with insum's in their place.

Layers are known by their classes' names and by what they hold, so that neither e3nn nor a model's
own package is imported.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from insum.accepted import Accepted, takes
from insum.api import insum
from insum.errors import InsumError, UnsupportedError
from insum.nn.activations import Gate, NetStep, Scaled, e3nn_step, folded, through, times
from insum.nn.harmonics import SphericalHarmonics
from insum.nn.interactions import Interaction, is_nequip_block
from insum.nn.irreps import Irreps
from insum.nn.irreps_linear import Linear
from insum.nn.radial import bessel, envelope
from insum.nn.reordering import channel_order, in_order
from insum.nn.symmetric_contraction import SymmetricContraction, coupled
from insum.nn.tensor_product import TensorProduct
from insum.nn.tensor_product_conv import TensorProductConv
from insum.notebook import table

MODULE = Accepted("a torch.nn.Module", lambda v: isinstance(v, nn.Module))
#: Couplings of another basis in single precision are its noise below this.
NOISE = 1e-7


@dataclass(frozen=True)
class Replacement:
    """A module that was replaced: its name in the model, what it was and what is there now."""

    name: str
    before: str
    after: str


@dataclass(frozen=True)
class Swapped:
    """What `swap` did: modules that were replaced, and those of e3nn's that could not be, with the
    reason.
    """

    replaced: tuple[Replacement, ...]
    kept: tuple[tuple[str, str], ...]

    def __len__(self) -> int:
        return len(self.replaced)

    def __str__(self) -> str:
        width = max((len(one.name) for one in self.replaced), default=0)
        lines = [f"{one.name:{width}}  {one.before} -> {one.after}" for one in self.replaced]
        return "\n".join([*lines, *(f"{name}: kept, {why}" for name, why in self.kept)])

    def _repr_html_(self) -> str:
        rows = [(one.name, one.before, one.after) for one in self.replaced]
        kept = [(name, "kept", why) for name, why in self.kept]
        return table(("module", "before", "after"), [*rows, *kept])


@takes(module=MODULE)
def from_e3nn(module: nn.Module) -> nn.Module:
    """insum's counterpart of a layer of e3nn, or a copy of a model with all such layers replaced
    (see `swap`). The module itself stays as it is.

    Args:
        module: ``o3.TensorProduct`` and what is derived of it, ``o3.Linear``, a symmetric
            contraction of MACE, or a module that has such layers inside.

    Returns:
        A module of its own, with copies of the weights.

    Raises:
        insum.UnsupportedError: There is nothing of e3nn's in it, or it is a layer that computes
            something else than e3nn's: with a ``forward`` of its own, hooks or parametrizations.

    Examples:
        >>> from e3nn import o3
        >>> from_e3nn(o3.Linear("2x0e + 1x1o", "3x0e + 2x1o"))
        Linear(2x0e+1x1o -> 3x0e+2x1o | 8 weights)
    """
    _refuse_scripts(module)
    _refuse_changed(module)
    own = copy.deepcopy(module)
    found = counterpart(own)
    if found is not None:
        return found
    if not swap(own).replaced:
        raise UnsupportedError(
            f"{type(module).__name__} has no layer that insum has a counterpart of",
            expected="e3nn's TensorProduct, FullyConnectedTensorProduct, Linear and their like",
        )
    return own


@takes(model=MODULE)
def swap(model: nn.Module) -> Swapped:
    """Replace layers of e3nn inside of a model by insum's, in place: tensor products, linear
    layers, spherical harmonics, networks of scalars, gates, the symmetric contraction of MACE, the
    radial functions of MACE and NequIP, and their gather, product and scatter by one convolution.
    Blocks of NequIP that such layers are in are replaced by one with fewer calls between them.

    Parameters stay the objects that they were, so that optimizers go on; states load as before.
    Layers with a ``forward`` of their own, hooks or parametrizations are kept, and told of.
    Either everything is replaced that can be, or, where something raises, nothing.

    Args:
        model: A model with such layers inside; MACE's and NequIP's among them.

    Returns:
        What was replaced by what; print it.

    Raises:
        insum.UnsupportedError: The model is scripted, or a layer of e3nn itself, which nothing
            holds that could hold another.

    Examples:
        >>> print(swap(torch.nn.Sequential(torch.nn.Linear(2, 3))))
        <BLANKLINE>
    """
    _refuse_scripts(model)
    if not _is_own(model) and _is_layer(model):
        raise UnsupportedError(
            f"the model is a layer itself, {type(model).__name__}, which nothing holds",
            expected="a model with layers inside",
            remedy="from_e3nn(model) gives the layer that replaces it",
        )
    planned: list[tuple[nn.Module, str, nn.Module, Replacement]] = []
    kept: list[tuple[str, str]] = []
    made: dict[int, nn.Module] = {}
    for name, parent, child, old in _places(model):
        try:
            new = made.get(id(old)) or _replacement(parent, child, old)
        except InsumError as error:
            kept.append((name, str(error).splitlines()[0]))
            continue
        if new is not None:
            made[id(old)] = new
            what = Replacement(name, type(old).__name__, type(new).__name__)
            planned.append((parent, child, new, what))
    for parent, child, new, _ in planned:
        setattr(parent, child, new)
        if isinstance(new, MessageConv):
            parent.conv_fusion = True  # type: ignore[assignment]
    around = [_less_between(*place) for place in list(_places(model))]
    done = [*(what for *_, what in planned), *(what for what in around if what is not None)]
    return Swapped(tuple(done), tuple(kept))


def _less_between(name: str, parent: nn.Module, child: str, old: Any) -> Replacement | None:
    """Put a block in the place of another, around the same layers, where these are ours."""
    if not is_nequip_block(old) or _is_changed(old):
        return None
    if not isinstance(old.tp_scatter, ScatteredProduct) or not isinstance(old.edge_mlp, ScalarNet):
        return None
    new = Interaction(old)
    setattr(parent, child, new)
    return Replacement(name, type(old).__name__, type(new).__name__)


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """Every module below another: its name in the whole, its parent, its name there, itself. What
    is inside of a layer that is replaced as a whole is not among them.
    """
    every = dict(model.named_modules(remove_duplicate=False))
    layers: list[str] = []
    for name, module in every.items():
        if name and not any(name.startswith(f"{layer}.") for layer in layers):
            parent, _, child = name.rpartition(".")
            yield name, every[parent], child, module
            layers += [name] if _is_layer(module) else []


def _replacement(parent: nn.Module, child: str, old: nn.Module) -> nn.Module | None:
    _refuse_changed(old)
    if child == "conv_tp" and _is_product(old) and _asks_for_fusion(parent):
        return _product(old, MessageConv)
    return counterpart(old)


def counterpart(module: nn.Module) -> nn.Module | None:
    """insum's layer for one of e3nn's, with the same parameters; None where it is no such layer."""
    if _is_named(module, "TensorProductScatter") and _is_product(getattr(module, "tp", None)):
        return ScatteredProduct(_product(module.tp, TensorProductConv))
    if _is_named(module, "TensorSquare", "e3nn."):
        return _product(module, SquareProduct)
    if _is_product(module):
        return _product(module, TensorProduct)
    if _is_named(module, "Linear", "e3nn."):
        return _linear(module)
    if _is_contraction(module):
        return _contraction(module)
    if _is_named(module, "SphericalHarmonics", "e3nn."):
        return _harmonics(module)
    if _is_named(module, "FullyConnectedNet", "e3nn.") or _is_scalar_net(module):
        return ScalarNet.of(module)
    if _is_named(module, "Gate", "e3nn."):
        return _gate(module)
    if _is_named(module, "Activation", "e3nn."):
        return _activation(module)
    if _is_side_by_side(module):
        return SideBySide(module.irreps)
    return _radial(module)


# --- which is which -------------------------------------------------------------------------------


def _is_named(module: object, name: str, package: str = "") -> bool:
    kinds = type(module).__mro__
    return any(k.__name__ == name and k.__module__.startswith(package) for k in kinds)


def _refuse_changed(layer: nn.Module) -> None:
    """Raise where a layer, or a part of it, does more than its class in the package it is from."""
    if _is_own(layer) or not _is_layer(layer):
        return
    for part in layer.modules():
        if _is_script(part):
            continue
        if _has_hooks(part):
            raise UnsupportedError("it has hooks", expected="a layer without")
        if hasattr(part, "parametrizations"):
            raise UnsupportedError("it is parametrized", expected="a layer with plain weights")
    if _has_own_forward(layer):
        raise UnsupportedError(
            f"{type(layer).__name__} has a forward of its own", expected="a layer without"
        )


def _has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, hooks) for hooks in _HOOKS)


def _is_changed(block: nn.Module) -> bool:
    """Whether a block itself, whatever its layers do, does more than its class."""
    return _has_hooks(block) or "forward" in vars(block) or hasattr(block, "parametrizations")


#: What of a module is called beside ``forward``.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _has_own_forward(layer: nn.Module) -> bool:
    """Whether a class that is derived of the one by which a layer is known, in another package,
    computes something else.
    """
    kinds = type(layer).__mro__
    known = next(k for k in kinds if k.__module__.startswith(_KNOWN_FROM.get(k.__name__, "no ")))
    derived = kinds[: kinds.index(known)]
    home = known.__module__.partition(".")[0]
    others = [k for k in derived if k.__module__.partition(".")[0] != home]
    return "forward" in vars(layer) or any("forward" in vars(k) for k in others)


#: The classes that layers are known by, and how their modules' names begin.
_KNOWN_FROM = {
    **dict.fromkeys(("TensorProduct", "TensorSquare", "Linear", "SphericalHarmonics"), "e3nn."),
    **dict.fromkeys(("FullyConnectedNet", "Gate", "Activation"), "e3nn."),
    **dict.fromkeys(("TensorProductScatter", "SymmetricContraction"), ""),
    **dict.fromkeys(("ScalarMLPFunction", "BesselEdgeLengthEncoding"), "nequip."),
    "RadialEmbeddingBlock": "mace.",
}


def _is_product(module: object) -> bool:
    return _is_named(module, "TensorProduct", "e3nn.")


def _is_contraction(module: object) -> bool:
    parts = getattr(module, "contractions", None)
    named = _is_named(module, "SymmetricContraction") and isinstance(parts, nn.ModuleList)
    return named and all(hasattr(part, "U_matrix_1") for part in parts or ())


def _is_scalar_net(module: object) -> bool:
    """NequIP's network of scalars, where it is no more than linear layers and activations."""
    named = _is_named(module, "ScalarMLPFunction", "nequip.")
    layers = getattr(module, "mlp", None)
    return named and isinstance(layers, nn.Sequential) and not getattr(module, "bias", True)


def _is_side_by_side(module: object) -> bool:
    named = _is_named(module, "reshape_irreps", "mace.")
    return named and getattr(module, "cueq_config", None) is None


def _is_radial(module: object) -> bool:
    if _is_named(module, "RadialEmbeddingBlock", "mace."):
        plain = getattr(module, "apply_cutoff", True) and not hasattr(module, "distance_transform")
        parts = getattr(module, "bessel_fn", None), getattr(module, "cutoff_fn", None)
        names = "BesselBasis", "PolynomialCutoff"
        return bool(plain) and all(map(_is_named, parts, names))
    cutoff = getattr(module, "cutoff", None)
    kind = getattr(cutoff, "original_name", type(cutoff).__name__)  # where it is scripted
    return _is_named(module, "BesselEdgeLengthEncoding", "nequip.") and kind == "PolynomialCutoff"


def _is_own(module: nn.Module) -> bool:
    own = TensorProduct | TensorProductConv | Linear | SymmetricContraction | ScatteredProduct
    own |= SphericalHarmonics | ScalarNet | Gate | SideBySide
    return isinstance(module, own | LengthEmbedding | LengthEncoding)


def _is_layer(module: nn.Module) -> bool:
    """Whether a module is replaced as a whole, or is one of ours."""
    if _is_own(module) or _is_named(module, "TensorProductScatter"):
        return True
    named = ("Linear", "SphericalHarmonics", "FullyConnectedNet", "Gate", "Activation")
    if _is_product(module) or any(_is_named(module, one, "e3nn.") for one in named):
        return True
    return _is_contraction(module) or _is_scalar_net(module) or _is_radial(module)


def _asks_for_fusion(block: nn.Module) -> bool:
    """Whether a block of MACE hands nodes and edges to its product where that has been fused."""
    code = getattr(type(block).forward, "__code__", None)
    return code is not None and "conv_fusion" in code.co_consts


def _is_script(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def _refuse_scripts(module: nn.Module) -> None:
    if _is_script(module):
        raise UnsupportedError(
            "the model is scripted, and nobody can look inside",
            expected="the model before torch.jit.script",
        )


# --- layers ---------------------------------------------------------------------------------------


class SquareProduct(TensorProduct):
    """The product of a vector with itself: e3nn's ``TensorSquare``."""

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, weight)


class MessageConv(TensorProductConv):
    """The convolution as blocks of MACE call it: weights before edges."""

    def forward(  # type: ignore[override]
        self, node_feats: Tensor, edge_attrs: Tensor, tp_weights: Tensor, edge_index: Tensor
    ) -> Tensor:
        return super().forward(node_feats, edge_attrs, edge_index, tp_weights)


class ScatteredProduct(nn.Module):
    """The convolution as NequIP calls it: sources and targets apart."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.tp = conv

    def forward(
        self, x: Tensor, edge_attr: Tensor, edge_weight: Tensor, edge_dst: Tensor, edge_src: Tensor
    ) -> Tensor:
        conv = self.tp
        assert isinstance(conv, TensorProductConv)
        return conv._between(x, edge_attr, (edge_src, edge_dst), edge_weight, x.shape[0])


class ScalarNet(nn.Module):
    """A network of scalars that holds the layers of another, with their names and parameters, and
    computes as `FullyConnectedNet` does.
    """

    def __init__(
        self, layers: dict[str, nn.Module], weights: list[Any], steps: list[NetStep]
    ) -> None:
        """``weights``: the modules whose weights they are, in their order."""
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._weights = tuple(tuple(name.split(".")) for name in _names_of(self, weights))
        self._steps = folded(steps)
        self._scaled: tuple[float | None, tuple[NetStep, ...]] = None, ()

    @classmethod
    def of(cls, old: Any) -> ScalarNet:
        layers = list(old.mlp if _is_named(old, "ScalarMLPFunction") else old)
        weights, steps = [], []
        for layer in layers:
            if _is_named(layer, "_Layer", "e3nn."):
                weights.append(layer)
                function = None if layer.act is None else _scaled(layer.act)
                steps.append(e3nn_step(layer.h_in, layer.var_in, layer.var_out, function))
            elif _is_named(layer, "ScalarLinearLayer", "nequip.") and not hasattr(
                layer, "parametrizations"
            ):
                weights.append(layer)
                steps.append(NetStep(float(layer.alpha)))
            else:
                steps[-1] = NetStep(steps[-1].scale, Scaled.of(layer))
        return cls(dict(old.named_children()), weights, steps).train(old.training)

    def forward(self, x: Tensor) -> Tensor:
        return through(x, self._matrices(), self._steps)

    def times(self, x: Tensor, factor: float) -> Tensor:
        """The same, multiplied with a number, which is one of the statements'."""
        if self._scaled[0] != factor:
            self._scaled = factor, times(self._steps, factor)
        return through(x, self._matrices(), self._scaled[1])

    def _matrices(self) -> list[Tensor]:
        modules = self._modules
        found = []
        for first, *rest in self._weights:
            part = modules[first]
            for name in rest:
                part = part._modules[name]  # type: ignore[union-attr]
            found.append(part.weight)  # type: ignore[union-attr]
        return found  # type: ignore[return-value]


class ScalarActivations(Gate):
    """Functions of scalars alone: e3nn's ``Activation``."""

    def forward(self, features: Tensor, dim: int = -1) -> Tensor:
        if dim in (-1, features.dim() - 1):
            return super().forward(features)
        return super().forward(features.movedim(dim, -1)).movedim(-1, dim)


class SideBySide(nn.Module):
    """MACE's ``reshape_irreps``: irreps of one multiplicity as (channels, components of all). They
    are split at once: gradients of slices would each be a whole tensor.
    """

    def __init__(self, irreps: object) -> None:
        super().__init__()
        self.irreps = Irreps.of(irreps)

    def forward(self, tensor: Tensor) -> Tensor:
        muls = {mul for mul, _ in self.irreps.terms}
        found = in_order(channel_order, self.irreps, tensor) if len(muls) == 1 else None
        if found is not None:
            return found.view(tensor.shape[0], *muls, -1)
        parts = torch.split(tensor, list(self.irreps.widths), 1)
        terms = zip(parts, self.irreps.terms)
        return torch.cat([p.reshape(p.shape[0], mul, ir.dim) for p, (mul, ir) in terms], -1)


class LengthEmbedding(nn.Module):
    """Bessel functions and cutoff as MACE calls them, with its buffers."""

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.bessel_fn, self.cutoff_fn, self.out_dim = old.bessel_fn, old.cutoff_fn, old.out_dim
        self._read: tuple[Any, str] = None, ""

    def statement(self) -> str:
        """With the numbers that the buffers hold; they are read again where they have changed."""
        held: Any = self.bessel_fn.prefactor, self.cutoff_fn.p, self.cutoff_fn.r_max
        key = [(id(one), one._version) for one in held]
        if self._read[0] != key:
            factor, power, cutoff = (float(one) for one in held)
            self._read = key, bessel(factor, power, cutoff)
        return self._read[1]

    def forward(
        self, edge_lengths: Tensor, node_attrs: Any, edge_index: Any, atomic_numbers: Any
    ) -> tuple[Tensor, None]:
        weights: Any = self.bessel_fn.bessel_weights
        return insum(self.statement(), X=edge_lengths.squeeze(-1), W=weights), None


class LengthEncoding(nn.Module):
    """Bessel functions and cutoff as NequIP calls them."""

    bessel_weights: Tensor

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.cutoff = old.cutoff
        self.fields = old.norm_length_field, old.edge_invariant_field
        self.dtype = old._output_dtype
        for kind, held in (("parameter", old._parameters), ("buffer", old._buffers)):
            for name, tensor in held.items():
                getattr(self, f"register_{kind}")(name, tensor)
        power = float(old.cutoff.p)
        self._ending = f"C[e] = {envelope(power, 1.0)}"
        self._statement = bessel(1 / math.pi, power, 1.0, math.pi)

    def forward(self, data: dict[str, Any]) -> dict[str, Any]:
        x = data[self.fields[0]].squeeze(-1)
        weights = self.bessel_weights.squeeze(0)
        data["edge_cutoff"] = insum(self._ending, X=x).unsqueeze(-1).to(self.dtype)
        data[self.fields[1]] = insum(self._statement, X=x, W=weights).to(self.dtype)
        return data


def _names_of(module: nn.Module, wanted: list[Any]) -> Iterator[str]:
    names = {id(one): name for name, one in module.named_modules()}
    for one in wanted:
        yield names[id(one)]


def _scaled(activation: Any) -> Scaled:
    """An activation of e3nn's, with the scale that it has."""
    if not hasattr(activation, "cst"):
        return Scaled.of(activation)
    found = Scaled.of(activation.f)
    return found if activation._is_id else replace(found, outer=float(activation.cst))


def _harmonics(old: Any) -> nn.Module:
    made = SphericalHarmonics(list(old._ls_list), bool(old.normalize), old.normalization)
    made.irreps_out, made.irreps_in = Irreps.of(old.irreps_out), Irreps.of(old.irreps_in)
    return made.train(old.training)


def _gate(old: Any) -> nn.Module:
    irreps = old.act_scalars.irreps_in, old.act_gates.irreps_in, old.irreps_gated
    functions = _functions(old.act_scalars), _functions(old.act_gates)
    return _of_sorted(old, Gate.with_functions(irreps, *functions))


def _activation(old: Any) -> nn.Module:
    irreps = old.irreps_in, "", ""
    return _of_sorted(old, ScalarActivations.with_functions(irreps, _functions(old), []))


def _functions(old: Any) -> list[Scaled | None]:
    return [None if act is None else _scaled(act) for act in old.acts]


def _of_sorted(old: Any, made: Gate) -> nn.Module:
    """The gate, where it takes irreps in the order of the other."""
    if str(made.irreps_in) != str(Irreps.of(old.irreps_in).simplified()):
        raise UnsupportedError(
            f"it takes {old.irreps_in}", expected=f"sorted irreps, {made.irreps_in}"
        )
    made.irreps_in, made.irreps_out = Irreps.of(old.irreps_in), Irreps.of(old.irreps_out)
    return made.train(old.training)


def _radial(module: Any) -> nn.Module | None:
    if not _is_radial(module):
        return None
    kind = LengthEmbedding if hasattr(module, "bessel_fn") else LengthEncoding
    return kind(module).train(module.training)


def _product(old: Any, kind: type[TensorProduct] | type[TensorProductConv]) -> nn.Module:
    """The normalisation is in the paths' weights already, of which the layer takes the root."""
    paths = [
        (p.i_in1, p.i_in2, p.i_out, p.connection_mode, p.has_weight, p.path_weight**2)
        for p in old.instructions
    ]
    new = kind(
        old.irreps_in1,
        old.irreps_in2,
        old.irreps_out,
        paths,
        irrep_normalization="none",
        path_normalization="none",
        internal_weights=bool(old.internal_weights),
        shared_weights=bool(old.shared_weights),
    )
    return _moved(old, new)


def _linear(old: Any) -> nn.Module:
    mixings = [one for one in old.instructions if one.i_in != -1]
    with_bias = {one.i_out for one in old.instructions if one.i_in == -1}
    lead = tuple(old.weight.shape[:-1]) if old.internal_weights and old.weight.dim() == 3 else ()
    new = Linear(
        old.irreps_in,
        old.irreps_out,
        f_in=lead[0] if lead else None,
        f_out=lead[1] if lead else None,
        internal_weights=bool(old.internal_weights),
        shared_weights=bool(old.shared_weights),
        instructions=[(one.i_in, one.i_out) for one in mixings],
        biases=[number in with_bias for number in range(len(old.irreps_out))],
    )
    new._scale([float(one.path_weight) for one in mixings])
    return _moved(old, new)


def _contraction(old: Any) -> nn.Module:
    single = tuple(ir for _, ir in Irreps.of(old.irreps_in))
    bases = []
    for part, (_, ir) in zip(old.contractions, Irreps.of(old.irreps_out), strict=True):
        powers = range(1, part.correlation + 1)
        bases.append([_basis(part, single, ir, power) for power in powers])
    first = old.contractions[0].weights_max
    new = SymmetricContraction.with_bases(old.irreps_in, old.irreps_out, first.shape[0], bases)
    for mine, theirs in zip(new.contractions, old.contractions, strict=True):
        mine.weights_max = theirs.weights_max
        mine.weights = theirs.weights
    return new.to(first.device, first.dtype).train(old.training)


def _basis(part: Any, single: Any, ir: Any, power: int) -> Tensor:
    """A basis as it is there; exact, where it is the one that we would have made."""
    there: Tensor = getattr(part, f"U_matrix_{power}").detach().cpu().double()
    there = there[None] if there.dim() == power + 1 else there
    exact = coupled(single, ir, power)
    if exact.shape == there.shape and torch.allclose(exact, there, atol=1e-5):
        return exact
    return torch.where(there.abs() < NOISE, 0, there)


def _moved(old: Any, new: nn.Module) -> nn.Module:
    """With the other's parameters, where it is."""
    new = new.to(old.output_mask.device, old.output_mask.dtype).train(old.training)
    for name, parameter in old.named_parameters(recurse=False):
        setattr(new, name, parameter)
    return new
