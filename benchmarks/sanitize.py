"""Every application forward and backward once, at a small size, for compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 1 python benchmarks/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python benchmarks/sanitize.py

PyTorch's caching allocator is switched off, so that a kernel that leaves its tensor is seen to
leave it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
sys.path[:0] = [str(Path(__file__).resolve().parent.parent / folder) for folder in ("tests", "src")]

import torch  # noqa: E402

import applications  # noqa: E402
import insum  # noqa: E402


def small(device: str) -> list[applications.Application]:
    """Large enough for several tiles and for rows that are cut, with sizes that no tile divides."""
    half, single = torch.float16, torch.float32
    return [
        *applications.tiny(device),
        applications.block_spmm(
            rows=5, columns=6, block=32, n=300, density=0.4, dtype=half, device=device
        ),
        applications.block_spmm(
            rows=5, columns=6, block=32, n=300, density=0.4, group=2, dtype=half, device=device
        ),
        applications.spmm(
            rows=50, columns=20_000, n=40, entries=1500, heavy=4000, dtype=single, device=device
        ),
        applications.spmm(
            rows=50,
            columns=20_000,
            n=40,
            entries=1500,
            heavy=4000,
            group=4,
            dtype=half,
            device=device,
        ),
        applications.convolution(
            voxels=300,
            offsets=9,
            inputs=40,
            outputs=72,
            layout="by voxel",
            dtype=half,
            device=device,
        ),
        applications.convolution(
            voxels=300,
            offsets=9,
            inputs=40,
            outputs=72,
            layout="grouped",
            dtype=half,
            device=device,
        ),
        applications.tensor_product(
            batch=70, channels=32, constant=False, dtype=single, device=device
        ),
        applications.tensor_product(
            batch=70, channels=32, constant=True, dtype=single, device=device
        ),
    ]


def main() -> int:
    wrong = 0
    with insum.settings(require_fused=True):
        for application in small("cuda"):
            upstream = application.upstream()
            expected = {"": application.expected(), **application.expected_gradients(upstream)}
            for name, call in {"": application.forward, **application.gradients(upstream)}.items():
                error = applications.relative_error(call.run(), expected[name])
                torch.cuda.synchronize()
                allowed = 2e-3 if upstream.dtype == torch.float16 else 1e-5
                wrong += error > allowed
                print(
                    f"{'ok   ' if error <= allowed else 'WRONG'} {error:.1e}  {call.name}",
                    flush=True,
                )
    print(f"{wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
