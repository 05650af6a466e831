"""What must not grow, and what must not break, on a GPU:

    python benchmarks/limits.py [calls] [nonzeros] [offences] [--json FILE]

- calls: 5,000 calls of random sizes, strides and settings; kernels compiled for each statement,
  memory on the host and on the device;
- nonzeros: 400 million of them in sorted rows, planned and multiplied; peak memory beside inputs
  and outputs;
- offences: indices out of range, which are reported and leave the process alive. Also under
  ``compute-sanitizer --tool memcheck --error-exitcode 1``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if "offences" in sys.argv:  # a kernel that leaves its tensor is then seen to leave it
    os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "src")]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import insum  # noqa: E402
from insum import memory  # noqa: E402
from insum.runtime import launch  # noqa: E402

CUDA = "cuda"
SUM = "y[d[e],f] = w[e] * x[s[e],f]"
MOST_KERNELS = 64


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


# --- many calls -----------------------------------------------------------------------------------


def drawn(draw: random.Random) -> dict[str, Any]:
    """Sizes over three orders of magnitude, any width, rows that do not lie in a row."""
    nodes, edges = int(10 ** draw.uniform(1, 4)), int(10 ** draw.uniform(1, 5))
    width = draw.choice((1, 3, 8, 17, 32, 64, 100, 128, 200))
    kind = draw.choice((torch.float32, torch.float16))
    x = torch.randn(nodes, width + draw.choice((0, 0, 1, 8)), device=CUDA, dtype=kind)[:, :width]
    s, d = torch.randint(0, nodes, (2, edges), device=CUDA)
    w = torch.randn(edges, device=CUDA, dtype=kind)
    return {"x": x, "s": s, "d": d, "w": w, "out_shape": (nodes, width)}


def many_calls(count: int) -> dict[str, Any]:
    draw = random.Random(0)
    before, marks = launch.compile_count(), []
    for number in range(count):
        given = drawn(draw)
        deterministic = draw.random() < 0.1
        torch.use_deterministic_algorithms(deterministic)
        with insum.settings(tier=draw.choice(("auto", "stable"))):
            result = insum.insum(SUM, **given)
        torch.use_deterministic_algorithms(False)
        if number % 500 == 0:
            check(result, given)
        if number in (count // 2, count - 1):
            torch.cuda.synchronize()
            marks.append((resident_mib(), torch.cuda.memory_allocated() / 2**20))
    return {
        "calls": count,
        "compiled": launch.compile_count() - before,
        "most": MOST_KERNELS,
        "resident_mib": [m[0] for m in marks],
        "device_mib": [m[1] for m in marks],
        "remembered": str(memory.report()),
    }


def check(result: Tensor, given: dict[str, Any]) -> None:
    messages = given["x"].double()[given["s"]] * given["w"].double()[:, None]
    want = torch.zeros(given["out_shape"], dtype=torch.float64, device=CUDA)
    want.index_add_(0, given["d"], messages)
    scale = want.abs().max().item() + 1e-6
    limit = 2e-2 if result.dtype == torch.float16 else 1e-5
    assert (result.double() - want).abs().max().item() < limit * scale


# --- many nonzeros --------------------------------------------------------------------------------


def many_nonzeros(count: int) -> dict[str, Any]:
    rows, columns, width = count // 50, count // 100, 8
    AM = torch.arange(count, device=CUDA, dtype=torch.int64).div_(50, rounding_mode="floor").int()
    AM.clamp_(max=rows - 1)
    AK = torch.randint(0, columns, (count,), device=CUDA, dtype=torch.int32)
    AV = torch.randn(count, device=CUDA, dtype=torch.float16)
    B = torch.randn(columns, width, device=CUDA, dtype=torch.float16)
    torch.cuda.empty_cache()
    insum.unchanging(AM)
    given = sum(t.nbytes for t in (AM, AK, AV, B))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    C = insum.insum("C[AM[p],n] = AV[p] * B[AK[p],n]", AM=AM, AK=AK, AV=AV, B=B, sizes={0: rows})
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    row = slice(50 * 777, 50 * 778)
    want = (AV[row].double()[:, None] * B[AK[row].long()].double()).sum(0)
    error = ((C[777].double() - want).abs().max() / want.abs().max()).item()
    share = (peak - C.nbytes) / (given + C.nbytes)
    return {
        "nonzeros": count,
        "inputs_and_outputs_gib": (given + C.nbytes) / 2**30,
        "peak_beside_them_gib": (peak - C.nbytes) / 2**30,
        "share": share,
        "error": error,
    }


# --- indices out of range -------------------------------------------------------------------------


def offences() -> dict[str, Any]:
    found = {}
    for name, offend in (
        ("gathered", lambda: _call(s=(7, 500))),
        ("scattered", lambda: _call(d=(9, 300))),
        ("negative", lambda: _call(s=(3, -2))),
        ("in place", _in_place),
        ("after it was known", _known),
    ):
        found[name] = _report(offend)
        _call()
        insum.synchronize()
    return found


def _call(**wrong: tuple[int, int]) -> Tensor:
    torch.manual_seed(0)
    x, ends = torch.randn(300, 33, device=CUDA), torch.randint(0, 300, (2, 1000), device=CUDA)
    given = {"s": ends[0].clone(), "d": ends[1].clone(), "w": torch.ones(1000, device=CUDA)}
    for name, (place, value) in wrong.items():
        given[name][place] = value
    return insum.insum(SUM, x=x, out_shape=(300, 33), **given)  # type: ignore[arg-type]


def _in_place() -> None:
    target, index = torch.zeros(10, 4, device=CUDA), torch.arange(8, device=CUDA)
    index[5] = 10
    x = torch.ones(8, 4, device=CUDA)
    insum.insum("C[i[e],f] += x[e,f]", C=target, i=index, x=x)
    torch.cuda.synchronize()
    assert not target.any(), "a target is left as it was"


def _known() -> None:
    x, index = torch.randn(50, 8, device=CUDA), torch.randint(0, 50, (400,), device=CUDA)
    for _ in range(8):
        insum.insum("y[e,f] = x[i[e],f]", x=x, i=index)
        torch.cuda.synchronize()
    index[17] = 77
    insum.insum("y[e,f] = x[i[e],f]", x=x, i=index)


def _report(offend: Callable[[], object]) -> str:
    try:
        offend()
        insum.synchronize()
    except insum.IndexRangeError as error:
        return str(error).splitlines()[0]
    raise AssertionError("nothing was reported")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("what", nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--nonzeros", type=int, default=400_000_000)
    asked = parser.parse_args()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "calls": lambda: many_calls(asked.calls),
        "nonzeros": lambda: many_nonzeros(asked.nonzeros),
        "offences": offences,
    }
    record: dict[str, Any] = {
        "command": " ".join(["python benchmarks/limits.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    for name in asked.what or parts:
        record[name] = parts[name]()
        print(name, json.dumps(record[name], indent=1), flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
