"""Whether a chain is worth fusing."""

from __future__ import annotations

from insum.fusion.chains import SCATTERS, Chain
from insum.fusion.shapes import points, shape_of, value_of
from insum.settings import settings


def objection(chain: Chain, wish: str = "") -> str:
    """Why a chain had better stay as it is, or ''."""
    wish = wish or settings.fuse
    if wish == "always":
        return ""
    if wish == "never":
        return "settings.fuse is 'never'"
    device = value_of(chain.root).device.type
    if device != "cuda":
        return f"on {device} a fused statement runs as the same torch operations (settings.fuse = 'always' fuses it nevertheless)"
    result = points(shape_of(chain.root))
    if chain.root.target not in SCATTERS and chain.saved < result:
        return f"its result has {result:,} elements, and fusing would save only {chain.saved:,}"
    return ""
