"""Learn energies and forces of small clusters of atoms with an equivariant message-passing network,
and time it beside e3nn.

    python examples/equivariant_forces.py --steps 40

A message is a tensor product with weights of its own for every edge, one statement:

    Z[b,I[p,q],w] = V[p,q] * X[b,J[p,q],u] * Y[b,K[p,q]] * W[b,L[p],u,w]

Forces are the gradient of the energy, so that training on them differentiates twice. The potential
to be learned is Morse's.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import torch
from timing import default_device, median_ms, report
from torch import Tensor, nn

import insum
from insum.nn import FullyConnectedTensorProduct, Irreps, spherical_harmonics

CUTOFF = 3.0


def clusters(count: int, atoms: int, device: str) -> tuple[Tensor, Tensor]:
    """Positions (count * atoms, 3) around a grid, and the edges of all pairs in each cluster."""
    grid = torch.cartesian_prod(*[torch.arange(2.0)] * 3)[:atoms] * 1.2
    positions = (grid + 0.15 * torch.randn(count, atoms, 3)).reshape(-1, 3)
    a, b = (~torch.eye(atoms, dtype=torch.bool)).nonzero().T
    edges = torch.stack([b, a])[:, None] + (torch.arange(count) * atoms)[:, None]
    return positions.to(device), edges.reshape(2, -1).to(device)


def morse(positions: Tensor, edges: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Energies (count,) and forces of the potential to be learned."""
    r = positions.detach().requires_grad_()
    distance = (r[edges[0]] - r[edges[1]]).norm(dim=1)
    energy = ((1 - torch.exp(1.2 - distance)) ** 2 - 1).reshape(count, -1).sum(1) / 2
    (gradient,) = torch.autograd.grad(energy.sum(), r)
    return energy.detach(), -gradient


class Potential(nn.Module):
    """Two rounds of messages, then an energy for every atom. ``product`` is ours or e3nn's, which
    have the same weights.
    """

    def __init__(
        self, channels: int, lmax: int, product: type = FullyConnectedTensorProduct
    ) -> None:
        super().__init__()
        harmonics = " + ".join(f"1x{l}y" for l in range(lmax + 1))
        hidden = " + ".join(f"{channels}x{l}y" for l in range(lmax + 1))
        self.lmax, self.channels, self.dim = lmax, channels, Irreps.of(hidden).dim
        self.start = nn.Parameter(torch.randn(channels))
        self.first = product(f"{channels}x0e", harmonics, hidden, shared_weights=False)
        self.second = product(hidden, harmonics, f"{channels}x0e", shared_weights=False)
        self.radial = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, p.weight_numel))
            for p in (self.first, self.second)
        )
        self.head = nn.Sequential(nn.Linear(channels, 32), nn.SiLU(), nn.Linear(32, 1))

    def energies(self, positions: Tensor, edges: Tensor, count: int) -> Tensor:
        vector = positions[edges[0]] - positions[edges[1]]
        distance = vector.norm(dim=1, keepdim=True)
        waves = (
            torch.sin(distance * torch.arange(1, 9, device=vector.device) * (math.pi / CUTOFF))
            / distance
        )
        Y = spherical_harmonics(self.lmax, vector)
        x = self.start.expand(positions.shape[0], -1)
        for product, radial in zip((self.first, self.second), self.radial):
            message = product(x[edges[0]], Y, radial(waves))
            x = insum.insum(
                "Out[dst[e],f] = M[e,f]",
                dst=edges[1],
                M=message,
                out_shape=(positions.shape[0], message.shape[1]),
            )
        return self.head(x).reshape(count, -1).sum(1)

    def forward(self, positions: Tensor, edges: Tensor, count: int) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            r = positions if positions.requires_grad else positions.detach().requires_grad_()
            energy = self.energies(r, edges, count)
            (gradient,) = torch.autograd.grad(energy.sum(), r, create_graph=self.training)
        return energy, -gradient


def loss_of(
    model: nn.Module, positions: Tensor, edges: Tensor, energy: Tensor, forces: Tensor
) -> Tensor:
    found, pull = model(positions, edges, len(energy))
    return nn.functional.mse_loss(found, energy) + nn.functional.mse_loss(pull, forces)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clusters", type=int, default=16)
    parser.add_argument("--atoms", type=int, default=6, help="of each cluster, 2 to 8")
    parser.add_argument("--channels", type=int, default=8)
    parser.add_argument("--lmax", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default=default_device())
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    positions, edges = clusters(arguments.clusters, arguments.atoms, arguments.device)
    energy, forces = morse(positions, edges, arguments.clusters)
    model = Potential(arguments.channels, arguments.lmax).to(positions.device)
    print(
        f"{arguments.clusters} clusters of {arguments.atoms} atoms, {edges.shape[1]} edges, on "
        f"{positions.device}"
    )

    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(arguments.steps):
        optimizer.zero_grad()
        loss = loss_of(model, positions, edges, energy, forces)
        loss.backward()
        optimizer.step()
        if step % max(1, arguments.steps // 5) == 0 or step == arguments.steps - 1:
            print(f"step {step:3d}  loss {loss.item():.4f}")
    check_rotation(model.eval(), positions, edges, arguments.clusters)
    ours = step_ms(model, positions, edges, energy, forces)
    report(
        "one step, forces included",
        ours,
        {"e3nn": against_e3nn(model, arguments, positions, edges, energy, forces)},
    )


def check_rotation(model: nn.Module, positions: Tensor, edges: Tensor, count: int) -> None:
    turn = torch.linalg.qr(torch.randn(3, 3)).Q.to(positions.device)
    energy, forces = model(positions, edges, count)
    turned_energy, turned_forces = model(positions @ turn.T, edges, count)
    apart = (
        (turned_energy - energy).abs().max().item(),
        (turned_forces - forces @ turn.T).abs().max().item(),
    )
    print(f"after a rotation energies differ by {apart[0]:.1e}, forces by {apart[1]:.1e}")


def step_ms(model: nn.Module, *given: Tensor) -> float:
    model.train()
    return median_ms(lambda: loss_of(model, *given).backward(), given[0].device, 5)


def against_e3nn(model: Potential, arguments: argparse.Namespace, *given: Tensor) -> float | str:
    try:
        from e3nn.o3 import FullyConnectedTensorProduct as Theirs
    except ImportError:
        return "e3nn is not installed"
    other = Potential(arguments.channels, arguments.lmax, Theirs).to(given[0].device)
    other.load_state_dict(model.state_dict(), strict=False)
    apart = (
        (model(*given[:2], arguments.clusters)[1] - other(*given[:2], arguments.clusters)[1])
        .abs()
        .max()
        .item()
    )
    print(f"largest difference from e3nn with the same weights: {apart:.1e}")
    return step_ms(other, *given)


if __name__ == "__main__":
    main()
