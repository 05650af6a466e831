"""Statements as torch operations.

`eager` runs a call past the dispatcher, and records it for autograd; `registration` has the ops
that tracers, transforms and subclasses see, with arguments as `encoding` writes them. `gradients`,
`vmap` and `autocast` are what those do to a statement; `inplace`, `mean` and `traced` are the other
ways in.
"""

from insum.ops import registration as registration  # torch knows the ops once this is imported
