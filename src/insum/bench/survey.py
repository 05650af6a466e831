"""``insum bench survey``: statements that people write every day and that nobody tuned for, each
beside the same in PyTorch's own operations, eager and compiled.

What falls short here is a cliff: a statement of which something was planned badly. Sizes are those
of a layer; with ``--drawn SEED`` they are drawn around those, so that nothing can have been tuned
for them, and with ``--random SEED`` the statements are drawn. Indices come back, as in the gallery,
whose exhibits these are too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from insum.bench import (
    surveyed_graphs,
    surveyed_matrices,
    surveyed_others,
    surveyed_random,
    surveyed_tables,
)
from insum.bench.data import RandomTensors
from insum.bench.gallery import Exhibit, compared, sizes_here
from insum.bench.measure import Comparison
from insum.bench.options import BenchOptions
from insum.bench.survey_tensors import SurveyTensors

TITLE = "Survey"
STATEMENT = "insum.insum(STATEMENT, ...)"
BASELINE = "torch.compile"
GROUPS = (
    surveyed_graphs.rows,
    surveyed_graphs.messages,
    surveyed_graphs.totals,
    surveyed_graphs.batches,
    surveyed_graphs.classes,
    surveyed_tables.tables,
    surveyed_tables.lookups,
    surveyed_tables.choices,
    surveyed_matrices.matrices,
    surveyed_matrices.blocks,
    surveyed_matrices.windows,
    surveyed_matrices.products,
    surveyed_others.picked,
    surveyed_others.algebra,
    surveyed_others.sums,
    surveyed_others.sliding,
    surveyed_others.layers,
)


def cases(options: BenchOptions) -> Iterator[Comparison]:
    for dtype in options.dtypes_or(torch.float32, torch.float16):
        for exhibit in _exhibits(options, dtype):
            if not options.names or any(name in exhibit.name for name in options.names):
                yield from compared(exhibit, options, "survey")


def _exhibits(options: BenchOptions, dtype: torch.dtype) -> Iterator[Exhibit]:
    if options.random is not None:
        (points,) = sizes_here(options, surveyed_random.MOST_POINTS)
        draw = RandomTensors(options.device, dtype)
        yield from surveyed_random.exhibits(draw, options.random, points)
        return
    given = _given(options, dtype)
    for group in GROUPS:
        for exhibit in group(given):
            yield replace(exhibit, rivals={"torch.compile": torch.compile(exhibit.formula)})


def _given(options: BenchOptions, dtype: torch.dtype) -> SurveyTensors:
    n, e, t = sizes_here(options, 40_000, 400_000, 8192)
    return SurveyTensors(RandomTensors(options.device, dtype), n, e, t).drawn(options.drawn)
