"""The paper's ablation in one run on a GPU: each application unfused, through TorchInductor without and with native matrix products, and as our kernel.

    python benchmarks/compilers.py --data DIR [--json FILE] [--only block-spmm,spmm,conv,tensor-product]

Inputs are those of kernels.py. Every variant is compared with float64 first; times are medians of CUDA-graph replays, compile time is the first
call's. ``DIR`` holds graphs and point clouds as .npz files; what is missing is named and skipped.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import insum
import kernels
from insum import compat

VARIANTS: dict[str, dict[str, Any]] = {
    "eager": {"backend": "graph"},
    # What cannot be compiled is reported, and not timed as something else.
    "inductor": {"backend": "inductor", "native_matmul": False, "require_fused": True},
    "native dot": {"backend": "inductor", "native_matmul": True, "require_fused": True},
    "insum": {"backend": "fused", "require_fused": True},
}
TITLES = {"eager": "unfused, eager", "inductor": "TorchInductor", "native dot": "TorchInductor, native dot", "insum": "insum (lazy broadcasting)"}


class Ablation(kernels.Table):
    """A table whose rows hold every variant of one statement instead of rivals."""

    def add(self, application: str, case: str, run: Callable[[], torch.Tensor], want: torch.Tensor, tolerance: float, rivals: kernels.Rivals) -> None:
        if case.endswith("constant"):
            return  # the same statement: only our kernel makes use of the promise
        row: dict[str, Any] = {"application": application, "case": case, "variants": {}, "ok": True}
        for name, settings in VARIANTS.items():
            torch.compiler.reset()  # so that each case is compiled for its own sizes
            with insum.settings(**settings):
                found = measured(run, want)
            if "error" in found:
                found["ok"] = found["error"] < tolerance or name != "insum" and found["error"] < 5 * tolerance
                row["ok"] = row["ok"] and found["ok"]
            row["variants"][name] = found
            print(f"{application:15s} {case:30s} {name:11s} {told(found)}", flush=True)
            torch.cuda.empty_cache()
        self.rows.append(row)


def measured(run: Callable[[], torch.Tensor], want: torch.Tensor) -> dict[str, Any]:
    try:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        first = time.perf_counter() - begin
        kernels.poison(tuple(want.shape), want.dtype if want.dtype != torch.float64 else torch.float32)
        off = kernels.error(run(), want)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        memory = (torch.cuda.max_memory_allocated() - before) / 2**20
        return {"error": off, "first_call_s": round(first, 3), "ms": replayed(run), "kernels": kernel_count(run), "memory_mib": round(memory, 1)}
    except torch.cuda.OutOfMemoryError as error:
        return {"failed": f"out of memory: {str(error).splitlines()[0]}"}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}


def replayed(run: Callable[[], Any]) -> float:
    """Median milliseconds from graph replays; from events where a graph cannot be captured."""
    try:
        return kernels.replay_time(run)
    except RuntimeError as error:
        print(f"  timed with events: {str(error).splitlines()[0]}", file=sys.stderr)
        torch.cuda.synchronize()
    times = []
    for _ in range(30):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def kernel_count(run: Callable[[], Any]) -> int:
    """How many kernels one call launches, copies and fills included; 0 where the profiler does not tell."""
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            run()
            torch.cuda.synchronize()
        return sum(event.count for event in seen.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA)
    except Exception:
        return 0


def told(found: dict[str, Any]) -> str:
    if "failed" in found:
        return f"FAILED {found['failed']}"
    wrong = "" if found["ok"] else "  WRONG"
    return (
        f"{found['ms']:9.4f} ms  {found['kernels']:3d} kernels  {found['memory_mib']:9.1f} MiB  first call {found['first_call_s']:6.2f} s"
        f"  error {found['error']:.1e}{wrong}"
    )


def summary(rows: list[dict[str, Any]]) -> str:
    """One line a case: milliseconds of each variant, and how many times ours is faster."""
    lines = ["", f"{'':46s}" + "".join(f"{TITLES[name]:>28s}" for name in VARIANTS)]
    for row in rows:
        ours = row["variants"]["insum"].get("ms")
        cells = []
        for name in VARIANTS:
            ms = row["variants"][name].get("ms")
            cells.append(f"{'failed':>28s}" if ms is None else f"{ms:14.4f} ms ({ms / ours:7.2f}x)" if ours else f"{ms:25.4f} ms")
        lines.append(f"{row['application']:15s} {row['case']:30s}" + "".join(cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="../shared/data")
    parser.add_argument("--json", default=str(Path(__file__).parent / "results" / "compilers.json"))
    parser.add_argument("--only", default="block-spmm,spmm,conv,tensor-product")
    parser.add_argument("--graphs", default="amazon0601")
    parser.add_argument("--clouds", default="pc-s3dis-ucf-lobby")
    arguments = parser.parse_args()
    table, data, only = Ablation(), Path(arguments.data), arguments.only.split(",")
    if not compat.has_native_matmul():
        print("this PyTorch has no native matmul: both rows of TorchInductor are the same")
    if "block-spmm" in only:
        kernels.block_spmm(table, data, None, sparsities=(0.5, 0.9))
    if "spmm" in only:
        kernels.spmm(table, data, tuple(arguments.graphs.split(",")), dtypes=(torch.float32,))
    if "conv" in only:
        kernels.conv(table, data, None, tuple(arguments.clouds.split(",")))
    if "tensor-product" in only:
        kernels.tensor_product(table, None, None, widths=(64,))
    print(summary(table.rows))
    if arguments.json:
        about = {"command": " ".join(["python", *(Path(a).name if a.startswith("/") else a for a in sys.argv)]), "date": datetime.date.today().isoformat()}
        about |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "insum": insum.__version__, "rows": table.rows}
        Path(arguments.json).write_text(json.dumps(about, indent=1) + "\n")
    if not all(row["ok"] for row in table.rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
