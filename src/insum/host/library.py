"""What multiplies sparse matrices and batches of small ones for torch where it was built with it,
as it is for x86 alone: MKL.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch


@cache
def has_library() -> bool:
    """Whether torch has the library that multiplies sparse matrices."""
    return bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call, unused-ignore]


@cache
def hide_beta_warning() -> None:
    """torch says once that such matrices are in beta; not to whoever does not know of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor([0], [], [], (0, 0))
