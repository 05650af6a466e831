"""Statements over DTensors in four processes against one: values, gradients of three orders,
placements, compiled and in place.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
)

import insum
from distributed import drawn
from distributed.drawn import OPTIONS, compare, derivatives, leaf, same
from insum.testing import Case, draw_cases

S, R, P = Shard, Replicate(), Partial()
#: Where tensors are; and whether to take the time for everything.
DEVICE, FULL = os.environ.get("INSUM_DEVICE", "cpu"), bool(os.environ.get("INSUM_FUZZ"))
SPMM = "C[AM[p],n] = AV[p] * B[AK[p],n]"


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(DEVICE)


def places(most: int, *shape: int) -> Tensor:
    return torch.randint(most, shape).to(DEVICE)


def spmm() -> dict[str, Tensor]:
    """A sparse matrix of 12 x 9 and a dense one with 8 columns."""
    return {"AM": places(12, 40), "AK": places(9, 40), "AV": numbers(40), "B": numbers(9, 8)}


def experts() -> dict[str, Tensor]:
    return {"G": numbers(10, 4), "X": numbers(10, 6), "W": numbers(4, 6, 5)}


def table() -> dict[str, Tensor]:
    return {"Nb": places(13, 11, 5) - 1, "In": numbers(12, 6), "W": numbers(5, 6, 8)}


MOE, CONV = "Y[t,o] = G[t,e] * X[t,i] * W[e,i,o]", "Out[x,m] = In[Nb[x,z],c] * W[z,c,m]"
MAX, MEAN = "C[AM[p],n] max= B[AK[p],n]", "C[AM[p],n] mean= B[AK[p],n]"
#: A statement, its tensors, how they are placed, how the result is, and its options.
CASES: dict[str, tuple[str, Callable[[], dict[str, Tensor]], str, Placement, dict[str, Any]]] = {
    "nonzeros": (SPMM, spmm, "S0 S0 S0 R", P, {"out_shape": (12, 8)}),
    "columns": (SPMM, spmm, "R R R S1", S(1), {"out_shape": (12, 8)}),
    "rows of B": (SPMM, spmm, "R R R S0", P, {"sizes": {"AM[p]": 12}}),
    "a partial factor": (SPMM, spmm, "R R P R", P, {"sizes": {"AM[p]": 12}}),
    "indices alone": (SPMM, spmm, "S0 R R R", P, {"sizes": {"AM[p]": 12}}),
    "offsets": (CONV, table, "S0 R R", S(0), {"padded": ("Nb",)}),
    "output channels": (CONV, table, "R R S2", S(1), {"padded": ("Nb",)}),
    "input channels": (CONV, table, "R S1 S1", P, {"padded": ("Nb",)}),
    "experts": (MOE, experts, "S1 R S0", P, {}),
    "tokens": (MOE, experts, "S0 S0 R", S(0), {}),
    "means": (MEAN, spmm, "S0 S0 - R", P, {"out_shape": (12, 8)}),
    "maxima": (MAX, spmm, "S0 S0 - R", Partial("max"), {"out_shape": (12, 8)}),
}


#: Those that are run each time; the others have their rules tested without processes.
OFTEN = (
    "nonzeros",
    "rows of B",
    "a partial factor",
    "output channels",
    "experts",
    "maxima",
    "means",
)


def placement(text: str) -> Placement:
    return R if text == "R" else P if text == "P" else S(int(text[1:]))


def placed(tensor: Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    return drawn.placed(tensor.to(DEVICE), mesh, list(placements))


def line() -> DeviceMesh:
    return init_device_mesh(DEVICE, (dist.get_world_size(),))


def square() -> DeviceMesh:
    ranks = dist.get_world_size()
    return init_device_mesh(DEVICE, (2, ranks // 2) if ranks > 1 else (1, 1))


def agree(
    statement: str,
    values: dict[str, Tensor],
    where: dict[str, Sequence[Placement]],
    mesh: DeviceMesh,
    most: int = 2,
    **options: Any,
) -> tuple[Placement, ...]:
    """Raise unless all ranks together find what one does; gives the placement of the result."""

    def run(values: Mapping[str, Any]) -> Tensor:
        return insum.insum(statement, **options, **values)

    spread = {n: leaf(placed(v, mesh, *where[n]).detach()) for n, v in values.items()}
    got = derivatives(run, spread, lambda t: leaf(placed(t, mesh, *[R] * mesh.ndim)), most)
    plain = {n: leaf(v.clone()) for n, v in values.items()}
    same(got, derivatives(run, plain, lambda t: leaf(t.to(DEVICE)), most))
    return tuple(got[0].placements)


def check_every_role() -> None:
    mesh = line()
    for name, (statement, make, where, output, options) in CASES.items():
        if not (FULL or name in OFTEN):
            continue
        values = {n: v for (n, v), w in zip(make().items(), where.split()) if w != "-"}
        kinds = [placement(w) for w in where.split() if w != "-"]
        given: Any = {n: [p] for n, p in zip(values, kinds)}
        found = agree(statement, values, given, mesh, 3 if name == "nonzeros" else 2, **options)
        assert found == (output,), (name, found)


def check_a_mesh_of_two_dimensions() -> None:
    mesh = square()
    where: Any = {"AM": (S(0), R), "AK": (S(0), R), "AV": (S(0), R), "B": (R, S(1))}
    assert agree(SPMM, spmm(), where, mesh, out_shape=(12, 8)) == (P, S(1))


def check_drawn_statements() -> None:
    """The same draws on every rank."""
    meshes = line(), square()
    for k, case in enumerate(draw_cases(40 if FULL else 4, seed=11, **OPTIONS)):
        compare(case.to(DEVICE), meshes[k % 2], random.Random(k), nullcontext(), op=k % 4 == 3)


def check_what_is_complex() -> None:
    indices = {"AM": torch.randint(5, (9,)), "AK": torch.randint(4, (9,))}
    factors = {"AV": numbers(9) + 1j * numbers(9), "B": numbers(4, 8) + 1j * numbers(4, 8)}
    statement = "C[AM[p],n] = AV[p] * conj(B[AK[p],n])"
    case = Case(statement, {**indices, **factors}, {"AM[p]": 5}).to(DEVICE)
    for k in range(3 if FULL else 1):
        compare(case, line(), random.Random(k), nullcontext())


def check_accumulation_in_place() -> None:
    mesh, values = line(), spmm()
    start = numbers(12, 8)
    for operator in ("+=", "max=", "min=") if FULL else ("+=", "max="):
        statement = SPMM.replace("=", operator)
        want = insum.insum(statement, C=start.clone(), **values)
        for place in (R, S(0), S(1)) if FULL else (S(0),):
            C = placed(start.clone(), mesh, place)
            spread = {n: placed(v, mesh, R if n == "B" else S(0)) for n, v in values.items()}
            assert insum.insum(statement, C=C, **spread) is C
            assert C.placements == (place,)
            same([C], [want])
            same(
                into(statement, placed(start, mesh, place), spread), into(statement, start, values)
            )


def check_accumulation_where_the_output_is() -> None:
    """Fewer rows than ranks, sums and extrema that are pending, dtypes that are sent in others."""
    mesh, A = line(), numbers(3, 5).mul(4).round()
    for operator, dtype, place in (
        ("+=", torch.float64, S(0)),
        ("+=", torch.float64, P),
        ("+=", torch.int16, S(0)),
        ("max=", torch.float64, S(0)),
        ("max=", torch.float64, Partial("min")),
        ("min=", torch.int16, R),
    ):
        statement, values = f"y[i] {operator} A[i,j]", A.to(dtype)
        C = placed(torch.ones(3, device=DEVICE).to(dtype), mesh, R if place.is_partial() else place)
        if place == P:
            C = DTensor.from_local(C.to_local() / mesh.size(), mesh, [P])
        elif place.is_partial():
            C = DTensor.from_local(C.to_local() + dist.get_rank(), mesh, [place])
        source = placed(values, mesh, S(1) if operator != "+=" else S(0))
        assert insum.insum(statement, y=C, A=source) is C and C.placements == (place,)
        want = insum.insum(statement, y=torch.ones(3, device=DEVICE).to(dtype), A=values)
        wide = torch.int64 if dtype == torch.int16 else dtype
        same([C.to(wide)], [want.to(wide)])


def into(statement: str, start: Tensor, values: Mapping[str, Any]) -> list[Tensor]:
    """Gradients of what is accumulated, by where it began and by one factor."""
    first, factor = leaf(start.detach().clone()), leaf(values["B"].detach().clone())
    found = insum.insum(statement, C=first * 2, **{**values, "B": factor})
    return list(torch.autograd.grad(found.square().sum(), (first, factor)))


def check_a_described_output() -> None:
    mesh, values = line(), spmm()
    spread = {n: placed(v, mesh, R if n == "B" else S(0)) for n, v in values.items()}
    like = placed(torch.empty_like(numbers(12, 8)), mesh, S(0))
    got = insum.insum(SPMM, C=like, **spread)
    assert got.placements == (S(0),)
    same([got], [insum.insum(SPMM, C=torch.empty_like(numbers(12, 8)), **values)])


def check_compiled_functions() -> None:
    if not FULL:  # in one process: tests/distributed/test_dtensors.py
        return
    mesh, values = line(), spmm()

    def run(**values: Any) -> Tensor:
        return insum.insum(SPMM, out_shape=(12, 8), **values).relu()

    spread: Any = {n: placed(v, mesh, R if n == "B" else S(0)) for n, v in values.items()}
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    found = []
    for function, given in ((compiled, spread), (run, values)):
        wrt = [given[n].requires_grad_() for n in ("AV", "B")]
        result = function(**given)
        found.append([result, *torch.autograd.grad(result.square().sum(), wrt)])
    same(*found)


def check_messages_are_the_same_on_every_rank() -> None:
    mesh, values = line(), spmm()
    spread: Any = {n: placed(v, mesh, R) for n, v in values.items()}
    said = ""
    try:
        insum.insum(SPMM, out_shape=(12, 8), **{**spread, "AK": values["AK"]})
    except insum.DeviceError as error:
        said = str(error)
    assert "AK is a torch.Tensor, but AM is a DTensor, placed [Replicate()]" in said
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, said)
    assert set(every) == {said}
