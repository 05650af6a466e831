"""What a call of insum costs above the same torch ops written by hand, on small CPU tensors, in one
process.

    python benchmarks/overhead.py

Prints microseconds a call: the least of many short runs, which is the figure that neighbours on the
machine disturb least.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable

import torch

import insum


def cases() -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Name -> (by hand, insum)."""
    A, B, C, v = torch.randn(4, 9), torch.randn(3, 5), torch.zeros(4, 5), torch.randn(9)
    D, E = torch.tensor([0, 2, 2, 1]), torch.tensor([8, 0, 3])

    def paper_in_place() -> object:
        return C.index_add_(0, D, torch.einsum("yr,rx->yx", torch.index_select(A, 1, E), B))

    def paper_new() -> object:
        return torch.zeros((4, 5), dtype=torch.float32, device=A.device).index_add_(
            0, D, torch.einsum("yr,rx->yx", torch.index_select(A, 1, E), B)
        )

    return {
        "C[D[y],x] += A[y,E[r]] * B[r,x]": (
            paper_in_place,
            lambda: insum.insum("C[D[y],x] += A[y,E[r]] * B[r,x]", C=C, A=A, B=B, D=D, E=E),
        ),
        "C[D[y],x] = A[y,E[r]] * B[r,x]": (
            paper_new,
            lambda: insum.insum(
                "C[D[y],x] = A[y,E[r]] * B[r,x]", A=A, B=B, D=D, E=E, out_shape=(4, 5)
            ),
        ),
        "y[i] = A[i,j] * v[j]": (
            lambda: torch.einsum("ij,j->i", A, v),
            lambda: insum.insum("y[i] = A[i,j] * v[j]", A=A, v=v),
        ),
        "y[i,j] = A[i,j]": (lambda: A.clone(), lambda: insum.insum("y[i,j] = A[i,j]", A=A)),
    }


def microseconds(
    *functions: Callable[[], object], number: int = 20, rounds: int = 1500
) -> list[float]:
    """The least time of each function; they take turns in short runs, so that all see the same
    machine.
    """
    best = [float("inf")] * len(functions)
    for _ in range(rounds):
        for k, function in enumerate(functions):
            best[k] = min(best[k], timeit.timeit(function, number=number) / number * 1e6)
    return best


def main() -> None:
    torch.set_num_threads(1)
    print(
        f"{'statement':<34}{'by hand':>10}{'insum':>10}{'above':>10}   (µs a call, torch "
        f"{torch.__version__})"
    )
    for name, (by_hand, ours) in cases().items():
        hand, mine = microseconds(by_hand, ours)
        print(f"{name:<34}{hand:>10.1f}{mine:>10.1f}{mine - hand:>10.1f}")


if __name__ == "__main__":
    main()
