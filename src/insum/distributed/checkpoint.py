"""Partitions in checkpoints of `torch.distributed.checkpoint`: entries in even pieces, which any
number of ranks can read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from insum.accepted import Accepted, takes
from insum.distributed.agreement import gathered
from insum.distributed.assembling import assembled
from insum.distributed.cuts import Cuts, owners
from insum.distributed.division import MESH, PARTITION, PartitionSpec, UnitCuts, cuts_of, spec_of
from insum.distributed.partitioned import Partitioned
from insum.distributed.transfers import sent_to
from insum.errors import FormatError, RankError
from insum.formats import FORMATS
from insum.formats import entries as E

FOLDER = Accepted("a path", lambda v: isinstance(v, str | os.PathLike))
#: Key of what is no tensor.
ABOUT = "about"


@takes(A=PARTITION, folder=FOLDER)
def save(A: Partitioned, folder: str | os.PathLike[str]) -> None:
    """Write a partition to a folder that all ranks see, each rank its share of the entries.

    Args:
        A: The partition, on every rank.
        folder: Where `torch.distributed.checkpoint` writes.

    Raises:
        RankError: A rank failed, or could not write.

    Examples:
        >>> import torch
        >>> from insum.distributed import partition
        >>> from insum.formats import COO
        >>> A = partition(COO.from_dense(torch.eye(3)), mesh)
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(A, folder)
        ...     print(load(folder, mesh).shape)
        (3, 3)
    """
    from torch.distributed.checkpoint.state_dict_saver import save as save_state

    state = state_of(A)
    with _told("written"):
        save_state(state, checkpoint_id=folder, process_group=A.group)


@takes(folder=FOLDER, mesh=MESH)
def load(folder: str | os.PathLike[str], mesh: Any) -> Partitioned:
    """Read a partition, on as many ranks as the mesh has; on as many as wrote it the cuts are the
    same, else they are made anew.

    Args:
        folder: Where `save` wrote.
        mesh: One dimension of a device mesh.

    Returns:
        This rank's part.

    Raises:
        FormatError: There is no partition.
        RankError: A rank failed.

    Examples:
        >>> import torch
        >>> from insum.distributed import partition
        >>> from insum.formats import COO
        >>> A = partition(COO.from_dense(torch.eye(3)), mesh)
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(A, folder)
        ...     print(load(folder, mesh).own.values)
        tensor([1., 1., 1.])
    """
    from torch.distributed.checkpoint.state_dict_loader import load as load_state

    group = mesh.get_group()
    state: dict[str, Tensor] = {}
    gathered(group, lambda: state.update(_empty_state(Path(folder), mesh)))
    with _told("read"):
        load_state(state, checkpoint_id=folder, process_group=group)
    return restored(state, mesh)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """What goes wrong in a checkpoint, which every rank learns of, as an error of ours."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:
        cause = str(error).strip().splitlines()[-1:]
        raise RankError(f"a checkpoint could not be {what}: {''.join(cause)}") from error


def state_of(A: Partitioned) -> dict[str, Tensor]:
    """Tensors for a state dict: entries as DTensors that are cut evenly, and what they mean."""
    coordinates, values = A.coordinates()
    state = {f"coordinates.{dim}": _even(c, A) for dim, c in enumerate(coordinates)}
    if values is not None:
        state["values"] = _even(values.detach(), A)
    if A.order is not None:
        state["order"] = _even(A.order, A)
    spec = spec_of(A.own)
    options = {k: v for k, v in spec.options if k != "group_size"}
    about = {
        "kind": spec.kind,
        "options": options,
        "shape": A.shape,
        "row_cuts": A.row_cuts,
        "balance": A.balance,
        "send": A.send,
    }
    held = bytearray(json.dumps(about).encode())
    return {**state, ABOUT: torch.frombuffer(held, dtype=torch.uint8).to(A.device)}


def _even(rows: Tensor, A: Partitioned) -> Tensor:
    """Rows of all ranks one behind the other, cut evenly."""
    every = gathered(A.group, lambda: len(rows))
    start, total = sum(every[: A.rank]), sum(every)
    places = torch.arange(start, start + len(rows), device=rows.device)
    owner = owners(places, _even_cuts(total, len(every)))
    return _as_dtensor(
        sent_to(E.Entries((rows,), None, (total,)), owner, A.group).coords[0], total, A.mesh
    )


def _even_cuts(total: int, ranks: int) -> Cuts:
    """As `torch.chunk` cuts, and with it DTensor."""
    size = -(-total // ranks)
    return tuple(min(size * rank, total) for rank in range(ranks)) + (total,)


def _as_dtensor(rows: Tensor, total: int, mesh: Any) -> Tensor:
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size((total, *rows.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        rows.contiguous(), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
    )


def _empty_state(folder: Path, mesh: Any) -> dict[str, Tensor]:
    """Room for what a folder holds."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    try:
        found = FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception as error:
        raise FormatError(
            f"{folder.name} cannot be read: {error}", expected="a folder that save wrote"
        ) from error
    if ABOUT not in found or "coordinates.0" not in found:
        raise FormatError(f"{folder.name} holds no partition", expected="a folder that save wrote")
    return {name: _room(name, one, mesh) for name, one in found.items()}


def _room(name: str, found: Any, mesh: Any) -> Tensor:
    size, dtype, device = found.size, found.properties.dtype, mesh.device_type
    if name == ABOUT:
        return torch.empty(size, dtype=dtype, device=device)
    cuts, rank = _even_cuts(size[0], mesh.size()), mesh.get_local_rank()
    here = cuts[rank + 1] - cuts[rank]
    return _as_dtensor(torch.empty((here, *size[1:]), dtype=dtype, device=device), size[0], mesh)


def restored(state: dict[str, Tensor], mesh: Any) -> Partitioned:
    """A partition from the tensors of `state_of`, whatever mesh they were made on."""
    group = mesh.get_group()
    about = json.loads(bytes(state[ABOUT].cpu().tolist()).decode())
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in about["options"].items()}
    shape, ranks = tuple(about["shape"]), dist.get_world_size(group)
    spec = PartitionSpec(about["kind"], tuple(sorted(options.items())), shape)
    if spec.kind not in FORMATS:
        raise FormatError(f"there is no format {spec.kind!r}", expected=", ".join(FORMATS))
    local = {k: v.to_local() for k, v in state.items() if hasattr(v, "to_local")}
    coords = tuple(local[f"coordinates.{dim}"] for dim in range(len(shape)))
    entries = E.Entries(coords, local.get("values"), shape, (), options.get("block_shape"))
    cuts = cuts_of(coords[0], spec, about["balance"], ranks, group)
    if len(about["row_cuts"]) == ranks + 1:
        rows = tuple(about["row_cuts"])
        cuts = UnitCuts(rows, rows if spec.square else cuts.columns, cuts.block)
    held = sent_to(entries, owners(coords[0], cuts.row_units), group)
    order = _restored_order(local.get("order"), shape[0], cuts.rows, group)
    return assembled(held, spec, cuts, order, mesh, about["balance"], about["send"])


def _restored_order(
    order: Tensor | None, rows: int, cuts: Cuts, group: dist.ProcessGroup
) -> Tensor | None:
    if order is None:
        return None
    even = _even_cuts(rows, dist.get_world_size(group))
    start = even[dist.get_rank(group)]
    places = torch.arange(start, start + len(order), device=order.device)
    return sent_to(E.Entries((order,), None, (rows,)), owners(places, cuts), group).coords[0]
