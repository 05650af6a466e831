"""A format inside an `nn.Module`: values as a parameter, index arrays as buffers, so that `.to()`
and `state_dict()` see them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from insum.errors import FormatError
from insum.formats.convert import FORMATS, SparseFormat


class SparseParameter(nn.Module):
    """Holds one format; call it to get the format with the current values.

    The values are a parameter (unless the format is a pattern), the index arrays are buffers.
    Loading a state with other numbers of entries or groups replaces the arrays; another format,
    shape or grouping is an error.

    >>> from insum.formats import GroupCOO
    >>> weight = SparseParameter(GroupCOO.from_dense(torch.eye(3), group_size=2))
    >>> list(weight.state_dict())
    ['values', 'group_indices_0', 'slot_indices_0', '_extra_state']
    >>> weight()
    GroupCOO(shape=(3, 3), float32, nnz=3, groups=3, group_size=2, group_dims=(0,),
    padding=50.0%, 60 bytes, cpu)
    """

    def __init__(self, x: SparseFormat, *, requires_grad: bool = True) -> None:
        super().__init__()
        self._kind, self._fixed = type(x).__name__, {name: getattr(x, name) for name in x._static}
        self._counts = {
            name: len(held) if isinstance(held := getattr(x, name), tuple) else None
            for name in x._arrays[1:]
        }
        floating = x.values is not None and (x.values.is_floating_point() or x.values.is_complex())
        self.values = (
            None
            if x.values is None
            else nn.Parameter(x.values.detach().clone(), requires_grad=requires_grad and floating)
        )
        for name, tensor in zip(self._buffer_names(), list(x.tensors())[x.values is not None :]):
            self.register_buffer(name, tensor)
        self.register_load_state_dict_pre_hook(_make_room)  # type: ignore[no-untyped-call]

    def forward(self) -> SparseFormat:
        arrays: dict[str, Any] = {"values": self.values}
        for name, count in self._counts.items():
            arrays[name] = (
                getattr(self, name)
                if count is None
                else tuple(getattr(self, f"{name}_{i}") for i in range(count))
            )
        made = FORMATS[self._kind]._make(**arrays, **self._fixed)
        # of arrays that were moved or loaded; what a format knows of them holds all the same
        made._declare(True, only_new=True)
        return made

    def extra_repr(self) -> str:
        return repr(self.forward())

    def get_extra_state(self) -> dict[str, Any]:
        return {"format": self._kind, **self._fixed}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        mine = self.get_extra_state()
        if state != mine:
            raise FormatError(
                f"the saved state is of {state}",
                expected=f"{mine}",
                remedy="build the module with a format of the same kind before loading",
            )

    def _buffer_names(self) -> list[str]:
        return [
            name if count is None else f"{name}_{i}"
            for name, count in self._counts.items()
            for i in range(count or 1)
        ]


def _make_room(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Before loading: arrays of other sizes than ours get new tensors to be loaded into."""
    assert isinstance(module, SparseParameter)
    for name in ("values", *module._buffer_names()):
        mine, theirs = getattr(module, name), state.get(prefix + name)
        if mine is None or theirs is None or mine.shape == theirs.shape:
            continue
        room = torch.empty(theirs.shape, dtype=mine.dtype, device=mine.device)
        setattr(
            module,
            name,
            nn.Parameter(room, requires_grad=mine.requires_grad) if name == "values" else room,
        )
