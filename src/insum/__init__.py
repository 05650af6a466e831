"""insum: one line of indirect einsum, one fast sparse GPU kernel.

Examples:
    >>> import torch, insum
    >>> A, x = torch.ones(2, 3), torch.arange(3.)
    >>> insum.insum("y[i] = A[i,j] * x[j]", A=A, x=x)
    tensor([3., 3.])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from insum.api import Compiled, Insum, compile, explain, insum, tune
from insum.errors import (
    AutogradError,
    BindingError,
    DeviceError,
    DtypeError,
    FormatError,
    IndexRangeError,
    InsumError,
    NotFusedError,
    RankError,
    SettingsError,
    StatementError,
    UnsupportedError,
)
from insum.facts import constant
from insum.memory import forget, unchanging
from insum.plan.config import Config
from insum.settings import settings

if TYPE_CHECKING:
    from insum import distributed as distributed
    from insum import export, formats
    from insum import fusion as fusion
    from insum import nn as nn
    from insum import testing as testing
    from insum.explanation import Explanation
    from insum.formats.einsum import einsum
    from insum.runtime.record import synchronize

__version__ = "0.1.0"

__all__ = [
    "AutogradError",
    "BindingError",
    "Compiled",
    "Config",
    "DeviceError",
    "DtypeError",
    "Explanation",
    "FormatError",
    "IndexRangeError",
    "Insum",
    "InsumError",
    "NotFusedError",
    "RankError",
    "SettingsError",
    "StatementError",
    "UnsupportedError",
    "compile",
    "constant",
    "einsum",
    "explain",
    "export",
    "forget",
    "formats",
    "insum",
    "settings",
    "synchronize",
    "tune",
    "unchanging",
]

#: Loaded when first asked for, so that importing insum stays quick.
_LAZY = {
    "Explanation": "insum.explanation",
    "distributed": "insum.distributed",
    "synchronize": "insum.runtime.record",
    "einsum": "insum.formats.einsum",
    "export": "insum.export",
    "formats": "insum.formats",
    "fusion": "insum.fusion",
    "nn": "insum.nn",
    "testing": "insum.testing",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'insum' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(_LAZY[name])
    value = getattr(module, name) if name in ("Explanation", "einsum", "synchronize") else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
