"""Whether a chain is worth fusing."""

from __future__ import annotations

import torch

from insum.fusion.chains import SCATTERS, Chain
from insum.fusion.origin import is_unknown
from insum.fusion.shapes import points, shape_of, value_of
from insum.settings import settings

aten = torch.ops.aten
#: What Inductor computes by itself, between kernels: what is gathered for it and what is scattered of it is written to memory.
_MATRIX_PRODUCTS = {aten.mm.default, aten.bmm.default, aten.mv.default}


def objection(chain: Chain, wish: str = "", captured: bool = False) -> str:
    """Why a chain had better stay as it is, or ''. ``captured``: as in `insum.fusion.fuse`."""
    wish = wish or settings.fuse
    if wish == "always":
        return ""
    if wish == "never":
        return "settings.fuse is 'never'"
    device = value_of(chain.root).device.type
    if device != "cuda":
        return f"on {device} a fused statement runs as the same torch operations (settings.fuse = 'always' fuses it nevertheless)"
    if any(is_unknown(t.base, captured) for t in chain.indices) and not _MATRIX_PRODUCTS & {n.target for n in (chain.root, *chain.inlined)}:
        return "nothing is known of the index, and Inductor makes one kernel of it too"
    result = points(shape_of(chain.root))
    if chain.root.target not in SCATTERS and chain.saved < result:
        return f"its result has {result:,} elements, and fusing would save only {chain.saved:,}"
    return ""
