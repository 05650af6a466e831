"""Programs in plain PyTorch, gathers, products and scatters, compiled into fused statements.

``torch.compile(model, backend="insum")`` compiles with Inductor after a pass that replaces each
chain of gather, product and scatter by one op; `enable` does the same for the default backend.
`report` tells what was fused, and what was left and why.

>>> import torch, insum.fusion
>>> def aggregate(x, w, src, dst):
...     return x.new_zeros(4, 3).index_add(0, dst, x[src] * w[:, None])
>>> x, w = torch.ones(4, 3), torch.ones(5)
>>> src, dst = torch.tensor([0, 1, 2, 3, 3]), torch.tensor([1, 1, 0, 2, 2])
>>> compiled = torch.compile(aggregate, backend="insum", options={"insum.rest": "eager"})
>>> insum.fusion.clear()
>>> with insum.settings(fuse="always"):
...     out = compiled(x, w, src, dst)
>>> len(insum.fusion.report().fused), out[:, 0].tolist()
(1, [1.0, 2.0, 2.0, 0.0])
"""

from __future__ import annotations

from insum.fusion.entry import backend, disable, enable, enabled, register
from insum.fusion.report import Failed, Fused, Left, MovedProduct, Once, Report, clear, report
from insum.fusion.rewrite import fuse

__all__ = [
    "Failed",
    "Fused",
    "Left",
    "MovedProduct",
    "Once",
    "Report",
    "backend",
    "clear",
    "disable",
    "enable",
    "enabled",
    "fuse",
    "report",
]

register()
