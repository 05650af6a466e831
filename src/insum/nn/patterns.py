"""Modules with constant patterns: coefficients and index arrays that are computed once and move
with the module; mostly they are part of its programs (`insum.constant`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

import insum

if TYPE_CHECKING:
    from typing_extensions import Self


class PatternModule(nn.Module):
    """A module that holds patterns, by the names that they have in its statements. They are kept
    exact, so that coefficients are rounded once, whatever dtypes the module has been in; and they
    are no part of its state.
    """

    #: What statements are promised of the arrays: that they are part of programs, or that they do
    #: not change.
    promise: Callable[[Tensor], Tensor] = staticmethod(insum.constant)
    _exact: list[dict[str, Tensor]]

    def _hold(self, patterns: Sequence[dict[str, Tensor]], like: Tensor) -> None:
        """``like``: where the module is, and its dtype."""
        self._exact = list(patterns)
        for number, arrays in enumerate(self._exact):
            for name, tensor in arrays.items():
                dtype = like.dtype if tensor.is_floating_point() else None
                self.register_buffer(
                    f"{name}{number}", tensor.to(like.device, dtype), persistent=False
                )
        self._renew()

    def _renew(self) -> None:
        """Every array anew from the exact pattern."""
        for number, arrays in enumerate(self._exact):
            for name, exact in arrays.items():
                old = getattr(self, f"{name}{number}")
                new = exact.to(old.device, old.dtype)
                setattr(self, f"{name}{number}", new)
                if new.device.type != "meta":
                    self.promise(new)

    def _arrays(self, number: int) -> dict[str, Any]:
        """The arrays of a pattern where the module is."""
        return {name: getattr(self, f"{name}{number}") for name in self._exact[number]}

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._renew()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._renew()


def without_compiled_parts(
    module: nn.Module, state: dict[str, Any], prefix: str, *_: object
) -> None:
    """e3nn keeps Wigner symbols in its states, and MACE its basis; here they are computed."""
    for key in [k for k in state if k.startswith(prefix) and _is_computed(k[len(prefix) :])]:
        del state[key]


def _is_computed(key: str) -> bool:
    return key.startswith("_compiled_main_") or ".U_matrix_" in key or key.endswith("_zeroed")
