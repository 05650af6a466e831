"""What calls want to know of index tensors that come back: one launch instead of a dozen torch
operations and a sort.
"""

from __future__ import annotations

import torch
from torch import Tensor

from insum.compat.tensors import empty
from insum.facts import UNORDERED, numbers_of
from insum.runtime.handwritten.kernel import BLOCK, Handwritten, on_device

#: Programs that share the values of a tensor: what each has found goes to the host.
MOST_PARTS = 1024

_LOOK = Handwritten(
    "insum_look",
    f"""@triton.jit
def insum_look(values_ptr, found_ptr, count: "i64", share: "i64"):
    pid = tl.program_id(0).to(tl.int64)
    first = pid * share
    last = tl.minimum(first + share, count)
    low = tl.zeros([{BLOCK}], tl.int64) + tl.load(values_ptr + first).to(tl.int64)
    high = low
    ordered = tl.full([{BLOCK}], 1, tl.int64)
    strictly = tl.full([{BLOCK}], 1, tl.int64)
    for start in range(first, last, {BLOCK}):
        at = start + tl.arange(0, {BLOCK})
        there = at < last
        followed = there & (at + 1 < count)
        value = tl.load(values_ptr + at, mask=there, other=0).to(tl.int64)
        after = tl.load(values_ptr + at + 1, mask=followed, other=0).to(tl.int64)
        low = tl.where(there, tl.minimum(low, value), low)
        high = tl.where(there, tl.maximum(high, value), high)
        ordered = tl.where(followed & (after < value), 0, ordered)
        strictly = tl.where(followed & (after <= value), 0, strictly)
    tl.store(found_ptr + 4 * pid, tl.min(low, 0))
    tl.store(found_ptr + 4 * pid + 1, tl.max(high, 0))
    tl.store(found_ptr + 4 * pid + 2, tl.min(ordered, 0))
    tl.store(found_ptr + 4 * pid + 3, tl.min(strictly, 0))
""",
)


def looked_at(tensor: Tensor) -> Tensor:
    """Of parts of a tensor, behind each other: low, high, whether it is sorted, and whether every
    value is greater than the one before; where these kernels cannot run, as `facts.numbers_of`.
    """
    flat = tensor.detach().reshape(-1)
    if not on_device(flat):
        return numbers_of(tensor)
    flat = flat.long() if flat.dtype in UNORDERED else flat.contiguous()
    count = flat.numel()
    share = BLOCK * -(-count // (BLOCK * MOST_PARTS))
    parts = -(-count // share)
    found = empty((4 * parts,), torch.int64, flat.device)
    _LOOK(parts, flat, found, count, share)
    return found
