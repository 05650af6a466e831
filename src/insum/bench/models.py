"""``insum bench models``: whole equivariant networks, MACE and NequIP, as their packages have them
and with their layers swapped (`insum.nn.swap`), on batches that are new at every step.

A step of training is the energies, forces and stress of a batch, a loss on all of them, its
gradient and a step of Adam; a step of evaluation the energies, forces and stress alone. Time is
from an idle device to an idle device, for the host is part of it. What is compared in float64 are
energies, forces, stress and the gradients of all parameters. Contenders take turns, step by step.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor, nn

from insum.bench import measure
from insum.bench.rivals import CUEQUIVARIANCE, module, why_not
from insum.bench.study import Study
from insum.bench.table import aligned
from insum.nn import swap

CUTOFF, SPACING, SHAKEN, KINDS = 4.0, 1.7, 0.1, 3
STEPS, WARM = 20, 8
#: Float64 results of the same layers differ by less than this, relative to the largest.
TOLERANCE = 1e-10
TRAINING, EVALUATION = "training", "evaluation"
HEAD = ("model", "step", "contender", "ms", "times", "peak MiB", "error")


@dataclass(frozen=True)
class ModelRow:
    """One contender: milliseconds of a step, and how far its float64 results are from those of the
    model as it was.
    """

    model: str
    step: str
    contender: str
    atoms: int
    edges: int
    ms: float = float("nan")
    peak_mib: float | None = None
    error: float | None = None
    failed: str = ""


@dataclass(frozen=True)
class Atoms:
    """Structures side by side: positions, kinds, the structure of every atom, pairs that are close
    (senders, receivers), and how many atoms each has.
    """

    positions: Tensor
    kinds: Tensor
    structure: Tensor
    edge_index: Tensor
    counts: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> Atoms:
        """New tensors, as a loader of data has them."""
        kept = (self.kinds, self.structure, self.edge_index, self.counts)
        return Atoms(self.positions.to(device, dtype), *(t.clone().to(device) for t in kept))


def drawn(structures: int, side: int, seed: int) -> Atoms:
    """Shaken lattices; some atoms are missing, so that no two batches are alike."""
    draw = torch.Generator().manual_seed(seed)
    lattice = torch.cartesian_prod(*[torch.arange(float(side))] * 3) * SPACING
    parts, edges, counts = [], [], list[int]()
    for _ in range(structures):
        there = torch.rand(len(lattice), generator=draw) > 0.1
        at = lattice[there]
        at = at + SHAKEN * torch.randn(at.shape, generator=draw)
        near = torch.cdist(at, at) < CUTOFF
        edges.append(near.fill_diagonal_(False).nonzero().T + sum(counts))
        parts.append(at)
        counts.append(len(at))
    number = torch.tensor(counts)
    kinds = torch.randint(KINDS, (sum(counts),), generator=draw)
    structure = torch.repeat_interleave(torch.arange(structures), number)
    return Atoms(torch.cat(parts), kinds, structure, torch.cat(edges, 1), number)


# --- models ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Package:
    """A package of models: ``made`` gives one in a dtype, ``given`` the input of one, and
    ``results`` energies, forces and stress, for ``training`` or not.
    """

    name: str
    modules: tuple[str, ...]
    made: Callable[[torch.dtype, bool], nn.Module]
    given: Callable[[Atoms], dict[str, Tensor]]
    results: Callable[[nn.Module, dict[str, Tensor], bool], tuple[Tensor, Tensor, Tensor]]
    wide_positions: bool  # positions are in float64, whatever the model is in

    @property
    def absent(self) -> str:
        return next((reason for one in self.modules if (reason := why_not(one))), "")


def mace(dtype: torch.dtype, small: bool) -> nn.Module:
    blocks, irreps = module("mace.modules"), module("e3nn.o3").Irreps
    made: nn.Module = blocks.ScaleShiftMACE(
        r_max=CUTOFF,
        num_bessel=8,
        num_polynomial_cutoff=5,
        max_ell=1 if small else 3,
        interaction_cls=blocks.interaction_classes["RealAgnosticResidualInteractionBlock"],
        interaction_cls_first=blocks.interaction_classes["RealAgnosticResidualInteractionBlock"],
        num_interactions=2,
        num_elements=KINDS,
        hidden_irreps=irreps("2x0e+2x1o" if small else "128x0e+128x1o"),
        MLP_irreps=irreps("2x0e" if small else "16x0e"),
        gate=nn.functional.silu,
        atomic_energies=module("numpy").zeros(KINDS),
        avg_num_neighbors=40.0,
        atomic_numbers=list(range(1, KINDS + 1)),
        correlation=2 if small else 3,
        radial_type="bessel",
        atomic_inter_scale=1.0,
        atomic_inter_shift=0.0,
    )
    return made.to(dtype)


def _given_mace(atoms: Atoms) -> dict[str, Tensor]:
    at, edges = atoms.positions, atoms.edge_index.shape[1]
    cell = 20 * torch.eye(3, dtype=at.dtype, device=at.device).repeat(len(atoms.counts), 1)
    ends = torch.zeros(1, dtype=torch.long, device=at.device), atoms.counts.cumsum(0)
    return {
        "positions": at.requires_grad_(),
        "node_attrs": nn.functional.one_hot(atoms.kinds, KINDS).to(at),
        "edge_index": atoms.edge_index,
        "shifts": at.new_zeros(edges, 3),
        "unit_shifts": at.new_zeros(edges, 3),
        "cell": cell,
        "batch": atoms.structure,
        "ptr": torch.cat(ends),
        "head": torch.zeros_like(atoms.counts),
    }


def _results_mace(
    model: nn.Module, given: dict[str, Tensor], training: bool
) -> tuple[Tensor, Tensor, Tensor]:
    out = model(given, training=training, compute_force=True, compute_stress=True)
    return out["energy"], out["forces"], out["stress"]


def nequip(dtype: torch.dtype, small: bool) -> nn.Module:
    module("nequip.utils.global_state").set_global_state()  # without which none is made
    made: nn.Module = module("nequip.model").NequIPGNNModel(
        seed=1,
        model_dtype=measure.name_of(dtype),
        r_max=CUTOFF,
        type_names=[f"kind{n}" for n in range(KINDS)],
        l_max=1 if small else 2,
        parity=True,
        num_layers=2 if small else 3,
        num_features=2 if small else 64,
        radial_mlp_depth=1,
        radial_mlp_width=4 if small else 64,
        avg_num_neighbors=40.0,
    )
    return made


def _given_nequip(atoms: Atoms) -> dict[str, Tensor]:
    at, count = atoms.positions, len(atoms.counts)
    return {
        "pos": at,
        "edge_index": atoms.edge_index,
        "atom_types": atoms.kinds,
        "cell": 20 * torch.eye(3, dtype=at.dtype, device=at.device).repeat(count, 1, 1),
        "pbc": torch.zeros(count, 3, dtype=torch.bool, device=at.device),
        "edge_cell_shift": at.new_zeros(atoms.edge_index.shape[1], 3),
        "batch": atoms.structure,
        "num_atoms": atoms.counts,
    }


def _results_nequip(
    model: nn.Module, given: dict[str, Tensor], training: bool
) -> tuple[Tensor, Tensor, Tensor]:
    out = model.train(training)(given)
    return out["total_energy"], out["forces"], out["stress"]


PACKAGES = {
    "mace": Package(
        "mace", ("e3nn", "mace.modules"), mace, _given_mace, _results_mace, wide_positions=False
    ),
    "nequip": Package(
        *("nequip", ("e3nn", "nequip.model"), nequip, _given_nequip, _results_nequip),
        wide_positions=True,
    ),
}


@contextlib.contextmanager
def default_dtype(package: Package, dtype: torch.dtype) -> Iterator[torch.dtype]:
    """What new tensors have while a package's models are made and run; gives what positions
    have.
    """
    was = torch.get_default_dtype()
    wide = torch.float64 if package.wide_positions else dtype
    torch.set_default_dtype(wide)
    try:
        yield wide
    finally:
        torch.set_default_dtype(was)


# --- steps ----------------------------------------------------------------------------------------


def loss_of(energies: Tensor, forces: Tensor, stress: Tensor) -> Tensor:
    return energies.square().mean() + forces.square().mean() + stress.square().mean()


class ModelSteps:
    """Steps of a model on batches, one after the other, each of new tensors."""

    def __init__(
        self, package: Package, model: nn.Module, batches: list[Atoms], device: torch.device
    ) -> None:
        self.package, self.model, self.batches, self.device = package, model, batches, device
        self.adam = torch.optim.Adam(model.parameters(), lr=1e-5)
        self.number = 0

    def next(self, dtype: torch.dtype) -> dict[str, Tensor]:
        self.number += 1
        atoms = self.batches[self.number % len(self.batches)]
        return self.package.given(atoms.to(self.device, dtype))

    def train(self, given: dict[str, Tensor]) -> None:
        self.adam.zero_grad()
        loss = loss_of(*self.package.results(self.model, given, True))
        loss.backward()  # type: ignore[no-untyped-call]
        self.adam.step()

    def evaluate(self, given: dict[str, Tensor]) -> None:
        self.package.results(self.model, given, False)

    def acts(self, step: str) -> Callable[[dict[str, Tensor]], None]:
        return self.train if step == TRAINING else self.evaluate

    def warm(self, step: str, dtype: torch.dtype, count: int) -> None:
        for _ in range(count):
            self.acts(step)(self.next(dtype))

    def milliseconds(self, step: str, dtype: torch.dtype) -> float:
        """Of one step; its batch is on the device when it begins."""
        run = functools.partial(self.acts(step), self.next(dtype))
        return 1e3 * measure.once(run, self.device)

    def peak_mib(self, step: str, dtype: torch.dtype) -> float | None:
        if self.device.type != "cuda":
            return None
        run = functools.partial(self.acts(step), self.next(dtype))
        return measure.peak_bytes(run, self.device) / 2**20


def exact(package: Package, model: nn.Module, atoms: Atoms, device: torch.device) -> list[Tensor]:
    """Energies, forces, stress and the gradients of all parameters, in float64."""
    given = package.given(atoms.to(device, torch.float64))
    results = package.results(model, given, True)
    wanted = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss_of(*results), wanted, allow_unused=True)
    return [*(t.detach() for t in results), *(t for t in gradients if t is not None)]


def error_of(package: Package, atoms: Atoms, device: torch.device, small: bool) -> float:
    """How far a swapped model is from itself, in float64: the largest of all results, each
    relative to its own largest number.
    """
    with default_dtype(package, torch.float64):
        torch.manual_seed(0)
        model = package.made(torch.float64, small).to(device)
        swapped = copy.deepcopy(model)
        swap(swapped)
        want, got = (exact(package, one, atoms, device) for one in (model, swapped))
    assert len(want) == len(got)
    return max(measure.relative_error((a,), (b,)) for a, b in zip(got, want))


def contenders(
    package: Package, device: torch.device, small: bool
) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    def plain() -> nn.Module:
        torch.manual_seed(0)
        return package.made(torch.float32, small).to(device)

    def swapped() -> nn.Module:
        model = plain()
        swap(model)
        return model

    def converted() -> nn.Module:
        convert = module("mace.cli.convert_e3nn_cueq").run
        made: nn.Module = convert(plain(), device=str(device), return_model=True)
        return made.to(device)

    yield package.name, plain
    yield "insum", swapped
    if package.name == "mace" and not CUEQUIVARIANCE.absent(device):
        yield CUEQUIVARIANCE.name, converted


# --- the study ------------------------------------------------------------------------------------


def add_options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--structures", type=int, default=8, help="structures in a batch")
    parser.add_argument("--side", type=int, default=5, help="atoms along a side of one")
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps")


def run(study: Study) -> int:
    """Measure, show and write; 1 if a result is wrong."""
    rows: list[ModelRow] = []
    for name in study.wanted(list(PACKAGES)):
        package = PACKAGES[name]
        if package.absent:
            print(f"{name}: {package.absent}", flush=True)
            continue
        for row in rows_of(study, package):
            rows.append(row)
            print("  ".join(_cells(row, rows)), flush=True)
            study.keep(steps=study.asked.steps, rows=[asdict(one) for one in rows])
    study.keep(steps=study.asked.steps, rows=[asdict(one) for one in rows])
    print("\n".join(aligned([HEAD, *(_cells(row, rows) for row in rows)])))
    print(f"written: {study.file}")
    return int(any(row.error is not None and not row.error < TOLERANCE for row in rows))


def rows_of(study: Study, package: Package) -> Iterator[ModelRow]:
    small, device, asked = not study.options.gpu, study.device, study.asked
    structures, side = (2, 2) if small else (asked.structures, asked.side)
    batches = [drawn(structures, side, seed) for seed in range(4)]
    sizes = (len(batches[0].kinds), batches[0].edge_index.shape[1])
    error = error_of(package, drawn(2, 2 if small else 3, 9), device, small)
    makers = dict(contenders(package, device, small))
    wanted = [who for who in makers if not any(part in who for part in study.options.skip)]
    for step in (TRAINING, EVALUATION):
        if not study.has_time():
            return
        with default_dtype(package, torch.float32) as dtype:
            ready, failed = dict[str, ModelSteps](), dict[str, str]()
            for who in wanted:
                try:
                    ready[who] = ModelSteps(package, makers[who](), batches, device)
                    ready[who].warm(step, dtype, 1 if small else WARM)
                except Exception as wrong:  # a rival's hides nothing else
                    if who != CUEQUIVARIANCE.name:
                        raise
                    ready.pop(who, None)
                    failed[who] = f"{type(wrong).__name__}: {wrong}".splitlines()[0][:200]
            took = medians_in_turns(ready, step, dtype, 1 if small else asked.steps)
            peaks = {who: one.peak_mib(step, dtype) for who, one in ready.items()}
        for who in wanted:
            row = ModelRow(package.name, step, who, *sizes, error=error if who == "insum" else None)
            if who in failed:
                yield replace(row, failed=failed[who])
            else:
                yield replace(row, ms=took[who], peak_mib=peaks[who])


def medians_in_turns(
    ready: Mapping[str, ModelSteps], step: str, dtype: torch.dtype, rounds: int
) -> dict[str, float]:
    """Median milliseconds of a step of each, one after the other in every round: hosts are now
    quick, now slow.
    """
    runs = {who: functools.partial(one.milliseconds, step, dtype) for who, one in ready.items()}
    times = measure.in_turns(runs, rounds, lambda run: run())
    return {who: statistics.median(taken) for who, taken in times.items()}


def _cells(row: ModelRow, rows: list[ModelRow]) -> tuple[str, ...]:
    alike = [r for r in rows if (r.model, r.step) == (row.model, row.step)]
    first = alike[0].ms if alike else row.ms
    return (
        row.model,
        row.step,
        row.contender,
        row.failed or f"{row.ms:.2f}",
        "" if row.failed else f"{first / row.ms:.2f}",
        "" if row.peak_mib is None else f"{row.peak_mib:.0f}",
        "" if row.error is None else f"{row.error:.0e}",
    )
