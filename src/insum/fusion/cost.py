"""Whether a chain is worth fusing."""

from __future__ import annotations

import torch
from torch.fx import Node

from insum.fusion.origin import is_unknown, origin_of
from insum.fusion.pointwise import SPELL
from insum.fusion.roots import SCATTERS, Chain, least_scatter
from insum.fusion.shapes import points, shape_of, value_of
from insum.settings import settings

aten = torch.ops.aten
#: What Inductor computes by itself, between kernels: what is gathered for it and what is scattered
#: of it is written to memory.
_MATRIX_PRODUCTS = {aten.mm.default, aten.bmm.default, aten.mv.default}
#: Elements of messages below which a kernel saves less time than calling it takes, where the device
#: waits for the call.
WORTH_A_CALL = 2**28


def _has_product(chain: Chain) -> bool:
    return bool(_MATRIX_PRODUCTS & {n.target for n in (chain.root, *chain.inlined)})


def _is_one_kernel(chain: Chain) -> bool:
    """Whether Inductor makes one kernel of a chain, too: it has none for a largest value, and one
    between two others for a matrix product; and what is computed of the edges, it computes at each
    call.
    """
    if chain.statement.operator != "=" or _has_product(chain):
        return False
    functions = any(n.target in SPELL for n in chain.inlined)
    return functions or all(t.base.op == "placeholder" for t in chain.indices)


def _counted(chain: Chain, waited: frozenset[Node]) -> int:
    """About how many elements the messages have, where their number is found out at each call in
    any case and they are few; else 0.
    """
    if _has_product(chain):
        return 0
    made = [t.base for t in chain.indices if t.base in waited]
    origins = [origin for base in made if (origin := origin_of(base)) is not None]
    if not origins:
        return 0
    entries = max(min(points(shape_of(source)) for source in origin.sources) for origin in origins)
    columns = max(1, points(shape_of(chain.root)[1:]))
    return entries * columns if entries * columns < WORTH_A_CALL else 0


def _changes(index: Node) -> bool:
    """Whether the size of an index tensor, or of what it is computed from, is a symbol: it is
    another from call to call.
    """
    if index.op == "placeholder":
        return any(not isinstance(size, int) for size in shape_of(index))
    origin = origin_of(index)
    return origin is not None and any(map(_changes, origin.sources))


def objection(
    chain: Chain, wish: str = "", captured: bool = False, waited: frozenset[Node] = frozenset()
) -> str:
    """Why a chain had better stay as it is, or ''. ``captured``: as in `insum.fusion.fuse`;
    ``waited``: index tensors that are counted out at each call.
    """
    wish = wish or settings.fuse
    if wish == "always":
        return ""
    if wish == "never":
        return "settings.fuse is 'never'"
    device = value_of(chain.root).device.type
    if device != "cuda":
        return (
            f"on {device} a fused statement runs as the same torch operations "
            "(settings.fuse = 'always' fuses it nevertheless)"
        )
    if any(is_unknown(t.base, captured) for t in chain.indices) and not _has_product(chain):
        return "nothing is known of the index, and Inductor makes one kernel of it too"
    if any(_changes(t.base) for t in chain.indices) and not _has_product(chain):
        return (
            "the number of its points is another from call to call, as in mini-batches, and "
            "Inductor makes one kernel of it too"
        )
    if elements := _counted(chain, waited):
        return (
            f"its index is counted out at each call, for others too; about {elements:,} "
            "elements do not make up for a longer call"
        )
    largest = max(chain.scattered, *(points(shape_of(n)) for n in chain.inlined))
    if _is_one_kernel(chain) and largest < least_scatter(chain.root):
        return (
            f"Inductor makes one kernel of it too, and its {largest:,} elements do not make up "
            "for a longer call"
        )
    result = points(shape_of(chain.root))
    if chain.root.target not in SCATTERS and chain.saved < result:
        return f"its result has {result:,} elements, and fusing would save only {chain.saved:,}"
    return ""
