"""A format inside an `nn.Module`: values as a parameter, index arrays as buffers, so that `.to()`
and `state_dict()` see them.

A state holds tensors and nothing else. Which format it is, its shape and its blocks are one more of
them, `encoding`: the bytes of a line of JSON, as `layout_of` makes and `decoded` reads them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from insum.accepted import FLAG, NARROW_FLOATS, TENSOR, has_elements, require, takes
from insum.compat.placed import beside
from insum.errors import BindingError, DtypeError, FormatError, UnsupportedError
from insum.formats import validate
from insum.formats.arrays import declare, hand_on, look, mapped
from insum.formats.base import FORMAT, FORMATS, SparseFormat
from insum.formats.run import FormatOrValue, run_formats

#: A format's name and its fields that are no tensors: numbers and tuples of them.
FormatLayout: TypeAlias = dict[str, Any]
#: By name the dtype and the sizes of each array.
ArraySizes: TypeAlias = Mapping[str, Sequence[Any]]
#: Bytes of an encoded layout; longer ones are none.
MOST_BYTES = 1 << 14


class SparseParameter(nn.Module):
    """Holds one format; call it to get the format with the current values.

    The values are a parameter (unless the format is a pattern), the index arrays are buffers, and
    so is what the format is, as text in bytes: the state dict holds tensors only. Loading a state
    with other numbers of entries or groups replaces the arrays; another format, shape or grouping
    is an error, and so are arrays that contradict each other.

    As the weight of a layer it has the ``shape``, ``dtype``, ``device`` and ``requires_grad`` that
    other modules ask of a weight, and `torch.nn.functional.linear` takes it.

    Args:
        x: The format. Its arrays are copied.
        requires_grad: Whether the values are trained.

    Examples:
        >>> from insum.formats import GroupCOO
        >>> weight = SparseParameter(GroupCOO.from_dense(torch.eye(3), group_size=2))
        >>> list(weight.state_dict())
        ['values', 'group_indices_0', 'slot_indices_0', 'encoding']
        >>> weight()
        GroupCOO(shape=(3, 3), float32, nnz=3, groups=3, group_size=2, group_dims=(0,),
        padding=50.0%, 60 bytes, cpu)
        >>> weight.shape, weight.dtype
        (torch.Size([3, 3]), torch.float32)
    """

    encoding: Tensor

    @takes(FormatError, x=FORMAT, requires_grad=FLAG)
    def __init__(self, x: SparseFormat, *, requires_grad: bool = True) -> None:
        super().__init__()
        validate.check_arrays(x)
        self._kind, self._fixed = x._kind, {name: getattr(x, name) for name in x._static}
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
            self.register_buffer(name, _own(tensor))
        self.register_buffer("encoding", encoded(self.layout, x.device))
        self.register_load_state_dict_pre_hook(_make_room)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_look)  # type: ignore[no-untyped-call]

    def forward(self) -> SparseFormat:
        made = self._made()
        look(made)  # at arrays that were moved, loaded or written into
        if not torch.compiler.is_compiling():
            known = vars(self).get("_signature")
            if known is None:  # it follows from what is fixed
                known = vars(self)["_signature"] = made.signature
            object.__setattr__(made, "_signature", known)
        return made

    def _made(self, held: Mapping[str, Tensor] | None = None) -> SparseFormat:
        """The format of our arrays, or of those that are passed by the names that a state has."""
        held = self.arrays() if held is None else held
        arrays: dict[str, Any] = {"values": held.get("values")}
        for name, count in self._counts.items():
            arrays[name] = (
                held[name] if count is None else tuple([held[f"{name}_{i}"] for i in range(count)])
            )
        return FORMATS[self._kind]._make(**arrays, **self._fixed)

    def _described(self) -> dict[str, Tensor]:
        """Our arrays without their elements."""
        return {name: _like(held, held.dtype) for name, held in self.arrays().items()}

    def arrays(self) -> dict[str, Tensor]:
        """All tensors of the format, by the names that they have in a state."""
        held = {name: getattr(self, name) for name in self._buffer_names()}
        return held if self.values is None else {"values": self.values, **held}

    def extra_repr(self) -> str:
        return repr(self._made())

    # --- what is asked of a weight ---

    @property
    def layout(self) -> FormatLayout:
        """The format's name, and its shape, blocks and grouped dimensions."""
        return {"format": self._kind, **self._fixed}

    @property
    def shape(self) -> torch.Size:
        """The shape of the sparse tensor."""
        return torch.Size(self._fixed["shape"])

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values; of a pattern, torch's default."""
        return torch.get_default_dtype() if self.values is None else self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.encoding.device

    @property
    def requires_grad(self) -> bool:
        return self.values is not None and self.values.requires_grad

    def size(self, dim: int | None = None) -> torch.Size | int:
        """As `torch.Tensor.size`."""
        return self.shape if dim is None else self.shape[validate.dimension(dim, self.ndim)]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Tensor:
        """torch's own functions where this stands for a tensor: a linear map is a product."""
        if function is nn.functional.linear:
            return _linear(*args, **(kwargs or {}))
        name = getattr(function, "__name__", str(function))
        raise UnsupportedError(
            f"torch's {name} does not take a sparse weight",
            expected="torch.nn.functional.linear",
            remedy="weight() for the format, weight().to_dense() for a tensor",
        )

    def _buffer_names(self) -> list[str]:
        return [
            name if count is None else f"{name}_{i}"
            for name, count in self._counts.items()
            for i in range(1 if count is None else count)
        ]


def linear(x: Tensor, weight: SparseFormat, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` with a sparse weight: ``Y[i,o] = W[o,k] * X[i,k]``, and what is
    added has the dtype of the product, as under autocast it has not by itself.
    """
    given: dict[str, FormatOrValue] = {
        "W": weight,
        "X": x.reshape(math.prod(x.shape[:-1]), weight.shape[1]),
    }
    y: Tensor = run_formats("Y[i,o] = W[o,k] * X[i,k]", given)
    lowered = torch.is_autocast_enabled(x.device.type) and y.dtype != torch.float64
    if bias is not None and (lowered or bias.dtype in NARROW_FLOATS):
        bias = bias.to(y.dtype)
    if bias is not None:  # where y is a DTensor, every rank has the layer, as it has the weight
        y = y + beside({"y": y, "bias": bias}, ("bias",))["bias"]
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _linear(input: Any, weight: Any, bias: Any = None) -> Tensor:
    if not isinstance(weight, SparseParameter) or not isinstance(input, Tensor):
        raise UnsupportedError(
            "a sparse weight is not the weight here", expected="linear(input, weight, bias)"
        )
    if weight.ndim != 2 or input.dim() == 0 or input.shape[-1] != weight.shape[1]:
        raise BindingError(
            f"the input has shape {tuple(input.shape)}, the sparse weight {tuple(weight.shape)}",
            expected="a matrix (out, in), and as many as its columns in the last dimension",
        )
    return linear(input, weight(), bias)


def _own(array: Tensor) -> Tensor:
    """A copy: files that hold tensors, and training in several processes, want none that share
    memory, and what loading replaces is not the caller's.
    """
    made = array.detach().clone(memory_format=torch.contiguous_format)
    hand_on(array, made)
    return made


# --- what a format is, as a tensor ---


def layout_of(x: SparseFormat) -> FormatLayout:
    """All that a format is beside its tensors."""
    return {"format": x._kind, **{name: getattr(x, name) for name in x._static}}


def encoded(layout: FormatLayout, device: torch.device | str = "cpu") -> Tensor:
    """A layout as bytes.

    >>> decoded(encoded({"format": "COO", "shape": (2, 3)}))
    {'format': 'COO', 'shape': (2, 3)}
    """
    text = json.dumps(layout, sort_keys=True).encode()
    return torch.tensor(list(text), dtype=torch.uint8, device=device)


def decoded(found: object) -> FormatLayout:
    """What `encoded` made, from a file that may hold anything.

    Raises:
        FormatError: What was found is no layout of a format that there is.
    """
    if not isinstance(found, Tensor) or not has_elements(found):
        raise _unreadable("it is no dense tensor whose elements are here")
    if found.dtype != torch.uint8 or found.dim() != 1:
        raise _unreadable("it is not a tensor of bytes")
    if found.numel() > MOST_BYTES:
        raise _unreadable(f"it has {found.numel()} bytes")
    try:
        layout = json.loads(bytes(found.tolist()).decode())
    except (ValueError, RecursionError) as wrong:
        raise _unreadable("its bytes are not JSON") from wrong
    return checked_layout(layout)


def checked_layout(layout: object) -> FormatLayout:
    """A layout as it came out of a file, looked at: a known format, all of its fields and no
    others, each a number or numbers.
    """
    kind = FORMATS.get(str(layout.get("format"))) if isinstance(layout, Mapping) else None
    if kind is None or not isinstance(layout, Mapping):
        raise _unreadable(f"it names no format of {', '.join(FORMATS)}")
    if {*layout} != {"format", *kind._static}:
        raise _unreadable(f"a {kind.__name__} has the fields {', '.join(kind._static)}")
    fields = {name: _plain(layout[name]) for name in kind._static}
    validate.check_shape(fields["shape"])
    return {"format": kind.__name__, **fields}


def _plain(value: object) -> int | tuple[int, ...]:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        if all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            return tuple(value)
    raise _unreadable(f"it holds {str(value)[:40]} where a number or numbers stand")


def _unreadable(why: str) -> FormatError:
    return FormatError(
        f"the saved encoding of a sparse tensor cannot be read: {why}",
        expected="a state of SparseParameter, as it was saved",
    )


def sizes_of(arrays: Mapping[str, object]) -> dict[str, list[Any]]:
    """Dtypes and sizes of arrays, to be written down.

    >>> sizes_of({"values": torch.ones(2, 3)})
    {'values': ['float32', 2, 3]}
    """
    return {
        name: [str(held.dtype).removeprefix("torch."), *held.shape]
        for name, held in arrays.items()
        if isinstance(held, Tensor)
    }


def vacant(
    layout: FormatLayout, sizes: ArraySizes, dtype: torch.dtype, device: torch.device
) -> SparseFormat:
    """A format of this layout whose arrays hold zeros and are there to be loaded into; ``dtype`` is
    that of the values.

    Raises:
        FormatError: The arrays are not those of the format, or contradict each other.
    """
    kind, fixed = FORMATS[layout["format"]], {k: v for k, v in layout.items() if k != "format"}
    flat = {name: _blank(name, size, dtype, "meta") for name, size in sizes.items()}
    fields: dict[str, Any] = {"values": flat.pop("values", None)}
    for name in kind._arrays[1:]:
        several = [flat.pop(key) for key in sorted(flat) if key.rpartition("_")[0] == name]
        fields[name] = flat.pop(name) if name in flat else tuple(several)
    if flat:
        raise _unreadable(f"a {kind.__name__} has no array {next(iter(flat))}")
    described = kind(**fields, **fixed)  # on the meta device: shapes are looked at, nothing else
    zeros = lambda t: _empty("array", t, device).zero_()
    real = {
        name: None if held is None else mapped(zeros, held)
        for name in kind._arrays
        for held in (getattr(described, name),)
    }
    return kind._make(**{**described._fields(), **real})


def _blank(name: str, size: Sequence[Any], dtype: torch.dtype, device: str) -> Tensor:
    kinds = {"values": dtype, "int32": torch.int32, "int64": torch.int64}
    try:
        kind = kinds["values" if name == "values" else size[0]]
        return torch.empty([*size[1:]], dtype=kind, device=device)
    except (KeyError, IndexError, TypeError, RuntimeError, ValueError) as wrong:
        raise _unreadable(f"{name} is described as {str(size)[:60]}") from wrong


# --- loading ---


def _make_room(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Before loading: values of another size than ours get a new tensor to be loaded into, and
    index arrays always do, for ours may be known to kernels that are under way.
    """
    assert isinstance(module, SparseParameter)
    _check_kind(module, state, prefix)
    held = {name: state.get(prefix + name) for name in module._buffer_names()}
    mine, values = module.values, state.get(prefix + "values")
    for name, theirs in (*held.items(), ("values", values)):
        if isinstance(theirs, Tensor):
            require(f"the saved {name}", theirs, TENSOR, FormatError)
    # of anything but a tensor torch itself says what is wrong
    room = {
        name: _room(name, theirs) for name, theirs in held.items() if isinstance(theirs, Tensor)
    }
    absent = [name for name, theirs in held.items() if theirs is None]
    if room and absent:
        raise FormatError(
            f"the saved state has {', '.join(room)}, but no {', '.join(absent)}",
            expected="all index arrays of the format, or none",
        )
    if mine is not None and isinstance(values, Tensor) and mine.shape != values.shape:
        room["values"] = _like(values, mine.dtype)
    # shapes are looked at before there is memory for them
    validate.check_arrays(module._made({**module._described(), **room}))
    made = {name: _empty(name, one, module.device) for name, one in room.items()}
    if mine is not None and "values" in made:
        module.values = nn.Parameter(made.pop("values"), requires_grad=mine.requires_grad)
    for name, empty in made.items():
        setattr(module, name, empty)


def _check_kind(module: SparseParameter, state: dict[str, Any], prefix: str) -> None:
    """What is loaded is of our format; states of version 0.1.0 say so by a dictionary."""
    if prefix + "_extra_state" in state:
        theirs = checked_layout(state.pop(prefix + "_extra_state"))
        state[prefix + "encoding"] = encoded(theirs, module.device)
    elif prefix + "encoding" in state:
        theirs = decoded(state[prefix + "encoding"])
    else:
        return
    if theirs != module.layout:
        raise FormatError(
            f"the saved state is of {theirs}",
            expected=f"{module.layout}",
            remedy="insum.nn.restore(model, state) gives a model the layers that a state has, "
            "before it is loaded",
        )


def _room(name: str, theirs: Tensor) -> Tensor:
    """Index arrays are loaded as they are: to round or to cut them would make others of them."""
    if theirs.dtype not in (torch.int32, torch.int64):
        raise DtypeError(
            f"the saved {name} holds {str(theirs.dtype).removeprefix('torch.')}",
            expected="int32 or int64",
        )
    return _like(theirs, theirs.dtype)


def _like(theirs: Tensor, dtype: torch.dtype) -> Tensor:
    """The description of an array."""
    return torch.empty(theirs.shape, dtype=dtype, device="meta")


def _empty(name: str, described: Tensor, device: torch.device) -> Tensor:
    try:
        return torch.empty(described.shape, dtype=described.dtype, device=device)
    except RuntimeError as wrong:
        raise FormatError(
            f"there is no memory for the saved {name} of shape {tuple(described.shape)}"
        ) from wrong


def _look(module: nn.Module, _: object) -> None:
    """After loading: a broken file is an error here, and not at the first product."""
    assert isinstance(module, SparseParameter)
    made = module._made()
    declare(made, validate.check(made))
