"""Every stage of the ablation changes the kernel that is generated, and none the result."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

import insum
from insum.bench import ablation, block_spmm, records
from insum.bench.main import main
from insum.bench.measure import relative_error
from insum.bench.records import FORWARD
from insum.formats import BlockGroupCOO
from insum.lang.bind import Problem, bind
from insum.lang.parser import parse
from insum.runtime import inspection

CPU = torch.device("cpu")
FUSED = [stage for stage in ablation.stages() if stage.fused]
STATEMENT = "C[AM[p],bm,n] = AV[p,q,bm,bk] * B[AK[p,q],bk,n]"


@functools.cache
def problem() -> tuple[Problem, dict[str, torch.Tensor]]:
    """The ablation's statement at its size on a GPU; values are not touched."""
    groups, blocks = 500, 128
    values = {
        "AM": torch.sort(
            torch.randint(0, blocks, (groups,), generator=torch.Generator().manual_seed(0))
        ).values.int(),
        "AK": torch.zeros(groups, ablation.BLOCK_GROUP, dtype=torch.int32),
        "AV": torch.empty(groups, ablation.BLOCK_GROUP, 32, 32, dtype=torch.float16),
        "B": torch.empty(blocks, 32, 4096, dtype=torch.float16),
    }
    return bind(parse(STATEMENT), values, sizes={0: blocks}, padded=("AK",)), values


def source(stage: ablation.AblationStep) -> str:
    bound, values = problem()
    with insum.settings(**stage.settings):
        program = inspection.plan_only(bound, values)
    return "\n".join(one.kernel.source for step in program.steps for one in step.launches)


def test_the_stages_are_the_papers_and_ours() -> None:
    names = [stage.name for stage in ablation.stages()]
    assert names[:3] == [
        "COO, unfused",
        "+ groups (GroupCOO), unfused",
        "+ blocks (BlockGroupCOO), unfused",
    ]
    assert [n.removeprefix("insum: ") for n in names[3:]] == [
        "+ fused, tl.dot",
        "+ lazy broadcasting",
        "+ segmented scatter",
        "+ operand swap",
        "+ index prefetch",
    ]
    assert ablation.stages()[-1].settings | {"scatter": "auto"} == {
        **ablation.FUSED,
        "lazy_broadcasting": True,
        "scatter": "auto",
        "swap": True,
        "prefetch": True,
    }


@pytest.mark.compile_only
def test_every_stage_changes_the_kernel() -> None:
    texts = [source(stage) for stage in FUSED]
    assert all("tl.dot(" in text for text in texts)
    assert len(set(texts)) == len(texts)


@pytest.mark.compile_only
def test_what_each_stage_changes() -> None:
    eager, lazy, segmented, swapped, everything = (source(stage) for stage in FUSED)
    assert (
        "tl.trans(tl.reshape(" in eager
        and "[:, None, None]" in eager
        and "tl.trans(" not in lazy
        and "[:, None, None]" not in lazy
    )
    assert (
        "tl.atomic_add(" in lazy and "tl.atomic_add(" not in segmented and "seg_start" in segmented
    )
    shape = lambda text: text.split("acc = tl.zeros([")[1].split("]")[0]
    assert shape(segmented) != shape(swapped) and shape(swapped).endswith(", 32")
    assert "_next" not in swapped and "AK_v1_next" in everything


@pytest.mark.compile_only
def test_eager_broadcasting_compiles_and_uses_the_matrix_units() -> None:
    bound, values = problem()
    with insum.settings(**FUSED[0].settings):
        ((_, compiled),) = inspection.compile_only(bound, values, "sm_90")
    assert compiled.uses("mma.sync") and compiled.stack == 0


EAGER = [
    ("Out[x,m] = In[Nb[z,x],c] * W[z,c,m]", {"In": (37, 20), "Nb": (9, 37), "W": (9, 20, 24)}),
    ("C[i,j] = A[i,k] * B[k,j] * s[i]", {"A": (21, 35), "B": (35, 18), "s": (21,)}),
    ("C[b,i,j] = A[b,i,k] * B[b,k,j]", {"A": (3, 17, 33), "B": (3, 33, 19)}),
    ("C[R[p],j] = A[p,k] * B[k,j]", {"R": (30,), "A": (30, 20), "B": (20, 16)}),
    ("C[j,i] = A[i,k,l] * B[k,l,j]", {"A": (16, 5, 4), "B": (5, 4, 16)}),
]


@pytest.mark.interpreter
@pytest.mark.parametrize(("statement", "shapes"), EAGER, ids=[e[0] for e in EAGER])
@pytest.mark.parametrize("scatter", ["auto", "atomic"])
def test_eager_broadcasting_changes_no_result(
    statement: str, shapes: dict[str, tuple[int, ...]], scatter: str
) -> None:
    draw = torch.Generator().manual_seed(0)
    values = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    if "Nb" in values:
        values["Nb"] = torch.randint(-1, 37, shapes["Nb"], generator=draw, dtype=torch.int32)
    if "R" in values:
        values["R"] = torch.randint(0, 12, shapes["R"], generator=draw).sort().values
    options = {
        "padded": ("Nb",) if "Nb" in values else (),
        "sizes": {0: 12} if "R" in values else {},
    }
    exact = {n: v.double() if v.is_floating_point() else v for n, v in values.items()}
    with insum.settings(backend="graph"):
        want = insum.insum(statement, **options, **exact)
    for lazy in (True, False):
        with insum.settings(
            backend="fused",
            require_fused=True,
            dot="always",
            scatter=scatter,
            lazy_broadcasting=lazy,
        ):
            assert relative_error((insum.insum(statement, **options, **values),), (want,)) < 1e-6


@pytest.mark.interpreter
@pytest.mark.parametrize("stage", FUSED, ids=lambda s: s.name)
def test_every_stage_is_right(stage: ablation.AblationStep) -> None:
    given = block_spmm.inputs(128, 0.5, torch.float32, CPU, group_size=2)
    ready = ablation.ready(stage, given)
    assert relative_error(ready.canonical(ready.run()), block_spmm.want(given, FORWARD)) < 1e-6


@pytest.mark.parametrize(
    "stage", [s for s in ablation.stages() if not s.fused], ids=lambda s: s.name
)
def test_unfused_stages_are_right(stage: ablation.AblationStep) -> None:
    given = block_spmm.inputs(128, 0.5, torch.float32, CPU, group_size=2)
    ready = ablation.ready(stage, given)
    assert relative_error(ready.run(), block_spmm.want(given, FORWARD)) < 1e-6
    assert isinstance(ablation.formatted("BlockGroupCOO", given), BlockGroupCOO)


def test_settings_are_part_of_what_is_remembered() -> None:
    """The same statement on the same tensors, with another setting, is another program."""
    for _ in range(2):
        first, second = source(FUSED[0]), source(FUSED[1])
        assert first != second
    with insum.settings(lazy_broadcasting=False) as off:
        eager = off.values
    assert eager != insum.settings.values and hash(eager) != hash(insum.settings.values)


@pytest.mark.interpreter
def test_the_command_says_that_times_of_the_interpreter_mean_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = functools.partial(block_spmm.inputs, 64)
    monkeypatch.setattr(
        block_spmm, "inputs", lambda size, *rest, **options: small(*rest, **options)
    )
    assert (
        main(
            [
                "ablation",
                "--quick",
                "--no-slow",
                "--device",
                "cpu",
                "--data",
                "",
                "--out",
                str(tmp_path),
            ]
        )
        == 0
    )
    (section,) = records.read([tmp_path])
    assert [row.contender for row in section.rows if row.status == "ok"] == [
        *(s.name for s in ablation.stages()),
        "torch.mm",
    ]
    assert (
        "interpreter" in section.notes[0]
        and section.notes[0] in capsys.readouterr().out
        and section.notes[0] in (tmp_path / "report.html").read_text().replace("&#x27;", "'")
    )
