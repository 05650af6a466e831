"""The kernels and patterns that docs/gallery.md shows, into
benchmarks/results/gallery_kernels.json: as the generator writes them for an H200, for every
statement of ``insum bench gallery`` at small sizes. No GPU is needed.

    python benchmarks/gallery_kernels.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
from patterns import panels_of

import insum
from insum.bench.gallery import EXHIBITS, Exhibit
from insum.bench.options import BenchOptions
from insum.call.request import request_of
from insum.explanation import parts_of
from insum.runtime import inspection
from insum.runtime.program import Refusal

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    timed = json.loads((RESULTS / "gallery.json").read_text(encoding="utf-8"))
    (section,) = timed["sections"]
    cases = list(dict.fromkeys(row["case"] for row in section["rows"]))
    options = BenchOptions(device=torch.device("cpu"), quick=True)
    exhibits = [exhibit for make in EXHIBITS for exhibit in make(options)]
    assert len(cases) == len(exhibits), "gallery.json has other cases than the gallery"
    record = {
        "command": "python benchmarks/gallery_kernels.py",
        "date": date.today().isoformat(),
        "insum": insum.__version__,
        "architecture": "sm_90",
        "kernels": [shown(case, exhibit) for case, exhibit in zip(cases, exhibits)],
    }
    text = json.dumps(record, indent=1) + "\n"
    (RESULTS / "gallery_kernels.json").write_text(text, encoding="utf-8")


def shown(case: str, exhibit: Exhibit) -> dict[str, Any]:
    return {
        "case": case,
        "statement": exhibit.statement,
        "options": {name: repr(value) for name, value in exhibit.options.items()},
        "shapes": {
            name: f"{str(t.dtype).removeprefix('torch.')}{tuple(t.shape)}"
            for name, t in exhibit.tensors.items()
        },
        "pattern": panels_of(exhibit.statement, exhibit.tensors),
        "parts": list(parts(exhibit)),
    }


def parts(exhibit: Exhibit) -> Iterator[dict[str, str]]:
    """Each statement that the call runs, its strategy and the source of its kernel."""
    told = exhibit.options
    request = request_of(
        exhibit.statement, told.get("out_shape"), told.get("sizes"), told.get("padded", ())
    )
    for part in parts_of(request, exhibit.tensors):
        look = inspection.elsewhere(part.problem, part.values)
        program = look.program(anywhere=True)
        if isinstance(program, Refusal):
            continue
        for step in program.steps:
            for one in step.launches:
                yield {
                    "statement": str(part.problem.statement),
                    "strategy": step.planned.plan.strategy,
                    "config": str(one.config),
                    "kernel": one.kernel.source,
                }


if __name__ == "__main__":
    main()
