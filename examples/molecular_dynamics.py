"""Molecular dynamics with a small equivariant potential: edges are new at every step, forces are
the gradient of the energy, and the total energy stays what it was.

    python examples/molecular_dynamics.py --steps 500 --plot energy.png
    python examples/molecular_dynamics.py --steps 10000 --record dynamics.json

Messages are one statement, gather, tensor product and scatter in one:

    Z[dst[e],I[p],u] = V[p] * X[src[e],J[p],u] * Y[e,K[p]] * W[e,L[p],u]

The same motion is run in float32 and float64, and in float64 with e3nn's product where that is
installed. The potential is Morse's and a correction by a network with weights that nobody trained:
what is shown is that its forces are its gradient.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from timing import default_device, report
from torch import Tensor, nn

from insum.nn import Irreps, Linear, TensorProductConv, spherical_harmonics

CUTOFF = 2.5


def neighbours(positions: Tensor) -> Tensor:
    """Pairs that are closer than the cutoff, (2, edges)."""
    apart = (positions[:, None] - positions[None]).square().sum(2)
    near = (apart < CUTOFF**2).fill_diagonal_(False)
    return near.nonzero().T.contiguous()


def paths(hidden: Irreps, harmonics: Irreps) -> list[tuple[int, int, int, str, bool]]:
    return [
        (a, b, c, "uvu", True)
        for a, (_, one) in enumerate(hidden)
        for b, (_, two) in enumerate(harmonics)
        for c, (_, three) in enumerate(hidden)
        if three in one * two
    ]


class Gathered(nn.Module):
    """The same convolution of e3nn's product: rows are gathered, multiplied and added up."""

    def __init__(self, *given: Any) -> None:
        super().__init__()
        from e3nn import o3

        options = {"shared_weights": False, "internal_weights": False}
        self.product = o3.TensorProduct(*map(str, given[:3]), given[3], **options)
        self.weight_numel = self.product.weight_numel

    def forward(self, x: Tensor, y: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        rows = self.product(x[edge_index[0]], y, weight)
        return torch.zeros_like(x).index_add(0, edge_index[1], rows)


class Potential(nn.Module):
    """Two rounds of messages, then an energy for every atom; all ends smoothly at the cutoff."""

    def __init__(self, channels: int, lmax: int, conv: type = TensorProductConv) -> None:
        super().__init__()
        harmonics = Irreps.of(" + ".join(f"{l}y" for l in range(lmax + 1)))
        hidden = Irreps.of(" + ".join(f"{channels}x{l}y" for l in range(lmax + 1)))
        self.harmonics, self.channels, self.dim = harmonics, channels, hidden.dim
        self.convolutions = nn.ModuleList(
            conv(hidden, harmonics, hidden, paths(hidden, harmonics)) for _ in range(2)
        )
        self.mixing = nn.ModuleList(Linear(hidden, hidden) for _ in range(2))
        self.radial = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, one.weight_numel))
            for one in self.convolutions
        )
        self.head = nn.Linear(channels, 1, bias=False)

    def forward(self, positions: Tensor, edge_index: Tensor) -> Tensor:
        vectors = positions[edge_index[1]] - positions[edge_index[0]]
        distance = vectors.norm(dim=1, keepdim=True)
        envelope = (1 - (distance / CUTOFF) ** 2) ** 3
        waves = torch.arange(1, 7, device=vectors.device) * (math.pi / CUTOFF)
        y = spherical_harmonics(self.harmonics, vectors)
        x = torch.ones(len(positions), self.dim, dtype=y.dtype, device=y.device)
        x = x * (torch.arange(self.dim, device=y.device) < self.channels)  # scalars alone
        for conv, mixing, radial in zip(self.convolutions, self.mixing, self.radial):
            weight = radial(torch.sin(distance * waves.to(y)) / distance) * envelope
            x = x + 0.3 * mixing(conv(x, y, edge_index, weight))
        learned = self.head(torch.tanh(x[:, : self.channels])).sum()
        morse = (((1 - torch.exp(1.0 - distance)) ** 2 - 1) * envelope).sum() / 2
        return morse + 0.1 * learned


def forces(model: nn.Module, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The energy and its negative gradient."""
    at = positions.detach().requires_grad_()
    energy = model(at, neighbours(positions))
    (gradient,) = torch.autograd.grad(energy, at)
    return energy.detach(), -gradient


def simulate(
    model: nn.Module, positions: Tensor, velocities: Tensor, steps: int, step: float
) -> tuple[list[float], float]:
    """Velocity Verlet: the total energy at every step, and milliseconds of one."""
    total = []
    energy, pull = forces(model, positions)
    start = time.perf_counter()
    for _ in range(steps):
        velocities = velocities + 0.5 * step * pull
        positions = positions + step * velocities
        energy, pull = forces(model, positions)
        velocities = velocities + 0.5 * step * pull
        total.append(energy + 0.5 * velocities.square().sum())
    found = torch.stack(total).tolist()
    return found, 1e3 * (time.perf_counter() - start) / steps


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--side", type=int, default=3, help="atoms along each side of a cube")
    parser.add_argument("--channels", type=int, default=8)
    parser.add_argument("--lmax", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step", type=float, default=0.005)
    parser.add_argument("--plot", default="", help="a picture of the energies, by Matplotlib")
    parser.add_argument("--record", default="", help="a file for what was found, as JSON")
    parser.add_argument("--device", default=default_device())
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    cube = torch.cartesian_prod(*[torch.arange(float(arguments.side))] * 3) * 1.1
    positions = (cube + 0.05 * torch.randn_like(cube)).to(arguments.device)
    velocities = 0.1 * torch.randn_like(positions)
    model = Potential(arguments.channels, arguments.lmax).to(arguments.device)
    print(f"{len(positions)} atoms, {neighbours(positions).shape[1]} edges, on {positions.device}")

    energies, times = {}, {}
    runs: dict[str, tuple[nn.Module, torch.dtype]] = {
        "float32": (model, torch.float32),
        "float64": (model, torch.float64),
    }
    try:
        other = Potential(arguments.channels, arguments.lmax, Gathered).to(arguments.device)
    except ImportError:
        print("e3nn is not installed: not run beside it")
    else:
        other.load_state_dict(model.state_dict(), strict=False)
        runs["e3nn, float64"] = other, torch.float64
    for name, (one, dtype) in runs.items():
        given = positions.to(dtype), velocities.to(dtype)
        energies[name], times[name] = simulate(
            one.to(dtype), *given, arguments.steps, arguments.step
        )
        range_, drift = spread(energies[name], len(positions))
        print(
            f"{name:14s} energy {energies[name][-1]:.6f}, an atom's between {range_:.1e}, "
            f"drift {drift:.1e}"
        )
    if "e3nn, float64" in energies:
        apart = max(abs(a - b) for a, b in zip(energies["float64"], energies["e3nn, float64"]))
        print(f"largest difference from e3nn: {apart:.1e}")
    report("one step", times["float64"], {"e3nn": times.get("e3nn, float64", "is not installed")})
    if arguments.record:
        recorded(arguments, len(positions), energies, times)
    if arguments.plot:
        plotted(energies, arguments.plot, arguments.step)


def spread(energies: list[float], atoms: int) -> tuple[float, float]:
    """Of the energy of an atom, the range that it stays in, and how far its mean over the last
    tenth is from that over the first.
    """
    tenth = max(1, len(energies) // 10)
    first, last = sum(energies[:tenth]) / tenth, sum(energies[-tenth:]) / tenth
    return (max(energies) - min(energies)) / atoms, abs(last - first) / atoms


def recorded(
    arguments: argparse.Namespace,
    atoms: int,
    energies: dict[str, list[float]],
    times: dict[str, float],
) -> None:
    asked = {n: getattr(arguments, n) for n in ("side", "channels", "lmax", "steps", "step")}
    found = {}
    for name, values in energies.items():
        range_, drift = spread(values, atoms)
        found[name] = {"range": range_, "drift": drift, "step_ms": times[name]}
    record = {**asked, "device": arguments.device, "atoms": atoms, "energy_per_atom": found}
    with open(arguments.record, "w") as file:
        json.dump(record, file, indent=1)
    print(f"written: {arguments.record}")


def plotted(energies: dict[str, list[float]], file: str, step: float) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, values in energies.items():
        axes.plot(
            [step * n for n in range(len(values))], [v - values[0] for v in values], label=name
        )
    axes.set_xlabel("time")
    axes.set_ylabel("total energy - its first value")
    axes.legend()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
    print(f"drawn: {file}")


if __name__ == "__main__":
    main()
