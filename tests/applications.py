"""The four applications as statements with tensors, at any size, with their gradients' statements
and a float64 reference.

Nothing here knows of kernels. Gradient statements come from `insum.ops.gradients`, exactly as the
torch op gets them; references are written with plain torch operations, and their gradients come
from torch's own autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import insum
from insum.call.prepared import Kinds
from insum.call.request import Request, request_of
from insum.formats import COO, BlockCOO, BlockGroupCOO, GroupCOO
from insum.lang.bind import Problem
from insum.ops.eager import contract
from insum.ops.gradients import ForwardCall, gradients


@dataclass(frozen=True, eq=False)
class Call:
    """One statement with its arguments, as the op gets it."""

    name: str
    request: Request
    values: Mapping[str, Tensor]

    def problem(self) -> Problem:
        return self.request.bind(self.values)

    def run(self) -> Tensor:
        return contract(self.request, self.values)


@dataclass(frozen=True, eq=False)
class Application:
    """A forward statement with tensors. ``formula`` computes the same from float64 tensors;
    ``wanted`` are differentiated.
    """

    name: str
    statement: str
    values: Mapping[str, Tensor]
    sizes: Mapping[str | int, int]
    padded: tuple[str, ...]
    wanted: tuple[str, ...]
    formula: Callable[[Mapping[str, Tensor]], Tensor]

    @property
    def forward(self) -> Call:
        return Call(
            self.name, request_of(self.statement, None, self.sizes, self.padded), self.values
        )

    def upstream(self, *, filled: bool = True) -> Tensor:
        """A gradient of the output."""
        problem = self.forward.problem()
        out = torch.empty(
            [int(s) for s in problem.shape], dtype=problem.dtype, device=problem.device
        )
        return out.normal_(generator=_generator(problem.device, 1)) if filled else out

    def gradients(self, upstream: Tensor) -> dict[str, Call]:
        """The calls that backward makes, one for each of ``wanted``."""
        calls: dict[str, Call] = {}
        for name in self.wanted:

            def record(
                kinds: Kinds, values: Mapping[str, Any], sizes: tuple[Any, ...], name: str = name
            ) -> Tensor:
                assert name not in calls, f"the gradient of {name} takes more than one statement"
                request = kinds.form.request(sizes)
                calls[name] = Call(f"{self.name}, gradient of {name}", request, values)
                return torch.empty(())

            extents = self.forward.request.bind(self.values, upstream).extents
            known = ForwardCall(self.forward.request.form, {}, extents)
            gradients(known, self.values, upstream, [name], None, None, record)
        return calls

    def calls(self, *, filled: bool = True) -> list[Call]:
        """Forward and backward."""
        return [self.forward, *self.gradients(self.upstream(filled=filled)).values()]

    def run(self) -> Tensor:
        """Through the public function."""
        return insum.insum(
            self.statement, sizes=dict(self.sizes), padded=self.padded, **self.values
        )

    def exact(self) -> dict[str, Tensor]:
        return {
            n: v.detach().double() if v.is_floating_point() else v.long()
            for n, v in self.values.items()
        }

    def expected(self) -> Tensor:
        return self.formula(self.exact())

    def expected_gradients(self, upstream: Tensor) -> dict[str, Tensor]:
        values = self.exact()
        for name in self.wanted:
            values[name].requires_grad_()
        found = torch.autograd.grad(
            self.formula(values), [values[n] for n in self.wanted], upstream.double()
        )
        return dict(zip(self.wanted, found, strict=True))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """In the 2-norm; infinite where anything is not finite."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} and {tuple(expected.shape)}"
    if not bool(torch.isfinite(actual).all()):
        return float("inf")
    return (
        float((actual.double() - expected).norm() / expected.norm().clamp(min=1e-30))
        if actual.numel()
        else 0.0
    )


def _generator(device: torch.device | str, seed: int) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


@dataclass(frozen=True)
class Maker:
    """Tensors of one kind: ``filled`` ones hold numbers, others are not even touched, as compiling
    needs no values.
    """

    dtype: torch.dtype
    device: str
    filled: bool
    generator: torch.Generator

    @staticmethod
    def of(dtype: torch.dtype, device: str, filled: bool) -> Maker:
        return Maker(dtype, device, filled, _generator(device, 0))

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        out = torch.empty(shape, dtype=self.dtype, device=self.device)
        return out.normal_(generator=self.generator).mul_(scale) if self.filled else out

    def chance(self, *shape: int) -> Tensor:
        return torch.rand(shape, device=self.device, generator=self.generator)

    def below(self, high: int, *shape: int) -> Tensor:
        return torch.randint(
            0, high, shape, device=self.device, generator=self.generator, dtype=torch.int32
        )

    def permutation(self, n: int) -> Tensor:
        return torch.randperm(n, device=self.device, generator=self.generator).int()

    def holes(self, values: Tensor, absent: Tensor) -> Tensor:
        """NaN in the values of absent entries: nothing may come of them."""
        if not self.filled:
            return values
        return torch.where(
            absent.reshape(*absent.shape, *[1] * (values.dim() - absent.dim())),
            float("nan"),
            values,
        )


# --- block SpMM -----------------------------------------------------------------------------------


def block_spmm(
    *,
    rows: int,
    columns: int,
    block: int | tuple[int, int],
    n: int,
    density: float,
    group: int = 0,
    dtype: torch.dtype,
    device: str = "cpu",
    filled: bool = True,
) -> Application:
    """``C = A @ B`` with A in BlockCOO, or in BlockGroupCOO of this group size; the second row of
    blocks is empty, the first full.
    """
    make = Maker.of(dtype, device, filled)
    mask = make.chance(rows, columns) < density
    mask[0], mask[min(1, rows - 1)] = True, False
    at = mask.nonzero().int()
    sides = (block, block) if isinstance(block, int) else block
    values = make.normal(len(at), *sides, scale=sides[1] ** -0.5)
    shape = (rows * sides[0], columns * sides[1])
    coo = BlockCOO(values, (at[:, 0].contiguous(), at[:, 1].contiguous()), shape, sides)
    b = make.normal(columns, sides[1], n)
    if not group:
        names = {"AM": coo.indices[0], "AV": coo.values, "AK": coo.indices[1], "B": b}
        return Application(
            "block SpMM, BlockCOO",
            "C[AM[p],bm,n] += AV[p,bm,bk] * B[AK[p],bk,n]",
            names,
            {0: rows},
            (),
            ("AV", "B"),
            _blocks(rows),
        )
    a = coo.to_format(BlockGroupCOO, block_shape=sides, group_size=group)
    slots = a.slot_indices[0]
    names = {"AM": a.group_indices[0], "AV": make.holes(a.values, slots < 0), "AK": slots, "B": b}
    statement = "C[AM[p],bm,n] += AV[p,q,bm,bk] * B[AK[p,q],bk,n]"
    return Application(
        "block SpMM, BlockGroupCOO",
        statement,
        names,
        {0: rows},
        ("AK",),
        ("AV", "B"),
        _block_groups(rows),
    )


def _blocks(rows: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
    def formula(v: Mapping[str, Tensor]) -> Tensor:
        parts = v["AV"] @ v["B"][v["AK"]]
        return parts.new_zeros(rows, *parts.shape[1:]).index_add(0, v["AM"], parts)

    return formula


def _block_groups(rows: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
    def formula(v: Mapping[str, Tensor]) -> Tensor:
        there = (v["AK"] >= 0)[:, :, None, None]
        parts = (
            torch.where(there, v["AV"], 0.0) @ torch.where(there, v["B"][v["AK"].clamp(min=0)], 0.0)
        ).sum(1)
        return parts.new_zeros(rows, *parts.shape[1:]).index_add(0, v["AM"], parts)

    return formula


# --- unstructured SpMM ----------------------------------------------------------------------------


def spmm(
    *,
    rows: int,
    columns: int,
    n: int,
    entries: int,
    heavy: int = 0,
    group: int = 0,
    dtype: torch.dtype,
    device: str = "cpu",
    filled: bool = True,
) -> Application:
    """``C = A @ B`` with A in COO or GroupCOO. ``heavy`` further entries lie in row 2, so that it
    is far longer than the others; row 1 is empty.
    """
    make = Maker.of(dtype, device, filled)
    row = make.below(rows, entries)
    row = torch.where(row == 1, 0, row)
    row = torch.cat([row, torch.full((heavy,), min(2, rows - 1), dtype=torch.int32, device=device)])
    column = make.below(columns, entries + heavy)
    key = torch.unique(row.long() * columns + column)  # sorted, every place once
    row, column = (key // columns).int(), (key % columns).int()
    b = make.normal(columns, n)
    coo = COO(make.normal(len(key), scale=0.3), (row, column), (rows, columns))
    if not group:
        names = {"AM": coo.indices[0], "AV": coo.values, "AK": coo.indices[1], "B": b}
        return Application(
            "SpMM, COO",
            "C[AM[p],n] += AV[p] * B[AK[p],n]",
            names,
            {0: rows},
            (),
            ("AV", "B"),
            _entries(rows),
        )
    a = coo.to_format(GroupCOO, group_size=group)
    slots = a.slot_indices[0]
    names = {"AM": a.group_indices[0], "AV": make.holes(a.values, slots < 0), "AK": slots, "B": b}
    return Application(
        "SpMM, GroupCOO",
        "C[AM[p],n] += AV[p,q] * B[AK[p,q],n]",
        names,
        {0: rows},
        ("AK",),
        ("AV", "B"),
        _groups(rows),
    )


def _entries(rows: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
    return lambda v: (
        v["B"]
        .new_zeros(rows, v["B"].shape[1])
        .index_add(0, v["AM"], v["AV"][:, None] * v["B"][v["AK"]])
    )


def _groups(rows: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
    def formula(v: Mapping[str, Tensor]) -> Tensor:
        there = v["AK"] >= 0
        parts = torch.where(there, v["AV"], 0.0)[:, None] @ torch.where(
            there[:, :, None], v["B"][v["AK"].clamp(min=0)], 0.0
        )
        return v["B"].new_zeros(rows, v["B"].shape[1]).index_add(0, v["AM"], parts[:, 0])

    return formula


# --- sparse convolution ---------------------------------------------------------------------------


def convolution(
    *,
    voxels: int,
    offsets: int,
    inputs: int,
    outputs: int,
    layout: str,
    density: float = 0.5,
    one_to_one: bool = True,
    symmetric: bool = False,
    kinds: int = 0,
    group: int = 8,
    dtype: torch.dtype,
    device: str = "cpu",
    filled: bool = True,
) -> Application:
    """Sparse convolution. ``layout``: ``by voxel`` and ``by offset`` are neighbour tables,
    ``grouped`` lists pairs of voxels for each offset.

    In a real table an offset leads from a voxel to at most one voxel, and no two voxels to the
    same: ``one_to_one``. Where outputs are the inputs' voxels, the opposite offset leads back:
    ``symmetric``. Surfaces have voxels of few ``kinds``, each with offsets of its own.
    """
    make = Maker.of(dtype, device, filled)
    columns = [
        make.permutation(voxels) if one_to_one else make.below(voxels, voxels)
        for _ in range(offsets)
    ]
    table = torch.stack([torch.where(make.chance(voxels) < density, c, -1) for c in columns], 1)
    if kinds:
        has = make.chance(kinds * offsets).reshape(kinds, offsets) < density
        table = torch.where(has[make.below(kinds, voxels).long()], table, -1)
    table[0] = -1  # a voxel without neighbours
    for z in range(offsets // 2 if symmetric else 0):
        here = (table[:, z] >= 0).nonzero()[:, 0]
        table[:, offsets - 1 - z] = -1
        table[table[here, z].long(), offsets - 1 - z] = here.to(table.dtype)
    if symmetric:
        table[:, offsets // 2] = torch.arange(voxels, device=table.device)
    features, weights = (
        make.normal(voxels, inputs),
        make.normal(offsets, inputs, outputs, scale=inputs**-0.5),
    )
    wanted = ("In", "W")
    if layout == "by voxel":
        names = {"In": features, "Nb": table, "W": weights}
        return Application(
            "convolution by voxel",
            "Out[x,m] += In[Nb[x,z],c] * W[z,c,m]",
            names,
            {},
            ("Nb",),
            wanted,
            lambda v: _convolved(v, v["Nb"]),
        )
    if layout == "by offset":
        names = {"In": features, "Nb": table.t().contiguous(), "W": weights}
        return Application(
            "convolution by offset",
            "Out[x,m] += In[Nb[z,x],c] * W[z,c,m]",
            names,
            {},
            ("Nb",),
            wanted,
            lambda v: _convolved(v, v["Nb"].t()),
        )
    assert layout == "grouped", layout
    x, y, z = _pairs(table, group)
    statement = "Out[X[p,q],m] += In[Y[p,q],c] * W[Z[p],c,m]"
    names = {"X": x, "In": features, "Y": y, "Z": z, "W": weights}
    return Application(
        "convolution, grouped",
        statement,
        names,
        {0: voxels},
        ("X", "Y"),
        wanted,
        _grouped_convolution(voxels),
    )


def _pairs(table: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs (x, y) of each offset z, in groups of one size that -1 fills up: ``X[p,q]``,
    ``Y[p,q]``, ``Z[p]``.
    """
    xs, ys, zs = [], [], []
    for z in range(table.shape[1]):
        x = (table[:, z] >= 0).nonzero()[:, 0]
        y = table[x, z].long()
        fill = -len(x) % group
        xs.append(torch.nn.functional.pad(x, (0, fill), value=-1).reshape(-1, group))
        ys.append(torch.nn.functional.pad(y, (0, fill), value=-1).reshape(-1, group))
        zs.append(torch.full((len(xs[-1]),), z, device=table.device))
    return torch.cat(xs).int(), torch.cat(ys).int(), torch.cat(zs).int()


def _convolved(v: Mapping[str, Tensor], table: Tensor) -> Tensor:
    out = v["In"].new_zeros(table.shape[0], v["W"].shape[2])
    for z in range(table.shape[1]):
        there = (table[:, z] >= 0)[:, None]
        out = out + torch.where(there, v["In"][table[:, z].clamp(min=0)], 0.0) @ v["W"][z]
    return out


def _grouped_convolution(voxels: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
    def formula(v: Mapping[str, Tensor]) -> Tensor:
        there = v["X"] >= 0
        parts = torch.where(there[:, :, None], v["In"][v["Y"].clamp(min=0)], 0.0) @ v["W"][v["Z"]]
        return parts.new_zeros(voxels, parts.shape[2]).index_add(0, v["X"][there], parts[there])

    return formula


# --- equivariant tensor product -------------------------------------------------------------------

#: Paths of 0e+1o times 0e+1o into 0e+1o: (i, j, k) of each nonzero, path by path.
_PATHS = [
    [(0, 0, 0)],
    [(1 + i, 0, 1 + i) for i in range(3)],
    [(1 + i, 1 + i, 0) for i in range(3)],
    [(0, 1 + i, 1 + i) for i in range(3)],
]


def tensor_product(
    *,
    batch: int,
    channels: int,
    constant: bool,
    dtype: torch.dtype,
    device: str = "cpu",
    filled: bool = True,
) -> Application:
    """Features of four components times a filter of four into features of four; the pattern is
    padded, and perhaps promised to be constant.
    """
    make = Maker.of(dtype, device, filled)
    width, size = max(map(len, _PATHS)), 4
    rows = [[*path, *[(-1, -1, -1)] * (width - len(path))] for path in _PATHS]
    index = torch.tensor(rows, device=device, dtype=torch.int32)
    names = {name: index[:, :, d].contiguous() for d, name in enumerate("IJK")}
    names["L"] = torch.arange(len(rows), device=device, dtype=torch.int32)
    if constant:
        for tensor in names.values():
            insum.constant(tensor)
    names |= {
        "V": make.holes(
            torch.full((len(rows), width), 0.57, dtype=dtype, device=device), names["I"] < 0
        ),
        "X": make.normal(batch, size, channels),
        "Y": make.normal(batch, size),
        "W": make.normal(batch, len(rows), channels, channels, scale=channels**-0.5),
    }
    statement = "Z[b,I[p,q],w] += V[p,q] * X[b,J[p,q],u] * Y[b,K[p,q]] * W[b,L[p],u,w]"
    name = "tensor product" + (", constant" if constant else "")
    return Application(
        name,
        statement,
        names,
        {1: size},
        ("I", "J", "K"),
        ("X", "Y", "W"),
        lambda v: _tensor_product(v, size),
    )


def _tensor_product(v: Mapping[str, Tensor], size: int) -> Tensor:
    out = v["X"].new_zeros(v["X"].shape[0], size, v["W"].shape[3])
    for p in range(v["I"].shape[0]):
        there = v["I"][p] >= 0
        i, j, k = (v[name][p][there] for name in "IJK")
        part = (v["V"][p][there] * v["Y"][:, k])[:, :, None] * (v["X"][:, j] @ v["W"][:, v["L"][p]])
        out = out.index_add(1, i, part)
    return out


# --- sets of them ---------------------------------------------------------------------------------


def tiny(device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Application]:
    """Sizes for Triton's interpreter, none of them a multiple of a tile where that is possible."""
    kind: dict[str, Any] = {"dtype": dtype, "device": device}
    return [
        block_spmm(rows=4, columns=5, block=16, n=40, density=0.4, **kind),
        block_spmm(rows=4, columns=5, block=16, n=40, density=0.4, group=2, **kind),
        spmm(rows=20, columns=30, n=24, entries=90, **kind),
        spmm(rows=20, columns=30, n=24, entries=90, group=3, **kind),
        convolution(voxels=50, offsets=3, inputs=24, outputs=20, layout="by voxel", **kind),
        convolution(
            voxels=50, offsets=3, inputs=24, outputs=20, layout="by voxel", one_to_one=False, **kind
        ),
        convolution(voxels=50, offsets=3, inputs=24, outputs=20, layout="by offset", **kind),
        convolution(voxels=50, offsets=3, inputs=24, outputs=20, layout="grouped", **kind),
        tensor_product(batch=2, channels=16, constant=False, **kind),
        tensor_product(batch=2, channels=16, constant=True, **kind),
    ]


def smallest(device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Application]:
    """Sizes at which even an interpreted kernel without matrix instructions ends soon."""
    kind: dict[str, Any] = {"dtype": dtype, "device": device}
    return [
        block_spmm(rows=3, columns=3, block=4, n=5, density=0.4, group=2, **kind),
        spmm(rows=5, columns=6, n=7, entries=12, group=2, **kind),
        convolution(voxels=7, offsets=3, inputs=3, outputs=5, layout="by voxel", **kind),
        convolution(voxels=7, offsets=3, inputs=3, outputs=5, layout="grouped", group=2, **kind),
    ]


def usual(
    device: str = "cpu", *, filled: bool = True, half: torch.dtype = torch.float16
) -> list[Application]:
    """Sizes and dtypes as in use, so that plans and default configs are those that matter."""
    kind: dict[str, Any] = {"device": device, "filled": filled}
    return [
        block_spmm(rows=128, columns=128, block=32, n=4096, density=0.1, dtype=half, **kind),
        block_spmm(
            rows=128, columns=128, block=32, n=4096, density=0.1, group=4, dtype=half, **kind
        ),
        spmm(
            rows=50_000,
            columns=50_000,
            n=128,
            entries=300_000,
            heavy=3000,
            dtype=torch.float32,
            **kind,
        ),
        spmm(
            rows=5000, columns=5000, n=128, entries=50_000, heavy=3000, group=4, dtype=half, **kind
        ),
        convolution(
            voxels=4000,
            offsets=27,
            inputs=128,
            outputs=128,
            layout="by voxel",
            kinds=6,
            density=0.4,
            dtype=half,
            **kind,
        ),
        convolution(
            voxels=4000, offsets=27, inputs=128, outputs=128, layout="by offset", dtype=half, **kind
        ),
        convolution(
            voxels=4000,
            offsets=27,
            inputs=128,
            outputs=128,
            layout="grouped",
            group=32,
            dtype=half,
            **kind,
        ),
        tensor_product(batch=2000, channels=64, constant=False, dtype=torch.float32, **kind),
        tensor_product(batch=2000, channels=64, constant=True, dtype=torch.float32, **kind),
    ]
