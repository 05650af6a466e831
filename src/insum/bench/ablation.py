"""What each technique contributes, the paper's section 6.6: block SpMM at 90 % sparsity, from COO
through unfused torch operations to all of it.

Every stage keeps what the stages before it have, and is a matter of settings and formats; the
result is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import insum
from insum.bench import block_spmm
from insum.bench.measure import Comparison, Contender, ReadyContender
from insum.bench.options import BenchOptions
from insum.bench.records import FORWARD
from insum.bench.rivals import TORCH_BSR
from insum.formats import COO, BlockGroupCOO, GroupCOO, SparseFormat
from insum.runtime import launch

TITLE = "Ablation"
STATEMENT = block_spmm.STATEMENT
BASELINE = "COO, unfused"
SPARSITY = 0.9
#: The paper's group sizes: 16 nonzeros of a row, 4 blocks of a row.
GROUP, BLOCK_GROUP = 16, 4
UNFUSED: dict[str, Any] = {"backend": "graph"}
FUSED: dict[str, Any] = {"backend": "fused", "require_fused": True, "dot": "always"}
NOTHING: dict[str, Any] = {
    "lazy_broadcasting": False,
    "scatter": "atomic",
    "swap": False,
    "prefetch": False,
}


@dataclass(frozen=True)
class AblationStep:
    """A row of the figure: its name, its format, and the settings that it runs with."""

    name: str
    format: str
    settings: dict[str, Any]

    @property
    def fused(self) -> bool:
        return self.settings.get("backend") == "fused"


def stages() -> list[AblationStep]:
    """From the baseline to everything.

    >>> [stage.name for stage in stages()][:2]
    ['COO, unfused', '+ groups (GroupCOO), unfused']
    """
    found = [
        AblationStep("COO, unfused", "COO", UNFUSED),
        AblationStep("+ groups (GroupCOO), unfused", "GroupCOO", UNFUSED),
        AblationStep("+ blocks (BlockGroupCOO), unfused", "BlockGroupCOO", UNFUSED),
    ]
    settings = {**FUSED, **NOTHING}
    found.append(AblationStep("+ fused, tl.dot", "BlockGroupCOO", dict(settings)))
    for name, change in (
        ("+ lazy broadcasting", {"lazy_broadcasting": True}),
        ("+ segmented scatter", {"scatter": "auto"}),
        ("+ operand swap", {"swap": True}),
        ("insum: + index prefetch", {"prefetch": True}),
    ):
        settings |= change
        found.append(AblationStep(name, "BlockGroupCOO", dict(settings)))
    return found


def cases(options: BenchOptions) -> Iterator[Comparison]:
    size = 4096 if options.gpu else 256
    for dtype in options.dtypes_or(torch.float16 if options.gpu else torch.float32):
        given = block_spmm.inputs(size, SPARSITY, dtype, options.device, group_size=BLOCK_GROUP)
        name = f"{size}^3, {SPARSITY:.0%} sparse, {block_spmm.BLOCK} x {block_spmm.BLOCK} blocks"
        yield Comparison(
            "ablation",
            name,
            dtype,
            FORWARD,
            options.device,
            functools.partial(block_spmm.want, given, FORWARD),
            contenders(given, options),
            given.work(FORWARD),
        )


def contenders(given: block_spmm.BlockInputs, options: BenchOptions) -> list[Contender]:
    # An unfused product copies a row of B for every nonzero: too large for a graph's private
    # memory, so it is timed by events.
    found = [
        Contender(s.name, _late(s, given), lines=1 if s.fused else None, capture=s.fused)
        for s in stages()
        if not s.fused or runs_fused(options)
    ]
    found.append(Contender("torch.mm", lambda: block_spmm.dense(given, FORWARD)))
    if not TORCH_BSR.absent(options.device):
        found.append(
            Contender(
                "TorchBSR",
                lambda: block_spmm.torch_bsr(given, FORWARD, tuned=False),
                lines=TORCH_BSR.lines,
            )
        )
        found.append(
            Contender(
                "TorchBSR, tuned",
                lambda: block_spmm.torch_bsr(given, FORWARD, tuned=True),
                lines=TORCH_BSR.lines,
                times=True,
            )
        )
    return found


def runs_fused(options: BenchOptions) -> bool:
    return not launch.available() and (options.gpu or launch.interpreting())


def not_here(options: BenchOptions) -> list[tuple[str, str]]:
    """Stages that cannot run on this device, and why."""
    return (
        []
        if runs_fused(options)
        else [
            (s.name, "fused kernels need a GPU, or TRITON_INTERPRET=1") for s in stages() if s.fused
        ]
    )


def _late(stage: AblationStep, given: block_spmm.BlockInputs) -> Callable[[], ReadyContender]:
    return lambda: ready(stage, given)


def ready(stage: AblationStep, given: block_spmm.BlockInputs) -> ReadyContender:
    a = formatted(stage.format, given)

    def run() -> tuple[torch.Tensor]:
        with insum.settings(**stage.settings), torch.no_grad():
            return (insum.einsum("C[m,n] = A[m,k] * B[k,n]", A=a, B=given.b),)

    return ReadyContender(run)


def formatted(name: str, given: block_spmm.BlockInputs) -> SparseFormat:
    match name:
        case "COO":
            return COO.from_dense(given.dense)
        case "GroupCOO":
            return GroupCOO.from_dense(given.dense, group_size=GROUP)
    assert name == "BlockGroupCOO" and isinstance(given.a, BlockGroupCOO)
    return given.a
