"""What all layers over voxels share, and a chain of them."""

from __future__ import annotations

from abc import ABCMeta
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, TypeAlias

from torch import Tensor, nn

from insum.accepted import is_size, shown
from insum.errors import BindingError, DtypeError
from insum.nn.kernel_map import Geometry
from insum.nn.sparse_tensor import SparseTensor
from insum.nn.voxels import Sizes, axes_of

SizePerAxis = int | Sequence[int]
#: A module of a chain, and whether it takes a `SparseTensor` or features.
ChainStep: TypeAlias = tuple[nn.Module, bool]


class SparseModule(nn.Module, metaclass=ABCMeta):
    """A module that takes a `SparseTensor`, as all layers over voxels are. Derive from it where a
    module of your own is to get one inside of a `SparseSequential`, though it has no such layer in
    it.

    Examples:
        >>> import torch
        >>> class Count(SparseModule):
        ...     def forward(self, x: SparseTensor) -> SparseTensor:
        ...         return x.with_features(torch.ones(x.features.shape[0], 1))
        >>> SparseSequential(Count())(SparseTensor(torch.tensor([[0, 0, 0]]), torch.randn(1, 4)))
        SparseTensor(voxels=1, channels=1, float32, spatial_shape=None, cpu)
    """

    # There is nothing to inherit: layers that are bases themselves register instead.


class SparseSequential(nn.Sequential):
    """Modules one after the other, on a `SparseTensor`: layers over voxels, and modules that have
    such layers inside, take it whole; all others (norms, activations, dropout, linear layers) take
    its features, one row for each voxel. What a `GlobalPool` makes is a tensor, which modules
    behind it take as it is.

    Args:
        modules: One after the other, or an ordered dictionary of them, as `torch.nn.Sequential`
            takes them. Whether a module has layers over voxels inside is looked for when it is put
            in.

    Examples:
        >>> import torch
        >>> from insum.nn import SparseConv3d
        >>> block = SparseSequential(
        ...     SparseConv3d(4, 8, 3, submanifold=True, bias=False), nn.BatchNorm1d(8), nn.ReLU()
        ... )
        >>> block(SparseTensor(torch.tensor([[0, 0, 0], [0, 0, 1]]), torch.randn(2, 4)))
        SparseTensor(voxels=2, channels=8, float32, spatial_shape=None, cpu)
    """

    _steps: tuple[ChainStep, ...] = ()  # which modules that were stored earlier lack

    def __init__(self, *modules: nn.Module | OrderedDict[str, nn.Module]) -> None:
        for module in modules:
            if not isinstance(module, nn.Module | OrderedDict):
                raise DtypeError(f"a step is {shown(module)}", expected="modules")
        super().__init__(*modules)  # type: ignore[arg-type]
        self._steps = _steps_of(self)

    def forward(self, x: SparseTensor) -> Any:
        if not isinstance(x, SparseTensor):
            raise DtypeError(f"x is {shown(x)}", expected="a SparseTensor")
        held: Any = x
        for module, whole in self._decided():
            if whole or not isinstance(held, SparseTensor):
                held = module(held)
            else:
                held = held.with_features(module(held.features))
        return held

    def _decided(self) -> tuple[ChainStep, ...]:
        """The modules, each with whether it takes a `SparseTensor`: looked for when it comes here,
        not in every pass.
        """
        known = self._steps
        if len(known) != len(self) or any(m is not step[0] for m, step in zip(self, known)):
            self._steps = known = _steps_of(self)
        return known


def _steps_of(modules: Iterable[nn.Module]) -> tuple[ChainStep, ...]:
    return tuple((module, takes_voxels(module)) for module in modules)


def takes_voxels(module: nn.Module) -> bool:
    """Whether a module takes a `SparseTensor`: it is a layer over voxels, or has one inside."""
    kinds = (SparseModule, SparseSequential)
    return isinstance(module, kinds) or any(isinstance(one, kinds) for one in module.modules())


# --- arguments that all of them take ---


def per_axis(name: str, size: SizePerAxis, least: int, ndim: int) -> Sizes:
    """One number for each axis, of a number or of as many as there are axes."""
    sizes: tuple[Any, ...] = tuple(size) if isinstance(size, tuple | list) else (size,) * ndim
    if len(sizes) != ndim or not all(is_size(s, least) for s in sizes):
        raise BindingError(
            f"{name} is {size!r}",
            expected=f"an integer of at least {least}, or {ndim}: {axes_of(ndim)}",
        )
    return tuple(map(int, sizes))


def geometry_of(
    ndim: int,
    kernel_size: SizePerAxis,
    stride: SizePerAxis,
    padding: SizePerAxis,
    dilation: SizePerAxis,
    output_padding: SizePerAxis = 0,
    transposed: bool = False,
) -> Geometry:
    """The kernel that sizes as PyTorch takes them stand for."""
    return Geometry(
        per_axis("kernel_size", kernel_size, 1, ndim),
        per_axis("stride", stride, 1, ndim),
        per_axis("padding", padding, 0, ndim),
        per_axis("dilation", dilation, 1, ndim),
        per_axis("output_padding", output_padding, 0, ndim),
        transposed,
    )


def same_dimensions(ndim: int, layer: str, *given: SparseTensor | None) -> None:
    """A layer takes tensors of its own number of dimensions."""
    for x in given:
        if x is not None and x.ndim != ndim:
            _refuse_dimensions(x, ndim, layer)


def _refuse_dimensions(x: SparseTensor, ndim: int, layer: str) -> NoReturn:
    row: Tensor = x.coords[:1]
    first = f", coords[0] as batch, {axes_of(x.ndim)}: {tuple(row[0].tolist())}" if len(row) else ""
    raise BindingError(
        f"x has {x.ndim} dimension(s){first}; {layer} has {ndim}",
        expected=f"batch, {axes_of(ndim)}",
        remedy=f"SparseTensor(coords, features, ndim={ndim}), or {layer[:-2]}{x.ndim}d",
    )
