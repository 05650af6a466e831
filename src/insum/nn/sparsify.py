"""Whole models: dense linear layers exchanged for sparse ones, with a report of what that is worth,
and models given the sparse layers that a saved state or a configuration describes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from insum.accepted import FLAG, SIZE, Accepted, takes
from insum.errors import BindingError, FormatError
from insum.formats import SparseFormat, SparseParameter
from insum.formats.explained import predicted
from insum.formats.module import (
    ArraySizes,
    FormatLayout,
    checked_layout,
    decoded,
    sizes_of,
    vacant,
)
from insum.nn.linear import BlockSparseLinear, SparseLinear
from insum.notebook import table
from insum.plan import cost
from insum.runtime.search import progress_bar

#: What a rule says of a layer: nothing, a density, a mask, "zeros", or options of ``from_dense``.
Wish: TypeAlias = float | str | Tensor | Mapping[str, Any] | None
#: One wish for all layers, wishes by patterns of names, or a function of name and layer.
Rule: TypeAlias = float | str | Mapping[str, Wish] | Callable[[str, nn.Linear], Wish]

MODEL = Accepted("a torch.nn.Module", lambda v: isinstance(v, nn.Module))


def _is_rule(value: object) -> bool:
    if isinstance(value, nn.Module):  # can be called, with anything
        return False
    if callable(value):
        try:
            return bool(inspect.signature(value).bind("name", "layer"))
        except (TypeError, ValueError):
            return False
    return isinstance(value, str | int | float | Mapping) and not isinstance(value, bool)


RULE = Accepted(
    'a density, "zeros", a mapping from names, or a function of name and layer', _is_rule
)


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One linear layer of a model: what became of it, and what the model of a GPU predicts.

    Attributes:
        name: The name of the layer in the model.
        shape: (out_features, in_features).
        swapped: Whether it is sparse now.
        why: Why it is not.
        density: The share of weights that is stored.
        dense_us: Predicted microseconds of the dense layer.
        sparse_us: Those of the sparse one.
        dense_bytes: What the dense weight takes.
        sparse_bytes: What the sparse one takes.

    Examples:
        >>> model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 8))
        >>> first, second = sparsify(model, {"0": 0.05}, block_shape=(32, 32), rows=64).layers
        >>> first.name, first.shape, first.swapped, second.swapped
        ('0', (256, 256), True, False)
    """

    name: str
    shape: tuple[int, int]
    swapped: bool
    why: str = ""
    density: float = 1.0
    dense_us: float = math.nan
    sparse_us: float = math.nan
    dense_bytes: int = 0
    sparse_bytes: int = 0

    @property
    def speedup(self) -> float:
        """Predicted time of the dense layer over that of the sparse one."""
        return self.dense_us / self.sparse_us if self.sparse_us else math.nan

    @property
    def pays(self) -> bool:
        """Whether the sparse layer is predicted to be faster."""
        return self.speedup > 1


@dataclass(frozen=True, repr=False)
class SparsityReport:
    """What `sparsify` did, layer by layer, with predicted times; prints as a table.

    Attributes:
        layers: One report for each linear layer.
        rows: For how many rows of input times are predicted.
        device: And on what.

    Examples:
        >>> report = sparsify(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), 0.1, rows=32)
        >>> [(layer.name, layer.swapped) for layer in report.layers]
        [('0', True)]
    """

    layers: tuple[LayerReport, ...]
    rows: int
    device: str

    @property
    def swapped(self) -> tuple[LayerReport, ...]:
        """The layers that are sparse now."""
        return tuple(layer for layer in self.layers if layer.swapped)

    def __str__(self) -> str:
        cells = [_HEAD, *map(_cells, self.layers)]
        widths = [max(len(row[k]) for row in cells) for k in range(len(_HEAD))]
        lines = [
            "  ".join(c.ljust(w) if k in _LEFT else c.rjust(w) for k, (c, w) in enumerate(pairs))
            for pairs in (list(zip(row, widths)) for row in cells)
        ]
        return "\n".join([*(line.rstrip() for line in lines), self._summary()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return table(_HEAD, map(_cells, self.layers), self._summary())

    def _summary(self) -> str:
        done = self.swapped
        slower = [layer.name for layer in done if layer.speedup < 1]
        text = (
            f"{len(done)} of {len(self.layers)} layers are sparse; times are predicted for "
            f"{self.rows:,} rows on {self.device}"
        )
        named = ", ".join(slower[:3]) + (f" and {len(slower) - 3} more" if slower[3:] else "")
        return text + (f"; dense is faster for {named}" if slower else "")


_HEAD = ("layer", "shape", "kept", "dense µs", "sparse µs", "speedup", "bytes", "")
_LEFT = (0, 1, 7)


def _cells(layer: LayerReport) -> tuple[str, ...]:
    shape = "x".join(map(str, layer.shape))
    if math.isnan(layer.dense_us):
        return layer.name, shape, "", "", "", "", "", layer.why
    times = f"{layer.dense_us:.1f}", f"{layer.sparse_us:.1f}", f"{layer.speedup:.2f}"
    kept, share = f"{layer.density:.1%}", layer.sparse_bytes / max(layer.dense_bytes, 1)
    note = layer.why or ("" if layer.pays else "dense is faster")
    return layer.name, shape, kept, *times, f"{share:.0%}", note


@takes(model=MODEL, rule=RULE, rows=SIZE, only_where_faster=FLAG)
def sparsify(
    model: nn.Module,
    rule: Rule,
    *,
    block_shape: int | tuple[int, ...] | None = None,
    rows: int = 4096,
    only_where_faster: bool = False,
) -> SparsityReport:
    """Exchange the linear layers of a model for sparse ones, in place.

    Every `torch.nn.Linear` is looked at but those whose weight is used elsewhere too (tied
    embeddings) and subclasses, whose weight other code may use. All new layers are made before the
    first is exchanged.

    Args:
        model: Any module with linear layers inside.
        rule: What is kept. A number is the density for every layer, the largest weights;
            ``"zeros"`` keeps what is not zero, in a model that is pruned already. A mapping has
            such wishes by patterns of names (``{"layers.*.mlp.*": 0.1}``, the first that fits; the
            others are left), a function is called with name and layer. Of one layer, ``None``
            leaves it as it is, a tensor is a mask, a mapping holds options of
            `SparseLinear.from_dense`.
        block_shape: Blocks of this shape, which Tensor Cores multiply, instead of single weights.
        rows: For how many rows of input times are predicted.
        only_where_faster: Leave layers whose dense form is predicted to be faster.

    Returns:
        A table of all linear layers with predicted times, dense beside sparse. They are the cost
        model's for the GPU that is there, or for an H200; measure what you rely on.

    Raises:
        BindingError: A pattern of names fits no layer, or the model is itself a linear layer.
        FormatError: A density, mask or block shape that cannot be.

    Examples:
        >>> model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))
        >>> report = sparsify(model, {"0": 0.05}, block_shape=(32, 32), rows=64)
        >>> type(model[0]).__name__, type(model[2]).__name__
        ('BlockSparseLinear', 'Linear')
        >>> report.layers[1].why
        'the rule leaves it'
    """
    if isinstance(model, nn.Linear):
        raise BindingError(
            "the model is itself a linear layer, which cannot be exchanged inside of it",
            remedy="SparseLinear.from_dense(layer, density=0.1)",
        )
    wish_of = _wishes(rule, [name for name, _ in _linears(model)])
    users, made, reports = _uses(model), dict[str, SparseLinear](), []
    with progress_bar("insum.nn.sparsify") as tick:
        tick(sum(1 for _ in _linears(model)))
        for name, layer in _linears(model):
            kept_dense = _unfit(layer, users)
            wish = None if kept_dense else wish_of(name, layer)
            if wish is None:
                report = _left(name, layer, kept_dense or "the rule leaves it")
            else:
                sparse = _sparse(layer, wish, block_shape)
                report = _compared(name, layer, sparse, rows)
                if only_where_faster and not report.pays:
                    report = _slower(report)
                else:
                    made[name] = sparse
            reports.append(report)
            tick(0)
    _exchange(model, made)
    where = next((p.device for p in model.parameters()), torch.device("cpu"))
    return SparsityReport(tuple(reports), rows, cost.device_of(where).name)


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            yield name, layer


def _uses(model: nn.Module) -> dict[int, int]:
    """How many modules hold each parameter."""
    count: dict[int, int] = {}
    for module in model.modules():
        for held in module.parameters(recurse=False):
            count[id(held)] = count.get(id(held), 0) + 1
    return count


def _unfit(layer: nn.Linear, users: Mapping[int, int]) -> str:
    if type(layer) is not nn.Linear:
        return f"a {type(layer).__name__}, whose weight other code may use"
    if users.get(id(layer.weight), 0) > 1:
        return "its weight is used elsewhere too"
    return ""


def _wishes(rule: Rule, names: list[str]) -> Callable[[str, nn.Linear], Wish]:
    if callable(rule):
        return rule
    if not isinstance(rule, Mapping):
        return lambda name, layer: rule
    for pattern in rule:
        if not any(fnmatchcase(name, str(pattern)) for name in names):
            raise BindingError(
                f"no linear layer has a name like {pattern!r}",
                expected=f"names such as {', '.join(names[:4])}",
            )
    return lambda name, layer: next(
        (wish for pattern, wish in rule.items() if fnmatchcase(name, str(pattern))), None
    )


def _sparse(
    layer: nn.Linear, wish: Wish, block_shape: int | tuple[int, ...] | None
) -> SparseLinear:
    options: dict[str, Any] = {} if block_shape is None else {"block_shape": block_shape}
    match wish:
        case Mapping():
            options |= wish
        case Tensor():
            options["mask"] = wish
        case "zeros":
            pass
        case int() | float():
            options["density"] = wish
        case _:
            raise FormatError(
                f"the rule says {wish!r} of a layer",
                expected='a density, a mask, "zeros", options of from_dense, or None',
            )
    kind = BlockSparseLinear if "block_shape" in options else SparseLinear
    made = kind.from_dense(layer, **options)
    if made.weight.values is not None:
        made.weight.values.requires_grad_(layer.weight.requires_grad)
    if made.bias is not None:
        made.bias.requires_grad_(layer.bias.requires_grad)
    return made.train(layer.training)


def _exchange(model: nn.Module, made: Mapping[str, nn.Module]) -> None:
    """By identity: a layer that stands in several places is exchanged in all of them."""
    new = {id(model.get_submodule(name)): layer for name, layer in made.items()}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in new:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, new[id(module)])


# --- what it is worth ---


def _left(name: str, layer: nn.Linear, why: str) -> LayerReport:
    return LayerReport(name, (layer.out_features, layer.in_features), False, why)


def _slower(report: LayerReport) -> LayerReport:
    times = report.dense_us, report.sparse_us, report.dense_bytes, report.sparse_bytes
    why = "left: dense is faster"
    return LayerReport(report.name, report.shape, False, why, report.density, *times)


def _compared(name: str, layer: nn.Linear, sparse: SparseLinear, rows: int) -> LayerReport:
    weight, shape = sparse.weight().detach(), (layer.out_features, layer.in_features)
    x = torch.empty(rows, shape[1], dtype=layer.weight.dtype, device=layer.weight.device)
    return LayerReport(
        name,
        shape,
        True,
        density=_kept(weight) / max(1, math.prod(shape)),
        dense_us=dense_microseconds(shape, rows, x.dtype, x.device),
        sparse_us=predicted("Y[i,o] = W[o,k] * X[i,k]", W=weight, X=x),
        dense_bytes=layer.weight.numel() * layer.weight.element_size(),
        sparse_bytes=weight.nbytes,
    )


def _kept(weight: SparseFormat) -> int:
    """Weights that are stored, those of a block that are zero too."""
    return weight.entries().count * math.prod(weight.block_shape_or_none or ())


def dense_microseconds(
    shape: tuple[int, int], rows: int, dtype: torch.dtype, device: torch.device
) -> float:
    """What a matrix product takes by the model: its arithmetic, or its bytes, and a launch.

    >>> dense_microseconds((4096, 4096), 4096, torch.float16, torch.device("cpu")) > 100
    True
    """
    gpu = cost.device_of(device)
    tf32 = torch.get_float32_matmul_precision() != "highest"
    rate = {2: gpu.half, 4: gpu.tf32 if tf32 else gpu.single}.get(dtype.itemsize, gpu.double)
    flops, numbers = 2 * rows * math.prod(shape), math.prod(shape) + rows * sum(shape)
    return gpu.launch + max(flops / rate, numbers * dtype.itemsize / gpu.hbm) / 1e6


# --- models that are made to take a state ---

DESCRIPTION = Accepted(
    "a state dict, or what insum.nn.layouts returned", lambda v: isinstance(v, Mapping)
)


@takes(model=MODEL)
def layouts(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What the sparse tensors of a model are, in numbers and strings: to be kept in a configuration
    and handed to `restore`.

    Args:
        model: A module with `SparseLinear` layers, or with `insum.formats.SparseParameter` of
            any kind, inside.

    Returns:
        By the name of each sparse tensor its format, shape and blocks, and the size of each array.
        It can be written as JSON.

    Examples:
        >>> model = nn.Sequential(nn.Linear(8, 4))
        >>> _ = sparsify(model, 0.25)
        >>> layouts(model)["0.weight"]["format"]
        'GroupCOO'
    """
    return {
        name: {**held.layout, "arrays": sizes_of(held.arrays())}
        for name, held in model.named_modules()
        if isinstance(held, SparseParameter)
    }


@takes(model=MODEL, description=DESCRIPTION)
def restore(model: nn.Module, description: Mapping[str, Any]) -> nn.Module:
    """Give a model the sparse layers that a saved state has, so that the state can be loaded.

    Where the state holds a sparse weight, a `torch.nn.Linear` of that name is exchanged for a
    `SparseLinear`, and a sparse tensor of another layout for one of the saved layout. The arrays
    are empty: they are of use once ``load_state_dict`` has filled them, and looked at then.

    Args:
        model: The model as its class makes it; it may be on the meta device.
        description: A state dict, or what `layouts` returned.

    Returns:
        The model.

    Raises:
        FormatError: A layout cannot be read, or fits nothing in the model. Nothing is changed.

    Examples:
        >>> saved = nn.Sequential(nn.Linear(8, 4))
        >>> _ = sparsify(saved, 0.25)
        >>> fresh = restore(nn.Sequential(nn.Linear(8, 4)), saved.state_dict())
        >>> fresh.load_state_dict(saved.state_dict())
        <All keys matched successfully>
    """
    _exchange(model, dict(_vacant(model, *one) for one in _described(description)))
    return model


def _described(description: Mapping[str, Any]) -> Iterator[tuple[str, FormatLayout, ArraySizes]]:
    """Name, layout and sizes of each sparse tensor of a state, or of what `layouts` returned."""
    ends = ".encoding"
    states = [str(name).removesuffix(ends) for name in description if str(name).endswith(ends)]
    for name in states:
        arrays = {
            str(key).removeprefix(name + "."): held
            for key, held in description.items()
            if str(key).startswith(name + ".") and key != name + ends
        }
        yield name, decoded(description[name + ends]), sizes_of(arrays)
    if states or any(isinstance(held, Tensor) for held in description.values()):
        return
    for name, found in description.items():
        if not isinstance(found, Mapping) or not isinstance(found.get("arrays"), Mapping):
            raise FormatError(
                f"the description of {name!r} has no arrays",
                expected="a state dict, or what insum.nn.layouts returned",
            )
        layout = checked_layout({k: v for k, v in found.items() if k != "arrays"})
        yield name, layout, found["arrays"]


def _vacant(
    model: nn.Module, name: str, layout: FormatLayout, sizes: ArraySizes
) -> tuple[str, nn.Module]:
    """The name of what is exchanged, and what it is exchanged for."""
    owner, _, last = name.rpartition(".")
    held = _module_at(model, name)
    if isinstance(held, SparseParameter):
        _same_shape(name, tuple(held.shape), layout)
        return name, SparseParameter(vacant(layout, sizes, held.dtype, held.device))
    layer = _module_at(model, owner) if owner and last == "weight" else None
    if not isinstance(layer, nn.Linear):
        raise FormatError(
            f"the saved state has a sparse tensor {name!r}, and the model nothing to hold it",
            expected="a linear layer or a sparse tensor of that name",
        )
    _same_shape(name, (layer.out_features, layer.in_features), layout)
    weight = vacant(layout, sizes, layer.weight.dtype, layer.weight.device)
    kind = SparseLinear if weight.block_shape_or_none is None else BlockSparseLinear
    return owner, kind(weight, layer.bias).train(layer.training)


def _module_at(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _same_shape(name: str, shape: tuple[int, ...], layout: FormatLayout) -> None:
    if layout["shape"] != shape:
        raise FormatError(
            f"the saved {name!r} has shape {layout['shape']}", expected=f"{shape}, as the model has"
        )
