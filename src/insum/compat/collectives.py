"""Names of `torch.distributed` that are not public: the store of the processes, names of groups,
and collectives as operators that a compiler can trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def default_store() -> Any:
    """The store that all processes share."""
    return dist.distributed_c10d._get_default_store()


def group_name(group: dist.ProcessGroup) -> str:
    """The name by which operators know a group."""
    return str(group.group_name)


def begin_all_to_all(x: Tensor, take: Sequence[int], give: Sequence[int], group: str) -> Tensor:
    """Rows on their way; to be looked at after `finish`."""
    found: Tensor = torch.ops._c10d_functional.all_to_all_single(x, list(take), list(give), group)
    return found


def finish(x: Tensor) -> Tensor:
    """The same once it is there."""
    found: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return found
