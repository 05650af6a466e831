"""Train a dense MLP, prune it in blocks, fine-tune what is left, and time it beside the dense one.

    python examples/pruned_mlp.py --density 0.3

The pruned layer is one statement: Y[i,WO[p],bo] = WV[p,q,bo,bk] * X[i,WK[p,q],bk]. The task is to
tell which of several random networks made an input, so that there is something to learn at any
size.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence

import torch
from timing import default_device, median_ms, report
from torch import Tensor, nn

from insum.nn import BlockSparseLinear


def data(count: int, width: int, classes: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    makers = torch.randn(classes, width // 4, width, generator=generator) / 4
    labels = torch.randint(0, classes, (count,))
    x = torch.einsum("ni,nio->no", torch.randn(count, width // 4).tanh(), makers[labels])
    return (x + 0.3 * torch.randn(count, width)).to(device), labels.to(device)


def train(model: nn.Module, x: Tensor, labels: Tensor, steps: int, rate: float) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(steps):
        batch = torch.randint(0, len(x), (256,), device=x.device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), labels[batch]).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, labels: Tensor) -> float:
    return (model(x).argmax(1) == labels).float().mean().item()


def pruned(model: nn.Sequential, density: float, block: int) -> nn.Sequential:
    """All linear layers but the last, with the blocks of largest norm."""
    *body, last = model
    return nn.Sequential(
        *(
            BlockSparseLinear.from_dense(m, density=density, block_shape=block)
            if isinstance(m, nn.Linear)
            else m
            for m in body
        ),
        last,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--density", type=float, default=0.3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--device", default=default_device())
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    width, device = arguments.width, arguments.device
    x, labels = data(6000, width, 10, device)
    train_x, train_y, test_x, test_y = x[:5000], labels[:5000], x[5000:], labels[5000:]

    dense = nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    ).to(device)
    train(dense, train_x, train_y, arguments.steps, 1e-3)
    print(f"dense:      accuracy {accuracy(dense, test_x, test_y):.3f}")
    sparse = pruned(dense, arguments.density, arguments.block)
    print(
        f"pruned:     accuracy {accuracy(sparse, test_x, test_y):.3f} with "
        f"{arguments.density:.0%} of the blocks of {arguments.block} x {arguments.block}"
    )
    train(sparse, train_x, train_y, arguments.steps, 1e-3)
    print(f"fine-tuned: accuracy {accuracy(sparse, test_x, test_y):.3f}")
    time_layers(dense[0], sparse[0], test_x[:256])


@torch.no_grad()
def time_layers(dense: nn.Module, sparse: nn.Module, x: Tensor) -> None:
    assert isinstance(sparse, BlockSparseLinear)
    rivals: dict[str, float | str] = {"dense layer": median_ms(lambda: dense(x), x.device)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that its BSR is in beta state
            weight = sparse.weight().to_torch(torch.sparse_bsr)
        rivals["torch.sparse BSR"] = median_ms(lambda: weight @ x.T, x.device)
    except (RuntimeError, NotImplementedError) as error:
        rivals["torch.sparse BSR"] = str(error).splitlines()[0]
    report("one layer", median_ms(lambda: sparse(x), x.device), rivals)


if __name__ == "__main__":
    main()
