"""What a fresh process does for ``insum bench first-call``: one application, from tensors to the
first result.

It is run by its path, and has a clock of its own, for nothing of insum may be imported before the
clock starts: importing it is one of the things that are timed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: Marks the line with the result among whatever else is printed.
RESULT = "RESULT "
#: Components of the result and of both factors, path by path.
PATHS = (
    ((0, 0, 0),),
    ((1, 0, 1), (2, 0, 2), (3, 0, 3)),
    ((1, 1, 0), (2, 2, 0), (3, 3, 0)),
    ((0, 1, 1), (0, 2, 2), (0, 3, 3)),
)
COEFFICIENT = 0.57


# --- operands, made with torch alone --------------------------------------------------------------


def block_matrix(device: str, half: torch.dtype) -> dict[str, Any]:
    blocks = torch.rand(128, 128, device=device) >= 0.9
    mask = blocks.repeat_interleave(32, 0).repeat_interleave(32, 1)
    return {
        "A": torch.randn(4096, 4096, device=device, dtype=half) * mask,
        "B": torch.randn(4096, 1024, device=device, dtype=half),
    }


def sparse_matrix(device: str, half: torch.dtype) -> dict[str, Any]:
    rows = (torch.rand(200_000, device=device) ** 3 * 20_000).long()
    index = torch.stack([rows, torch.randint(0, 20_000, (200_000,), device=device)])
    values = torch.randn(200_000, device=device)
    matrix = torch.sparse_coo_tensor(index, values, (20_000, 20_000)).coalesce()
    return {"A": matrix, "B": torch.randn(20_000, 128, device=device)}


def convolution(device: str, half: torch.dtype) -> dict[str, Any]:
    rows = [torch.randperm(20_000, device=device, dtype=torch.int32) for _ in range(27)]
    table = torch.stack(rows)
    return {
        "In": torch.randn(20_000, 128, device=device, dtype=half),
        "Nb": torch.where(torch.rand(table.shape, device=device) < 0.4, table, -1),
        "W": torch.randn(27, 128, 128, device=device, dtype=half),
    }


def tensor_product(device: str, half: torch.dtype) -> dict[str, Any]:
    padded = [[*path, *[(-1, -1, -1)] * (3 - len(path))] for path in PATHS]
    index = torch.tensor(padded, device=device, dtype=torch.int32)
    made = {name: index[:, :, d].contiguous() for d, name in enumerate("IJK")}
    return {
        **made,
        "L": torch.arange(4, device=device, dtype=torch.int32),
        "V": (made["I"] >= 0) * COEFFICIENT,
        "X": torch.randn(4000, 4, 32, device=device),
        "Y": torch.randn(4000, 4, device=device),
        "W": torch.randn(4000, 4, 32, 32, device=device),
    }


OPERANDS: dict[str, Callable[[str, torch.dtype], dict[str, Any]]] = {
    "block-spmm": block_matrix,
    "spmm": sparse_matrix,
    "conv": convolution,
    "tensor-product": tensor_product,
}


# --- ours -----------------------------------------------------------------------------------------


def converted(name: str, given: dict[str, Any]) -> dict[str, Any]:
    import insum

    match name:
        case "block-spmm":
            made = insum.formats.BlockGroupCOO.from_dense(given["A"], block_shape=(32, 32))
            return {**given, "A": made}
        case "spmm":
            return {**given, "A": insum.formats.GroupCOO.from_torch(given["A"])}
        case "tensor-product":
            return {n: insum.constant(t) if n in "IJKL" else t for n, t in given.items()}
    return given


def called(name: str, given: dict[str, Any]) -> Any:
    import insum

    match name:
        case "block-spmm" | "spmm":
            return insum.einsum("C[m,n] = A[m,k] * B[k,n]", **given)
        case "conv":
            return insum.insum("Out[x,m] = In[Nb[z,x],c] * W[z,c,m]", padded=("Nb",), **given)
    return insum.insum(
        "Z[b,I[p,q],w] = V[p,q] * X[b,J[p,q],u] * Y[b,K[p,q]] * W[b,L[p],u,w]",
        sizes={1: 4},
        padded=("I", "J", "K"),
        **given,
    )


# --- the same in torch operations, as one would write it for torch.compile ------------------------


def block_matrix_by_hand(given: dict[str, Any]) -> Callable[[], Tensor]:
    blocks = given["A"].reshape(128, 32, 128, 32).transpose(1, 2)
    at = blocks.abs().sum((2, 3)).nonzero()
    values, B = blocks[at[:, 0], at[:, 1]], given["B"].reshape(128, 32, -1)

    def run() -> Tensor:
        products = torch.einsum("pmk,pkn->pmn", values, B[at[:, 1]])
        blank = torch.zeros(128, 32, B.shape[2], device=B.device)
        return blank.index_add(0, at[:, 0], products.float())

    return run


def sparse_matrix_by_hand(given: dict[str, Any]) -> Callable[[], Tensor]:
    index, values, B = given["A"].indices(), given["A"].values(), given["B"]
    return lambda: torch.zeros_like(B).index_add(0, index[0], values[:, None] * B[index[1]])


def convolution_by_hand(given: dict[str, Any]) -> Callable[[], Tensor]:
    x, table, W = given["In"], given["Nb"].long(), given["W"]

    def run() -> Tensor:
        rows = torch.where((table >= 0)[:, :, None], x[table.clamp(min=0)], 0.0)
        return torch.einsum("zxc,zcm->xm", rows, W)

    return run


def tensor_product_by_hand(given: dict[str, Any]) -> Callable[[], Tensor]:
    X, Y, W = given["X"], given["Y"], given["W"]

    def run() -> Tensor:
        out = [torch.zeros_like(X[:, 0]) for _ in range(4)]
        for p, path in enumerate(PATHS):
            for i, j, k in path:
                product = torch.einsum("bu,buw->bw", X[:, j], W[:, p])
                out[i] = out[i] + COEFFICIENT * Y[:, k, None] * product
        return torch.stack(out, 1)

    return run


BY_HAND: dict[str, Callable[[dict[str, Any]], Callable[[], Tensor]]] = {
    "block-spmm": block_matrix_by_hand,
    "spmm": sparse_matrix_by_hand,
    "conv": convolution_by_hand,
    "tensor-product": tensor_product_by_hand,
}


# --- timing ---------------------------------------------------------------------------------------


class Laps:
    """Seconds from one lap to the next, each until the device is idle."""

    def __init__(self, device: str) -> None:
        self.device, self.times = device, dict[str, float]()
        self.last = time.perf_counter()

    def end(self, what: str) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.times[what], self.last = now - self.last, now


def timed(name: str, kind: str, device: str) -> dict[str, float]:
    """Seconds of each part of a process: of ours, or of the same by torch.compile (``rival``)."""
    laps = Laps(device)
    torch.zeros(1, device=device).add_(1)
    laps.end("context")
    torch.manual_seed(0)
    given = OPERANDS[name](device, torch.float16 if device == "cuda" else torch.float32)
    laps.end("operands")
    counted = ["first call"]
    if kind == "rival":
        torch.compile(BY_HAND[name](given))()
        laps.end("first call")
    else:
        import insum  # noqa: F401

        laps.end("import insum")
        given = converted(name, given)
        laps.end("convert")
        called(name, given)
        laps.end("first call")
        called(name, given)
        laps.end("second call")
        counted += ["import insum", "convert"]
    return {**laps.times, "total": sum(laps.times[what] for what in counted)}


if __name__ == "__main__":
    print(RESULT + json.dumps(timed(*sys.argv[1:4])))
