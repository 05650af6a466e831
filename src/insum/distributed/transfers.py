"""Tensors and entries that change ranks, in collectives whose failures are errors of ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from insum.distributed.agreement import lost
from insum.distributed.cuts import Cuts, lengths
from insum.formats import entries as E


def carefully(collective: Callable[[], object]) -> None:
    try:
        collective()
    except RuntimeError as error:
        raise lost(error) from error


def summed(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = counts.clone()
    carefully(lambda: dist.all_reduce(total, group=group))
    return total


def swapped(pieces: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """A piece from every rank, for a piece to every rank; of any lengths."""
    mine = torch.tensor([len(piece) for piece in pieces], device=pieces[0].device)
    theirs = torch.empty_like(mine)
    carefully(lambda: dist.all_to_all_single(theirs, mine, group=group))
    take, given = theirs.tolist(), torch.cat(list(pieces)).contiguous()
    rows = given.new_empty((sum(take), *given.shape[1:]))
    carefully(lambda: dist.all_to_all_single(rows, given, take, mine.tolist(), group=group))
    return list(torch.split(rows, take))


def sent_to(entries: E.Entries, owner: Tensor, group: dist.ProcessGroup) -> E.Entries:
    """The entries of all ranks that belong to this one."""
    sorting = torch.argsort(owner, stable=True)
    counts = torch.bincount(owner, minlength=dist.get_world_size(group)).tolist()
    came = [
        torch.cat(swapped(torch.split(column[sorting], counts), group))
        for column in (*entries.coords, *(() if entries.values is None else (entries.values,)))
    ]
    rank = len(entries.coords)
    return replace(entries, coords=tuple(came[:rank]), values=came[rank] if came[rank:] else None)


def gathered_rows(x: Tensor, cuts: Cuts, group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks one behind the other."""
    sizes = lengths(cuts)
    padded = E.padded_to(x, (max(sizes), *x.shape[1:])).contiguous()
    every = [torch.empty_like(padded) for _ in sizes]
    carefully(lambda: dist.all_gather(every, padded, group=group))
    return torch.cat([one[:size] for one, size in zip(every, sizes)])
