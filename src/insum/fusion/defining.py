"""How the ops of fused graphs are made known to torch: all in one way."""

from __future__ import annotations

from typing import Any

import torch

_library = torch.library.Library("insum", "FRAGMENT")  # type: ignore[no-untyped-call]


def define(schema: str, kernel: Any, fake: Any) -> None:
    """An op of the namespace ``insum``, for every device; it has no gradient."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _library.impl(name, kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"insum::{name}", fake, lib=_library)
