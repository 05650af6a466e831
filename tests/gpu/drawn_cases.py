"""Drawn statements on the GPU against the oracle, every scatter strategy in turn; one process per
share so that compiling is parallel.

    python tests/gpu/drawn_cases.py --count 40 --processes 12
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import sys
import traceback
from pathlib import Path
from typing import Any

OPTIONS: dict[str, dict[str, Any]] = {
    "any": {},
    "products": {"product_only": True, "max_rank": 3, "affine": False, "max_indirection": 1},
    "scatters": {},  # contractions that scatter, of tests/scatters.py
    "larger": {
        "product_only": True,
        "max_rank": 3,
        "max_extent": 9,
        "zero_extents": False,
        "affine": False,
        "max_indirection": 1,
    },
}


def share(arguments: tuple[int, int]) -> tuple[collections.Counter[str], list[str]]:
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import insum
    from insum.testing import draw_cases
    from scatters import draw_scatters

    seed, count = arguments
    seen: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32)
    for kind, options in OPTIONS.items():
        for strategy in ("auto", "segment", "onehot", "unrolled", "atomic"):
            draws = (
                draw_scatters(count, seed=seed, dtypes=dtypes)
                if kind == "scatters"
                else draw_cases(count, seed=seed, dtypes=dtypes, **options)
            )
            for number, case in enumerate(draws):
                dot = "always" if number % 2 else "auto"
                with insum.settings(backend="fused", require_fused=True, scatter=strategy, dot=dot):
                    try:
                        case.to("cuda").check()
                        seen[f"{kind}/{strategy}"] += 1
                    except insum.NotFusedError:
                        seen["not fused"] += 1
                    except Exception:
                        wrong.append(
                            f"{kind} {strategy} {dot} {case!r}\n{traceback.format_exc(limit=-3)}"
                        )
    return seen, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--processes", type=int, default=12)
    arguments = parser.parse_args()
    total: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        for seen, bad in pool.imap_unordered(
            share, [(s, arguments.count) for s in range(arguments.processes)]
        ):
            total += seen
            wrong += bad
    for text in wrong[:6]:
        print(text[:3000], "\n")
    print(dict(total))
    print(
        f"{sum(n for k, n in total.items() if k != 'not fused')} passed, {len(wrong)} failed, "
        f"{total['not fused']} skipped"
    )


if __name__ == "__main__":
    main()
