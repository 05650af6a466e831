"""Calls that are right but for one or two arguments, which no one should pass. Every public
function has to give a result or an `insum.InsumError`, and to leave what it was given as it was.

    python -m insum.testing.hostile --trials 10000 [--seed 0] [--only name]

Each trial is decided by its seed alone.
"""

from __future__ import annotations

import argparse
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn

import insum
from insum import formats as F
from insum import nn as L

# --- what nobody should pass ----------------------------------------------------------------------


class Subclass(Tensor):
    """A tensor of another class, which does what tensors do."""


class Refusing:
    """Raises whatever it is asked for."""

    def __index__(self) -> int:
        raise TypeError("no index")

    def __len__(self) -> int:
        raise TypeError("no length")

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("no items")

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = None  # type: ignore[assignment]


def cyclic_list() -> list[Any]:
    made: list[Any] = [1]
    made.append(made)
    return made


def cyclic_dict() -> dict[Any, Any]:
    made: dict[Any, Any] = {}
    made["i"] = made
    return made


def fake_tensor() -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3, 4)


def symbol() -> Any:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return ShapeEnv().create_unbacked_symint()


def inference_tensor() -> Tensor:
    with torch.inference_mode():
        return torch.ones(3, 4)


def quantized() -> Tensor:
    return torch.quantize_per_tensor(torch.ones(3, 4), 0.1, 0, torch.qint8)


#: Whatever the argument was.
THINGS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "a text": lambda: "x",
    "an empty text": lambda: "",
    "other letters": lambda: "größe[ñ] = ∑[ñ]",
    "a lone surrogate": lambda: "\ud800",
    "bytes": lambda: b"y[i] = x[i]",
    "0": lambda: 0,
    "-1": lambda: -1,
    "7": lambda: 7,
    "2**31": lambda: 2**31,
    "2**62": lambda: 2**62,
    "10**30": lambda: 10**30,
    "-2**63": lambda: -(2**63),
    "2.5": lambda: 2.5,
    "NaN": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "1j": lambda: 1j,
    "NumPy's integer": lambda: np.int64(3),
    "NumPy's NaN": lambda: np.float32("nan"),
    "an empty list": list,
    "an empty tuple": lambda: (),
    "an empty dict": dict,
    "a tuple of None": lambda: (None,),
    "a tuple of texts": lambda: ("a", "b"),
    "a tuple of huge sizes": lambda: (2**40, 2**40),
    "a tuple of negative sizes": lambda: (-1, -3),
    "a tuple of fractions": lambda: (1.5, float("nan")),
    "a tuple of bools": lambda: (True, False),
    "many sizes": lambda: (1,) * 70,
    "ten thousand": lambda: tuple(range(10_000)),
    "nested lists": lambda: [[1, 2], [3]],
    "a cyclic list": cyclic_list,
    "a cyclic dict": cyclic_dict,
    "a dict of texts": lambda: {"i": "j", None: 3},
    "a dict of nothing known": lambda: {"nothing": 3, 99: 3, (): 3},
    "an object": object,
    "a refusing object": Refusing,
    "a class": lambda: int,
    "a function": lambda: len,
    "a generator": lambda: (n for n in (1, 2)),
    "a dtype": lambda: torch.float32,
    "a device": lambda: torch.device("meta"),
    "a symbol": symbol,
    "an array": lambda: np.ones((3, 4)),
    "an array of objects": lambda: np.array([None, "x"], dtype=object),
    "a list of tensors": lambda: [torch.ones(3), torch.ones(3)],
    "a scalar tensor": lambda: torch.tensor(2),
    "a tensor of NaN": lambda: torch.full((3, 4), float("nan")),
    "a tensor of no elements": lambda: torch.ones(0, 4),
    "a meta tensor": lambda: torch.ones(3, 4, device="meta"),
    "a fake tensor": fake_tensor,
    "a sparse tensor": lambda: torch.eye(3, 4).to_sparse(),
    "a CSR tensor": lambda: torch.eye(3, 4).to_sparse_csr(),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "a jagged tensor": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "a quantised tensor": quantized,
    "an MKLDNN tensor": lambda: torch.ones(3, 4).to_mkldnn(),
    "a lazy parameter": lambda: nn.UninitializedParameter(),
    "a tensor of inference mode": inference_tensor,
    "a tensor of 40 dimensions": lambda: torch.ones((1,) * 40),
    "a module": lambda: nn.Linear(3, 4),
    "a format": lambda: F.COO.from_dense(torch.eye(3, 4)),
    "a block format": lambda: F.BlockGroupCOO.from_dense(torch.eye(4), block_shape=(2, 2)),
    "a corrupt format": lambda: corrupt(F.COO.from_dense(torch.eye(3, 4)), "indices", (None, None)),
    "a format of strings": lambda: corrupt(F.COO.from_dense(torch.eye(3, 4)), "values", "values"),
    "a format of another shape": lambda: corrupt(F.COO.from_dense(torch.eye(3, 4)), "shape", (2,)),
    "a statement of 10,000 characters": lambda: "y[i] = " + "x[i] + " * 1400 + "x[i]",
    "deep parentheses": lambda: "y[i] = " + "(" * 5000 + "x[i]" + ")" * 5000,
    "deep brackets": lambda: "y[i] = " + "x[" * 2000 + "i" + "]" * 2000,
    "many minus signs": lambda: "y[i] = " + "-" * 5000 + "x[i]",
    "keywords as names": lambda: "lambda[class] = def[class]",
    "a dotted name": lambda: "y[i] = x.T[i]",
    "an einsum": lambda: "ij,jk->ik",
    "an einsum of nothing": lambda: ",->",
    "an einsum with dots": lambda: "...i,...j->...",
}

#: What becomes of a tensor.
CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "of half precision": lambda t: t.half(),
    "of booleans": lambda t: t.bool(),
    "of complex numbers": lambda t: t.to(torch.complex64),
    "of 8-bit floats": lambda t: t.to(torch.float8_e4m3fn),
    "of 8-bit floats of another kind": lambda t: t.to(torch.float8_e5m2fnuz),
    "of unsigned integers": lambda t: t.to(torch.uint64),
    "of floats": lambda t: t.double(),
    "of integers": lambda t: t.nan_to_num().to(torch.int64),
    "of short integers": lambda t: t.nan_to_num().to(torch.int8),
    "flattened": lambda t: t.reshape(-1),
    "with one dimension more": lambda t: t.unsqueeze(0),
    "with one dimension less": lambda t: t[0] if t.dim() and t.shape[0] else t,
    "with forty dimensions more": lambda t: t.reshape((1,) * (63 - t.dim()) + tuple(t.shape)),
    "doubled": lambda t: torch.cat([t, t]) if t.dim() else t,
    "cut": lambda t: t[:-1] if t.dim() else t,
    "empty": lambda t: t[:0] if t.dim() else t,
    "transposed": lambda t: t.t() if t.dim() == 2 else t.flip(0) if t.dim() else t,
    "expanded": lambda t: t.flatten()[:1].expand(t.shape) if t.numel() else t,
    "overlapping": lambda t: torch.as_strided(t, t.shape, (1,) * t.dim()) if t.numel() else t,
    "strided": lambda t: torch.stack([t, t], -1)[..., 0],
    "negated": lambda t: torch._neg_view(t) if t.is_floating_point() else t,
    "conjugated": lambda t: t.to(torch.complex64).conj(),
    "named": lambda t: cast(Any, t).rename(*[f"d{n}" for n in range(t.dim())]),
    "of a subclass": lambda t: t.as_subclass(Subclass),
    "a parameter": lambda t: nn.Parameter(t, requires_grad=t.is_floating_point()),
    "with a gradient": lambda t: t.clone().requires_grad_(t.is_floating_point()) * 1,
    "on no device": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse() if t.dim() else t,
    "an array": lambda t: t.numpy(),
    "a list": lambda t: t.tolist(),
    "of negative values": lambda t: -t - 1 if t.dtype is not torch.bool else t,
    "of huge values": lambda t: t * 0 + (2**40 if t.dtype == torch.int64 else 100),
    "of NaN": lambda t: t * float("nan"),
}


def corrupt(thing: Any, name: str, value: Any) -> Any:
    """A frozen object with another member."""
    object.__setattr__(thing, name, value)
    return thing


# --- calls that are right -------------------------------------------------------------------------


@dataclass(frozen=True)
class Right:
    """A call that is right, with arguments made anew."""

    run: Callable[..., Any]
    arguments: dict[str, Any]


Making: TypeAlias = Callable[[], Right]
#: By name, what is called and with what.
CALLS: dict[str, Making] = {}


def right(name: str, run: Callable[..., Any], /, **makes: Callable[[], Any]) -> None:
    CALLS[name] = lambda: Right(run, {key: make() for key, make in makes.items()})


def the(value: Any) -> Callable[[], Any]:
    return lambda: value


def statement_first(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda statement, **rest: function(statement, **rest)


def places(count: int, below: int) -> Callable[[], Tensor]:
    return lambda: torch.arange(count) % below


def ones(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.arange(1.0, 1 + int(np.prod(shape))).reshape(shape)


def coo() -> Any:
    return F.COO.from_dense(torch.eye(3, 4))


def grouped() -> Any:
    return F.GroupCOO.from_dense(torch.eye(3, 4), group_size=2)


def blocked() -> Any:
    return F.BlockGroupCOO.from_dense(torch.eye(4), block_shape=(2, 2), group_size=1)


def edges() -> Tensor:
    return torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])


def voxels() -> Tensor:
    return torch.tensor([[0, 0, 0], [0, 1, 1], [1, 2, 0], [2, 2, 2]])


SPMM = "C[AM[p],n] = AV[p] * B[AK[p],n]"
OPERANDS: dict[str, Callable[[], Any]] = {
    "AM": places(4, 3),
    "AK": places(4, 2),
    "AV": ones(4),
    "B": ones(2, 5),
}
OPTIONS: dict[str, Callable[[], Any]] = {
    "out_shape": the((3, 5)),
    "sizes": lambda: {"n": 5},
    "padded": the(("AK",)),
}
CONFIG = the(None)


def _statements() -> None:
    for name in ("insum", "Insum", "explain", "tune"):
        config = {} if name == "tune" else {"config": CONFIG}
        run = statement_first(getattr(insum, name))
        right(name, run, statement=the(SPMM), **OPTIONS, **config, **OPERANDS)
    added = {**OPERANDS, "C": ones(3, 5)}
    for sign in ("+=", "max="):
        text = SPMM.replace("=", sign)
        right(f"insum {sign}", statement_first(insum.insum), statement=the(text), **added)
    right("insum of a scalar", statement_first(insum.insum), statement=the("y[] = a * x[i]"),
          a=the(2.0), x=ones(3))  # fmt: skip
    right("tune with effort", statement_first(insum.tune), statement=the("y[i] = x[i]"),
          effort=the("quick"), x=ones(3))  # fmt: skip
    right("compile", lambda **o: insum.compile(**o)(**{k: m() for k, m in OPERANDS.items()}),
          statement=the(SPMM), **OPTIONS, config=CONFIG)  # fmt: skip
    right("Compiled", lambda **o: insum.Compiled(**o)(x=torch.ones(3)),
          statement=the("y[i] = x[i]"), out_shape=the((3,)), sizes=the(None), padded=the(()),
          config=CONFIG)  # fmt: skip
    right("Config", insum.Config, **{n: the(1) for n in ("m", "n", "k", "warps", "stages", "split",
                                                         "group")}, swap=the(-1))  # fmt: skip
    right("insum with a config", statement_first(insum.insum), statement=the("y[i] = x[i]"),
          config=lambda: insum.Config(m=16), x=ones(3))  # fmt: skip
    right("unchanging", insum.unchanging, tensor=places(4, 3))
    right("constant", insum.constant, tensor=places(4, 3))
    right("forget", insum.forget, tensor=places(4, 3))
    right("synchronize", insum.synchronize, device=the("cpu"))
    for setting in insum.settings.values.__slots__:
        right(f"settings.{setting}", partial(_set, setting),
              value=partial(getattr, insum.settings, setting))  # fmt: skip
    right("settings by name", lambda name: _set(name, "always"), name=the("check"))


def _set(name: Any, value: Any) -> None:
    with insum.settings(**{name if isinstance(name, str) else "check": value}):
        insum.settings.check = insum.settings.check
        setattr(insum.settings, name if isinstance(name, str) else "check", value)


def _einsums() -> None:
    run = statement_first(insum.einsum)
    for name, make in {"COO": coo, "GroupCOO": grouped}.items():
        right(f"einsum of {name}", run, statement=the("C[m,n] = A[m,k] * B[k,n]"), A=make,
              B=ones(4, 2), out_shape=the((3, 2)), sizes=lambda: {"n": 2},
              dense_output=the(False))  # fmt: skip
    right("einsum of positions", lambda statement, A, B: insum.einsum(statement, A, B),
          statement=the("mk,kn->mn"), A=coo, B=ones(4, 2))  # fmt: skip
    right("einsum of blocks", run, statement=the("C[m,n] = A[m,k] * B[k,n]"), A=blocked,
          B=ones(4, 2))  # fmt: skip
    right("einsum with a sparse result", run, statement=the("S[m,n] = A[m,n] * X[m,k] * Y[n,k]"),
          A=grouped, X=ones(3, 2), Y=ones(4, 2))  # fmt: skip
    right("einsum of tensors", run, statement=the("C[m,n] = A[m,k] * B[k,n]"), A=ones(3, 4),
          B=ones(4, 2))  # fmt: skip
    right("explain an einsum", statement_first(insum.explain),
          statement=the("C[m,n] = A[m,k] * B[k,n]"), A=grouped, B=ones(4, 2))  # fmt: skip


def _formats() -> None:

    def index() -> tuple[Tensor, Tensor]:
        return torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2])

    right("COO", F.COO, values=ones(3), indices=index, shape=the((3, 4)), validate=the(True))
    right("ELL", F.ELL, values=ones(3, 1), indices=lambda: (torch.tensor([[0], [1], [2]]),),
          shape=the((3, 4)), group_dims=the((0,)), validate=the(True))  # fmt: skip
    right("GroupCOO", F.GroupCOO, values=ones(3, 1), group_indices=lambda: index()[:1],
          slot_indices=lambda: (torch.tensor([[0], [1], [2]]),), shape=the((3, 4)),
          group_dims=the((0,)), validate=the(True))  # fmt: skip

    def two() -> tuple[Tensor, Tensor]:
        return torch.tensor([0, 1]), torch.tensor([0, 1])

    right("BlockCOO", F.BlockCOO, values=ones(2, 2, 2), indices=two, shape=the((4, 4)),
          block_shape=the((2, 2)), validate=the(True))  # fmt: skip
    right("BlockGroupCOO", F.BlockGroupCOO, values=ones(2, 1, 2, 2),
          group_indices=lambda: two()[:1], slot_indices=lambda: (torch.tensor([[0], [1]]),),
          shape=the((4, 4)), block_shape=the((2, 2)), group_dims=the((0,)),
          validate=the(True))  # fmt: skip
    right("NeighborTable", F.NeighborTable, table=lambda: torch.tensor([[0, 1], [2, -1]]),
          shape=the((2, 3, 2)), dim=the(1), values=the(None), validate=the(True))  # fmt: skip
    made: dict[str, tuple[Any, dict[str, Callable[[], Any]]]] = {
        "COO": (F.COO, {}),
        "ELL": (F.ELL, {"group_dims": the((0,))}),
        "GroupCOO": (F.GroupCOO, {"group_dims": the((0,)), "group_size": the("auto")}),
        "BlockCOO": (F.BlockCOO, {"block_shape": the((1, 2))}),
        "BlockGroupCOO": (F.BlockGroupCOO, {"block_shape": the((1, 2)), "group_dims": the((0,)),
                                            "group_size": the(2)}),
    }  # fmt: skip
    for name, (kind, options) in made.items():
        _converted(name, kind, options)


def _converted(name: str, kind: Any, options: dict[str, Callable[[], Any]]) -> None:
    right(f"{name}.from_dense", kind.from_dense, x=lambda: torch.eye(3, 4), **options)
    right(f"{name}.from_entries", kind.from_entries,
          indices=lambda: (torch.tensor([0, 2]), torch.tensor([3, 0])), values=ones(2),
          shape=the((3, 4)), validate=the(True), **options)  # fmt: skip
    right(f"{name}.from_torch", kind.from_torch, x=lambda: torch.eye(3, 4).to_sparse(),
          validate=the(True), **options)  # fmt: skip
    right(f"{name}.from_scipy", kind.from_scipy, x=_scipy, device=the("cpu"),
          dtype=the(torch.float32), validate=the(True), **options)  # fmt: skip
    right(f"{name}.from_edge_index", kind.from_edge_index, edge_index=edges, weights=ones(4),
          num_nodes=the(4), validate=the(True), **options)  # fmt: skip
    given = {key: make() for key, make in options.items()}

    def one() -> Any:
        return kind.from_dense(torch.eye(3, 4), **given)

    right(f"{name} @", lambda B: one() @ B if isinstance(B, Tensor) else one().matmul(B),
          B=ones(4, 2))  # fmt: skip
    right(f"{name}.matmul", lambda other: one().matmul(other), other=ones(4, 2))
    right(f"{name}.permute", lambda dims: one().permute(dims), dims=the((1, 0)))
    right(f"{name}.transpose", lambda **o: one().transpose(**o), dim0=the(0), dim1=the(1))
    right(f"{name}.to_dense", lambda dtype: one().to_dense(dtype), dtype=the(torch.float64))
    right(f"{name}.ones", lambda dtype: one().ones(dtype), dtype=the(torch.float64))
    right(f"{name}.to_scipy", lambda format: one().to_scipy(format), format=the("csr"))
    right(f"{name}.to_torch", lambda **o: one().to_torch(**o), layout=the(torch.sparse_csr),
          block_shape=the(None))  # fmt: skip
    right(f"{name}.to_format", lambda **o: one().to_format(**o), format=the("GroupCOO"),
          group_size=the(1))  # fmt: skip
    if one().sorted_dims:
        right(f"{name}.segment_pointers", lambda dim: one().segment_pointers(dim), dim=the(0))
    right(f"{name}.with_values", lambda values: one().with_values(values),
          values=lambda: one().values * 2)  # fmt: skip
    for member in one()._arrays:
        right(f"{name} with corrupt {member}", partial(_used, one, member),
              value=partial(_member, one, member))  # fmt: skip
    right(f"{name} with a corrupt shape", partial(_used, one, "shape"),
          value=the((3, 4)))  # fmt: skip


def _scipy() -> Any:
    from scipy.sparse import csr_array

    return csr_array(np.eye(3, 4, dtype=np.float32))


def _used(make: Callable[[], Any], member: str, value: Any) -> Any:
    return corrupt(make(), member, value) @ torch.ones(4, 2)


def _member(make: Callable[[], Any], member: str) -> Any:
    return getattr(make(), member)


def _groups() -> None:
    for name in ("accesses_by_group_size", "best_group_size"):
        right(name, getattr(F, name), occupancy=lambda: torch.tensor([1, 2, 3]))
    for name in ("count_accesses", "count_groups", "count_padding"):
        right(name, getattr(F, name), occupancy=lambda: torch.tensor([1, 2, 3]), group_size=the(2))
    right("suggested_group_size", F.suggested_group_size, occupancy=lambda: torch.tensor([1, 2]),
          rows=the(2))  # fmt: skip
    right("estimate_group_size", F.estimate_group_size, entries=the(9), rows=the(3))
    right("neighbouring_powers", F.neighbouring_powers, size=the(5.0))
    right("suggest", F.suggest, x=lambda: torch.eye(3, 4), group_dims=the((0,)))
    right("draw", F.draw, x=coo, title=the("a title"))
    right("SparseParameter", lambda **o: F.SparseParameter(**o)(), x=coo, requires_grad=the(True))
    right("formats.tune", lambda A, statement, **o: F.tune(A, statement, **o), A=grouped,
          statement=the("C[m,n] = A[m,k] * B[k,n]"), effort=the("none"), B=ones(4, 2)
          )  # fmt: skip


def layer(kind: Any, made: dict[str, Any], called: dict[str, Any]) -> None:
    """A layer, by what it is made from and what it is called with."""

    def run(**given: Any) -> Any:
        built = kind(**{key: given[key] for key in made})
        return built(**{key: given[key] for key in called})

    right(kind.__name__, run, **made, **called)


def _layers() -> None:
    def linear_weight() -> Any:
        return F.GroupCOO.from_dense(torch.eye(3, 4), group_size=1)

    layer(L.SparseLinear, {"weight": linear_weight, "bias": ones(3)}, {"x": ones(2, 4)})
    layer(L.BlockSparseLinear, {"weight": blocked, "bias": ones(4)}, {"x": ones(2, 4)})
    for kind, more in ((L.SparseLinear, {}), (L.BlockSparseLinear, {"block_shape": the((2, 2))})):
        right(f"{kind.__name__}.from_dense", kind.from_dense, layer=lambda: torch.eye(4),
              mask=lambda: torch.eye(4).bool(), **more)  # fmt: skip
        right(f"{kind.__name__}.from_dense by density", kind.from_dense,
              layer=lambda: nn.Linear(4, 4), density=the(0.5), **more)  # fmt: skip
    yes, no = the(True), the(False)
    layer(L.SemiStructuredLinear, {"in_features": the(4), "out_features": the(3), "bias": yes},
          {"x": ones(2, 4)})  # fmt: skip
    right("SemiStructuredLinear.from_dense", L.SemiStructuredLinear.from_dense,
          layer=lambda: nn.Linear(4, 4), mask=lambda: torch.eye(4).bool())  # fmt: skip
    layer(L.SAGEConv,
          {"in_channels": the(2), "out_channels": the(3), "aggr": the("mean"), "normalize": yes,
           "root_weight": yes, "project": yes, "bias": yes},
          {"x": ones(3, 2), "edge_index": edges, "size": the((3, 3)), "num_nodes": the(3)},
          )  # fmt: skip
    layer(L.GraphConv,
          {"in_channels": the(2), "out_channels": the(3), "aggr": the("add"), "bias": yes},
          {"x": ones(3, 2), "edge_index": edges, "edge_weight": ones(4), "num_nodes": the(3)},
          )  # fmt: skip
    layer(L.GCNConv,
          {"in_channels": the(2), "out_channels": the(3), "improved": no, "add_self_loops": yes,
           "normalize": yes, "bias": yes},
          {"x": ones(3, 2), "edge_index": edges, "edge_weight": ones(4)})  # fmt: skip
    layer(L.GATConv,
          {"in_channels": the(2), "out_channels": the(3), "heads": the(2), "concat": yes,
           "negative_slope": the(0.2), "dropout": the(0.0), "add_self_loops": yes, "bias": yes},
          {"x": ones(3, 2), "edge_index": edges})  # fmt: skip
    layer(L.RelationalConv,
          {"in_channels": the(2), "out_channels": the(3), "num_relations": the(2),
           "aggr": the("mean"), "root_weight": yes, "bias": yes},
          {"x": ones(3, 2), "edge_index": edges, "edge_type": places(4, 2)})  # fmt: skip
    layer(L.TensorProduct,
          {"irreps_in1": the("2x0e + 1x1o"), "irreps_in2": the("1x1o"), "irreps_out": the("2x1o"),
           "instructions": lambda: [(0, 0, 0, "uvw", True)], "in1_var": the(None),
           "in2_var": the(None), "out_var": the(None), "irrep_normalization": the("component"),
           "path_normalization": the("element"), "internal_weights": the(None),
           "shared_weights": the(None), "layout": the("mul_ir")},
          {"x": ones(2, 5), "y": ones(2, 3), "weight": the(None)})  # fmt: skip
    layer(L.FullyConnectedTensorProduct,
          {"irreps_in1": the("2x0e + 1x1o"), "irreps_in2": the("1x1o"), "irreps_out": the("2x1o")},
          {"x": ones(2, 5), "y": ones(2, 3), "weight": the(None)})  # fmt: skip
    _irreps()
    _convolutions()


def _irreps() -> None:
    two = {"irreps_in1": the("2x0e + 1x1o"), "irreps_in2": the("2x0e + 1x1o")}
    for kind in (L.FullTensorProduct, L.ElementwiseTensorProduct):
        layer(kind, {**two, "filter_ir_out": lambda: ["0e", "1o"]},
              {"x": ones(2, 5), "y": ones(2, 5)})  # fmt: skip
    layer(L.TensorProductConv,
          {**two, "irreps_out": the("2x0e"), "instructions": lambda: [(0, 0, 0, "uuu", True)],
           "shared_weights": the(False)},
          {"x": ones(3, 5), "y": ones(4, 5), "edge_index": edges, "weight": ones(4, 2),
           "num_nodes": the(3)})  # fmt: skip
    layer(L.Linear,
          {"irreps_in": the("2x0e + 1x1o"), "irreps_out": the("3x0e"), "f_in": the(None),
           "f_out": the(None), "internal_weights": the(True), "shared_weights": the(None),
           "instructions": lambda: [(0, 0)], "biases": lambda: [True],
           "path_normalization": the("path")},
          {"features": ones(2, 5), "weight": the(None), "bias": the(None)})  # fmt: skip
    layer(L.SymmetricContraction,
          {"irreps_in": the("2x0e + 2x1o"), "irreps_out": the("2x0e"), "correlation": the(2),
           "num_elements": the(2)},
          {"x": ones(3, 2, 4), "y": ones(3, 2)})  # fmt: skip
    layer(L.SphericalHarmonics,
          {"degrees": the(2), "normalize": the(True), "normalization": the("norm")},
          {"vectors": ones(5, 3)})  # fmt: skip
    layer(L.BesselBasis,
          {"r_max": the(4.0), "num_basis": the(3), "power": the(6), "trainable": the(False)},
          {"distances": ones(5, 1)})  # fmt: skip
    layer(L.FullyConnectedNet,
          {"hs": lambda: [4, 3, 2], "act": the(nn.functional.silu), "variance_in": the(1),
           "variance_out": the(1), "out_act": the(False)},
          {"x": ones(5, 4)})  # fmt: skip
    layer(L.Gate,
          {"irreps_scalars": the("2x0e"), "act_scalars": lambda: [nn.functional.silu],
           "irreps_gates": the("1x0e"), "act_gates": lambda: [torch.sigmoid],
           "irreps_gated": the("1x1o")},
          {"features": ones(5, 6)})  # fmt: skip
    product = partial(L.FullyConnectedTensorProduct, "2x0e", "1x0e", "2x0e")
    right("TensorProduct.right", lambda **o: product().right(**o), y=ones(3, 1), weight=ones(4))
    right("TensorProduct.weight_view_for_instruction",
          lambda **o: product().weight_view_for_instruction(**o), instruction=the(0),
          weight=ones(4))  # fmt: skip


def _refused(module: Any) -> None:
    """What has nothing of e3nn's inside is refused, as it should be."""
    with suppress(insum.UnsupportedError):
        L.from_e3nn(module)


def _convolutions() -> None:
    made = {"in_channels": the(2), "out_channels": the(2), "kernel_size": the(3), "stride": the(1),
            "padding": the(1), "dilation": the(1), "bias": the(True), "groups": the(1),
            "submanifold": the(False), "transposed": the(False), "output_padding": the(0),
            "indice_key": the(None)}  # fmt: skip
    pool = {"kernel_size": the(2), "stride": the(None), "padding": the(1), "dilation": the(1)}

    def voxel(ndim: int = 3) -> L.SparseTensor:
        coords = voxels()[:3, :ndim] if ndim == 2 else voxels()[1:, -ndim:]
        coords = coords if ndim < 4 else nn.functional.pad(coords, (0, 1))
        if ndim == 1:
            coords = torch.arange(3)[:, None]
        return L.SparseTensor(coords, torch.ones(3, 2), spatial_shape=(4,) * ndim)

    for ndim in (1, 2, 3, 4):
        called = {"x": partial(voxel, ndim), "like": the(None)}
        layer(getattr(L, f"SparseConv{ndim}d"), made, called)
        layer(getattr(L, f"SparseMaxPool{ndim}d"), pool, called)
        layer(getattr(L, f"SparseAvgPool{ndim}d"), {**pool, "count_empty": the(False)}, called)
    layer(L.GlobalPool, {"reduce": the("mean")}, {"x": voxel, "batch_size": the(2)})
    right("SparseConv3d.from_dense", L.SparseConv3d.from_dense, layer=lambda: nn.Conv3d(2, 3, 3),
          submanifold=the(False))  # fmt: skip
    right("SparseSequential", lambda x: L.SparseSequential(nn.ReLU())(x), x=voxel)
    right("SparseModule", lambda: L.SparseModule())
    _voxels(voxel)


def _voxels(voxel: Callable[..., Any]) -> None:
    right("SparseTensor", lambda batch_size, shape, **o: L.SparseTensor(**o).to_dense(
        batch_size, shape=shape), coords=voxels, features=ones(4, 2),
        spatial_shape=the((4, 4, 4)), voxels=the(None), ndim=the(3), batch_size=the(1),
        shape=the(None))  # fmt: skip
    right("SparseTensor.from_dense", L.SparseTensor.from_dense, grid=ones(1, 2, 2, 2, 2))
    right("SparseTensor.with_features", lambda features: voxel().with_features(features),
          features=ones(3, 3))  # fmt: skip
    right("SparseTensor.to", lambda **o: voxel().to(**o), device=the("cpu"),
          dtype=the(torch.float16), non_blocking=the(False))  # fmt: skip
    right("SparseTensor.keep", lambda mask: voxel().keep(mask), mask=lambda: torch.ones(3) > 0)
    right("SparseTensor + other", lambda other: voxel() + other, other=voxel)
    for function in (L.cat, L.batch):
        right(function.__name__, function, tensors=lambda: [voxel(), voxel()])
    right("collate", lambda samples: L.collate(samples), samples=lambda: [voxel(), voxel()])
    right("voxelize", L.voxelize, points=ones(4, 3), size=the(0.5), features=ones(4, 2),
          batch=lambda: torch.tensor([0, 0, 1, 1]), reduce=the("sum"), return_inverse=the(False)
          )  # fmt: skip
    right("devoxelize", L.devoxelize, x=voxel, points=ones(4, 3), size=the(0.5),
          batch=lambda: torch.tensor([0, 0, 1, 1]), mode=the("linear"))  # fmt: skip
    model = lambda: nn.Sequential(L.SparseConv3d(2, 3, 3, bias=False))
    kernel = lambda: {"0.kernel": torch.ones(27, 2, 3)}
    right("load_minkowski", L.load_minkowski, model=model, state=kernel, strict=the(True))
    right("load_torchsparse", L.load_torchsparse, model=model, state=kernel, strict=the(True))
    right("load_spconv", L.load_spconv, model=model, layout=the("KRSC"), strict=the(True),
          state=lambda: {"0.weight": torch.ones(3, 3, 3, 3, 2)})  # fmt: skip
    right("Voxels.of", L.Voxels.of, coords=voxels, spatial_shape=the((4, 4, 4)), ndim=the(3))
    right("Voxels", lambda coords: L.Voxels.of(coords).count, coords=voxels)


def _models() -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4))

    def sparse() -> nn.Sequential:
        made = model()
        L.sparsify(made, 0.5, rows=2)
        return made

    right("sparsify", L.sparsify, model=model, rule=the(0.5), block_shape=the((2, 2)),
          rows=the(4), only_where_faster=the(False))  # fmt: skip
    right("sparsify by name", L.sparsify, model=model, rule=the({"0": 0.5}), rows=the(4))
    right("layouts", L.layouts, model=sparse)
    right("restore", L.restore, model=model, description=lambda: sparse().state_dict())
    right("restore by layouts", L.restore, model=model, description=lambda: L.layouts(sparse()))
    right("a layout", lambda **o: L.restore(model(), {"0.weight": o}), format=the("COO"),
          shape=the([4, 4]), arrays=the({"values": ["float32", 2], "indices_0": ["int32", 2],
                                         "indices_1": ["int32", 2]}))  # fmt: skip


def _arithmetic() -> None:
    right("format * tensor", lambda B: coo().__mul__(B), B=ones(3, 4))
    right("format + format", lambda B: coo().__add__(B), B=coo)
    right("format / number", lambda B: coo().__truediv__(B), B=the(2.0))
    right("format[key]", lambda key: coo()[key], key=the((0, slice(1, 3))))
    right("format.sum", lambda dim, keepdim: coo().sum(dim, keepdim), dim=the(0),
          keepdim=the(True))  # fmt: skip
    right("format.size", lambda dim: coo().size(dim), dim=the(0))


def _functions() -> None:
    right("adjacency", L.adjacency, edge_index=edges, edge_weight=ones(4), num_nodes=the(3))
    right("block_mask", L.block_mask, weight=ones(4, 4), block_shape=the((2, 2)), density=the(0.5))
    right("magnitude_mask", L.magnitude_mask, weight=ones(4, 4), density=the(0.5))
    right("semi_structured_mask", L.semi_structured_mask, weight=ones(4, 4))
    right("gcn_norm", L.gcn_norm, edge_index=edges, edge_weight=ones(4), num_nodes=the(3),
          improved=the(False), add_self_loops=the(True), dtype=the(torch.float32))  # fmt: skip
    right("edge_softmax", L.edge_softmax, scores=ones(4, 2), edge_index=edges, num_nodes=the(3))
    right("graph_attention", L.graph_attention, scores=ones(4, 2), x=ones(3, 2, 5),
          edge_index=edges, num_nodes=the(3))  # fmt: skip
    for name, make in {"propagate": edges, "propagate over a format": coo}.items():
        right(name, L.propagate, edge_index=make, x=ones(4, 2),
              edge_weight=ones(4) if make is edges else the(None), aggr=the("sum"),
              num_nodes=the(4) if make is edges else the(None))  # fmt: skip
    right("spmm", L.spmm, A=coo, B=ones(4, 2))
    right("spmm of torch", L.spmm, A=lambda: torch.eye(3, 4).to_sparse_csr(), B=ones(4, 2))
    right("sddmm", L.sddmm, A=coo, X=ones(3, 2), Y=ones(2, 4))
    right("spherical_harmonics", L.spherical_harmonics, degrees=the(2), vectors=ones(5, 3),
          normalize=the(True), normalization=the("norm"))  # fmt: skip
    right("spherical_harmonics by irreps", L.spherical_harmonics, degrees=the("0e + 2e"),
          vectors=ones(5, 3))  # fmt: skip
    right("from_e3nn", _refused, module=lambda: nn.Sequential(nn.Linear(2, 2)))
    right("swap", L.swap, model=lambda: nn.Sequential(nn.Linear(2, 2)))
    right("wigner_3j", L.wigner_3j, l1=the(1), l2=the(1), l3=the(2))
    right("Irrep", L.Irrep, l=the(1), p=the(1))
    right("Irrep *", lambda other: L.Irrep(1, 1) * other, other=lambda: L.Irrep(1, -1))
    right("Irrep.of", L.Irrep.of, irrep=the("1o"))
    right("Irreps", L.Irreps, terms=lambda: ((2, L.Irrep(0, 1)),))
    right("Irreps.of", L.Irreps.of, irreps=the("2x0e + 1o"))


for _fill in (_statements, _einsums, _formats, _groups, _layers, _models, _arithmetic, _functions):
    _fill()


# --- trials ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What became of one trial: the call, what was replaced, and what is wrong about the result,
    if anything is.
    """

    seed: int
    name: str
    replaced: tuple[tuple[str, str], ...]
    kind: str = "a result"
    wrong: str = ""
    trace: str = field(default="", compare=False)

    def __str__(self) -> str:
        given = ", ".join(f"{name} is {what}" for name, what in self.replaced)
        return f"hostile trial {self.seed}: {self.name} where {given}: {self.wrong or self.kind}"


def attempt(seed: int, names: tuple[str, ...] = ()) -> Outcome:
    """One trial; nothing is raised.

    >>> attempt(3).wrong
    ''
    """
    source = random.Random(seed)
    name = source.choice(names or tuple(CALLS))
    torch.manual_seed(seed)
    call = CALLS[name]()
    count = min(len(call.arguments), 1 if source.random() < 0.8 else 2)
    replaced = []
    for key in source.sample(sorted(call.arguments), count):
        call.arguments[key], what = _replacement(call.arguments[key], source)
        replaced.append((key, what))
    outcome = Outcome(seed, name, tuple(replaced))
    before = {key: snapshot(value) for key, value in call.arguments.items()}
    try:
        call.run(**call.arguments)
    except insum.InsumError as error:
        changed = [k for k, v in call.arguments.items() if snapshot(v) != before[k]]
        wrong = f"{', '.join(changed)} was changed by a call that failed" if changed else ""
        wrong = wrong if str(error).strip() else "no message"
        return replace(outcome, kind=type(error).__name__, wrong=wrong)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return replace(outcome, wrong=text, trace=traceback.format_exc())
    return outcome


def _replacement(value: Any, source: random.Random) -> tuple[Any, str]:
    if isinstance(value, Tensor) and value.layout == torch.strided and source.random() < 0.6:
        what = source.choice(sorted(CHANGES))
        try:
            return CHANGES[what](value), what
        except Exception:  # not every tensor can be made so
            pass
    what = source.choice(sorted(THINGS))
    return THINGS[what](), what


def snapshot(value: Any) -> Any:
    """What can be told of an argument that a call may not change."""
    if not isinstance(value, Tensor) or type(value) not in (Tensor, nn.Parameter):
        return None
    if value.layout != torch.strided or value.device.type != "cpu" or value.is_nested:
        return None
    version = None if value.is_inference() else value._version
    return bytes(value.detach().untyped_storage()), version, value.shape, value.stride()


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's warnings about the tensors above."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def attempts(trials: int, seed: int = 0, names: tuple[str, ...] = ()) -> list[Outcome]:
    """That many trials, from a seed on.

    >>> [str(outcome) for outcome in attempts(20) if outcome.wrong]
    []
    """
    with quiet():
        return [attempt(seed + n, names) for n in range(trials)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Calls with arguments that no one should pass.")
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="names of calls, separated by commas")
    parser.add_argument("--trace", action="store_true", help="print where each went wrong")
    asked = parser.parse_args()
    names = tuple(filter(None, asked.only.split(",")))
    found = 0
    with quiet():
        for seed in range(asked.seed, asked.seed + asked.trials):
            outcome = attempt(seed, names)
            if outcome.wrong:
                found += 1
                print(outcome, flush=True)
                if asked.trace:
                    print(outcome.trace)
    print(f"{asked.trials} trials, {found} found")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
