"""Sparse tensors put together: their channels, their batches, the samples of a loader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from insum.accepted import Accepted, shown, takes
from insum.errors import BindingError
from insum.nn.checks import one_device
from insum.nn.sparse_tensor import VOXELS, SparseTensor, same_voxels
from insum.nn.voxels import Voxels

SPARSE_TENSORS = Accepted(
    "at least one SparseTensor, in a tuple or a list",
    lambda v: isinstance(v, tuple | list) and len(v) > 0 and all(map(VOXELS.fits, v)),
)
SAMPLES = Accepted(
    "at least one sample, in a tuple or a list",
    lambda v: isinstance(v, tuple | list) and len(v) > 0,
)


@takes(tensors=SPARSE_TENSORS)
def cat(tensors: Sequence[SparseTensor]) -> SparseTensor:
    """The channels of tensors at the same voxels, one behind the other: a skip connection.

    Args:
        tensors: Tensors at the same voxels.

    Returns:
        One tensor with all their channels.

    Examples:
        >>> x = SparseTensor(torch.tensor([[0, 0, 0]]), torch.ones(1, 2))
        >>> cat([x, x + 1]).features
        tensor([[1., 1., 2., 2.]])
    """
    first = tensors[0]
    for other in tensors[1:]:
        same_voxels(first, other)
    one_device(**{f"tensors[{n}]": one.features for n, one in enumerate(tensors)})
    return first.with_features(torch.cat([one.features for one in tensors], 1))


@takes(tensors=SPARSE_TENSORS)
def batch(tensors: Sequence[SparseTensor]) -> SparseTensor:
    """Several clouds as one tensor, each in batches of its own; `SparseTensor.unbatch` undoes it.

    Args:
        tensors: Clouds of one number of dimensions and channels.

    Returns:
        One tensor with all their voxels.

    Examples:
        >>> one = SparseTensor(torch.tensor([[0, 0, 0], [0, 0, 1]]), torch.ones(2, 4))
        >>> batch([one, one]).coords[:, 0]
        tensor([0, 0, 1, 1])
    """
    first = tensors[0]
    for number, one in enumerate(tensors):
        theirs = one.spatial_shape, one.ndim, one.features.shape[1]
        if theirs != (first.spatial_shape, first.ndim, first.features.shape[1]):
            raise BindingError(
                f"tensors[{number}] is {one}, but tensors[0] is {first}",
                expected="one number of dimensions and of channels, and one spatial shape",
            )
    one_device(**{f"tensors[{n}]": one.features for n, one in enumerate(tensors)})
    before, parts = 0, []
    for one in tensors:
        coords = one.coords.clone()
        coords[:, 0] += before
        parts.append(coords)
        before += one.batch_size
    voxels = Voxels(torch.cat(parts), first.spatial_shape)
    voxels.__dict__["batch_size"] = before
    return SparseTensor(
        voxels.coords, torch.cat([one.features for one in tensors]), first.spatial_shape, voxels
    )


@takes(samples=SAMPLES)
def collate(samples: Sequence[Any]) -> Any:
    """The ``collate_fn`` of a DataLoader: clouds become one batch, all else is PyTorch's way.

    A sample is a `SparseTensor`, or a tuple, list or dict that holds some, or others that do. A
    tensor with as many rows as the cloud beside it has voxels, such as labels, is joined along its
    rows.

    Args:
        samples: What a dataset gives, as many as a batch has.

    Returns:
        One sample of the same form, with clouds of several batches.

    Examples:
        >>> x = SparseTensor(torch.tensor([[0, 0, 0], [0, 0, 1]]), torch.ones(2, 4))
        >>> samples = [(x, torch.tensor([3, 4]), 7), (x, torch.tensor([5, 6]), 8)]
        >>> clouds, labels, kinds = collate(samples)
        >>> clouds.voxels.count, labels, kinds
        (4, tensor([3, 4, 5, 6]), tensor([7, 8]))
    """
    try:
        return _collated(samples, [None] * len(samples))
    except (TypeError, ValueError, KeyError, RuntimeError) as wrong:
        raise BindingError(
            f"samples such as {shown(samples[0])} cannot be joined: {wrong}",
            expected="samples of one form, of tensors and what PyTorch's default_collate takes",
        ) from wrong


def _collated(samples: Sequence[Any], counts: Sequence[int | None]) -> Any:
    """Samples joined; ``counts``: the voxels of the cloud that stands beside each, if one does."""
    first = samples[0]
    match first:
        case SparseTensor():
            return batch(samples)
        case Mapping():
            names = list(first)
            return dict(zip(names, _columns([[s[n] for n in names] for s in samples], counts)))
        case tuple() | list():
            columns = _columns(samples, counts)
            return type(first)(columns) if type(first) in (tuple, list) else tuple(columns)
    rows = [s.shape[0] if isinstance(s, Tensor) and s.dim() else -1 for s in samples]
    if rows == list(counts):
        return torch.cat(list(samples))
    return torch.utils.data.default_collate(list(samples))


def _columns(samples: Sequence[Sequence[Any]], around: Sequence[int | None]) -> list[Any]:
    counts = [
        next((value.voxels.count for value in sample if VOXELS.fits(value)), count)
        for sample, count in zip(samples, around)
    ]
    return [_collated(column, counts) for column in zip(*samples, strict=True)]
