"""A format inside an `nn.Module`: values as a parameter, index arrays as buffers, so that `.to()`
and `state_dict()` see them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from insum.accepted import FLAG, takes
from insum.errors import DtypeError, FormatError
from insum.formats import validate
from insum.formats.convert import FORMAT, FORMATS, SparseFormat


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

    @takes(FormatError, x=FORMAT, requires_grad=FLAG)
    def __init__(self, x: SparseFormat, *, requires_grad: bool = True) -> None:
        super().__init__()
        validate.check_arrays(x)
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
        self.register_load_state_dict_post_hook(_look)  # type: ignore[no-untyped-call]

    def forward(self) -> SparseFormat:
        made = self._made()
        made._look()  # at arrays that were moved, loaded or written into
        return made

    def _made(self) -> SparseFormat:
        arrays: dict[str, Any] = {"values": self.values}
        for name, count in self._counts.items():
            arrays[name] = (
                getattr(self, name)
                if count is None
                else tuple(getattr(self, f"{name}_{i}") for i in range(count))
            )
        return FORMATS[self._kind]._make(**arrays, **self._fixed)

    def extra_repr(self) -> str:
        return repr(self._made())

    def get_extra_state(self) -> dict[str, Any]:
        return {"format": self._kind, **self._fixed}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        mine = self.get_extra_state()
        if repr(state) != repr(mine):  # of whatever the file holds: a tensor, say, compares to none
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
    """Before loading: values of another size than ours get a new tensor to be loaded into, and
    index arrays always do, for ours may be those of the caller's format, or of another module.
    """
    assert isinstance(module, SparseParameter)
    held = {name: state.get(prefix + name) for name in module._buffer_names()}
    # of anything but a tensor torch itself says what is wrong
    room = {
        name: _room(name, theirs, getattr(module, name).device)
        for name, theirs in held.items()
        if isinstance(theirs, Tensor)
    }
    for name, empty in room.items():  # once all of them are found to be index arrays
        setattr(module, name, empty)
    mine, theirs = module.values, state.get(prefix + "values")
    if mine is not None and isinstance(theirs, Tensor) and mine.shape != theirs.shape:
        empty = torch.empty(theirs.shape, dtype=mine.dtype, device=mine.device)
        module.values = nn.Parameter(empty, requires_grad=mine.requires_grad)


def _room(name: str, theirs: Tensor, device: torch.device) -> Tensor:
    """Index arrays are loaded as they are: to round or to cut them would make others of them."""
    if theirs.dtype not in (torch.int32, torch.int64):
        raise DtypeError(
            f"the saved {name} holds {str(theirs.dtype).removeprefix('torch.')}",
            expected="int32 or int64",
        )
    return torch.empty(theirs.shape, dtype=theirs.dtype, device=device)


def _look(module: nn.Module, _: object) -> None:
    """After loading: a broken file is an error here, and not at the first product."""
    assert isinstance(module, SparseParameter)
    made = module._made()
    made._declare(validate.check(made))
