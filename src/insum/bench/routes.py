"""The torch.compile route: insum's own backend for it where this version has one, else a program of torch operations written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import insum
from insum.errors import SettingsError


def has_inductor() -> bool:
    """Whether ``settings.backend`` knows "inductor"."""
    try:
        with insum.settings(backend="inductor"):
            return True
    except SettingsError:
        return False


def under(call: Callable[..., Any], **changes: Any) -> Callable[..., Any]:
    """The call, run with these settings."""

    def run(*arguments: Any) -> Any:
        with insum.settings(**changes):
            return call(*arguments)

    return run


def compiled(plain: Callable[..., Tensor], call: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], str]:
    """The route for one application, and a note that says which program it compiles."""
    if has_inductor() and not options:
        return under(call, backend="inductor"), "settings.backend='inductor'"
    torch.compiler.reset()
    return torch.compile(plain, dynamic=False, options=options or None), "gather, matmul and scatter written in torch operations"
