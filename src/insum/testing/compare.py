"""How near is near enough, per dtype."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Tolerance(NamedTuple):
    """Relative to each value; absolute in units of the largest expected magnitude (at least 1).

    Attributes:
        rtol: Relative to each value.
        atol: In units of the largest expected magnitude.

    Examples:
        >>> tolerance(torch.float64).rtol < tolerance(torch.float16).rtol
        True
    """

    rtol: float
    atol: float


_TOLERANCES = {
    torch.bfloat16: 1.6e-2,
    torch.float16: 2e-3,
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
    torch.float64: 1e-11,
    torch.complex128: 1e-11,
}


def tolerance(dtype: torch.dtype) -> Tolerance:
    """What a result computed in ``dtype`` may differ from one in double precision; integers and
    booleans may not differ.

    Args:
        dtype: What was computed in.

    Returns:
        The tolerance.

    Examples:
        >>> import torch
        >>> tolerance(torch.float32)
        Tolerance(rtol=1e-05, atol=1e-05)
        >>> tolerance(torch.int64)
        Tolerance(rtol=0.0, atol=0.0)
    """
    allowed = _TOLERANCES.get(dtype, 0.0)
    return Tolerance(allowed, allowed)


def assert_close(
    actual: Tensor, expected: np.ndarray[Any, Any], dtype: torch.dtype | None = None
) -> None:
    """Compare a result with the oracle's, to the tolerance of ``dtype`` (the coarsest that took
    part; the result's own by default).

    Args:
        actual: A result of insum's.
        expected: What the oracle gave.
        dtype: The coarsest that took part.

    Raises:
        AssertionError: They differ by more.

    Examples:
        >>> import numpy, torch
        >>> assert_close(torch.tensor([1.0, 2.000001]), numpy.array([1.0, 2.0]))
        >>> assert_close(torch.tensor([1, 2]), numpy.array([1, 3]))
        Traceback (most recent call last):
            ...
        AssertionError:
        Not equal to tolerance rtol=0, atol=0
        ...
    """
    assert tuple(actual.shape) == expected.shape, (
        f"the result has shape {tuple(actual.shape)}, expected {expected.shape}"
    )
    plain = actual.detach().cpu().resolve_conj().resolve_neg()
    if plain.is_floating_point() or plain.is_complex():
        plain = plain.to(torch.complex128 if plain.is_complex() else torch.float64)
    rtol, atol = tolerance(dtype or actual.dtype)
    finite = np.abs(expected[np.isfinite(expected)]) if expected.dtype.kind in "fc" else np.zeros(0)
    np.testing.assert_allclose(
        plain.numpy(), expected, rtol=rtol, atol=atol * max(1.0, float(finite.max(initial=0.0)))
    )
