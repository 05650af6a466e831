"""Compile time and run time of the routes from one line to a result, the paper's comparison of compilers: first calls with empty caches on disk.

"first call" is everything from the line to the result: planning, generating and compiling. Converting to the format is noted apart.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch

import insum
from insum.bench import block_spmm, conv, data, spmm, tensor_product
from insum.bench.ablation import runs_fused
from insum.bench.measure import Case, Contender, Ready, Results, Work, clock
from insum.bench.options import Options
from insum.bench.records import FORWARD
from insum.runtime import launch

TITLE = "Compilers"
STATEMENT = conv.STATEMENT
BASELINE = "torch operations, eager"
_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "INSUM_CACHE_DIR")


def cases(options: Options) -> Iterator[Case]:
    warm_imports(options)
    for name, build in applications(options).items():
        dtype, want, ours, compiled, convert, work = build()
        note = f"format conversion {clock(convert, options.device, capture=False)[0]:.2f} ms" if convert else ""
        found = [
            Contender("insum, fused", _fresh(lambda ours=ours: _under(ours, backend="fused", require_fused=True)), lines=1, note=note),
            Contender("torch operations, eager", lambda ours=ours: _under(ours, backend="graph"), note="settings.backend='graph'"),
            Contender("torch.compile", _fresh(compiled)),
        ]
        if not runs_fused(options):
            found = found[1:]
        if options.gpu:
            found.append(Contender("torch.compile, native matmul", _fresh(lambda compiled=compiled: compiled(**{"triton.native_matmul": True}))))
        yield Case("compilers", name, dtype, FORWARD, options.device, want, found, work)


def warm_imports(options: Options) -> None:
    """The rival's imports are not its compile time."""
    torch.compile(lambda x: x + 1)(torch.ones(4, device=options.device))


Build = tuple[torch.dtype, Callable[[], Results], Callable[[], Ready], Callable[..., Ready], Callable[[], Any] | None, Work]


def applications(options: Options) -> dict[str, Callable[[], Build]]:
    """The paper compares on the convolution; without --quick the other three follow."""
    every = {"convolution": _convolution, "block SpMM": _block, "SpMM": _spmm, "tensor product": _product}
    return {name: (lambda make=make: make(options)) for name, make in every.items() if name == "convolution" or not options.quick}


def _convolution(options: Options) -> Build:
    names = data.cloud_names(options.data)
    name = "pc-s3dis-ucf-lobby" if "pc-s3dis-ucf-lobby" in names else names[0]
    voxels = data.cloud(name, options.data, options.device, None if options.gpu else 1000)
    given = conv.inputs(voxels, 128 if options.gpu else 16, torch.float16 if options.gpu else torch.float32)
    convert = lambda: (data.neighbour_table(voxels),)
    return (
        given.x.dtype,
        lambda: conv.want(given, FORWARD),
        lambda: conv.ours(given, FORWARD, grouped=False),
        _later(conv.compiled, given),
        convert,
        given.work(FORWARD),
    )


def _block(options: Options) -> Build:
    given = block_spmm.inputs(4096 if options.gpu else 128, 0.9, torch.float16 if options.gpu else torch.float32, options.device)
    convert = lambda: (insum.formats.BlockGroupCOO.from_dense(given.dense, block_shape=(32, 32)).values,)
    return (
        given.b.dtype,
        lambda: block_spmm.want(given, FORWARD),
        lambda: block_spmm.ours(given, FORWARD),
        _later(block_spmm.compiled, given),
        convert,
        given.work(FORWARD),
    )


def _spmm(options: Options) -> Build:
    names = data.graph_names(options.data)
    name = "amazon0601" if options.gpu and "amazon0601" in names else names[0]
    given = spmm.inputs(data.graph(name, options.data, options.device), 128 if options.gpu else 16, torch.float32)
    convert = lambda: (insum.formats.GroupCOO.from_torch(given.csr).values,)
    return given.b.dtype, lambda: spmm.want(given, FORWARD), lambda: spmm.ours(given, FORWARD), _later(spmm.compiled, given), convert, given.work(FORWARD)


def _product(options: Options) -> Build:
    given = tensor_product.inputs(1, 32 if options.gpu else 8, 10_000 if options.gpu else 50, torch.float32, options.device)
    want = lambda: tensor_product.want(given, FORWARD)
    return given.x.dtype, want, lambda: tensor_product.ours(given, FORWARD), _later(tensor_product.compiled, given), None, given.work(FORWARD)


def _later(compiled: Callable[..., Ready], given: Any) -> Callable[..., Ready]:
    return lambda **options: compiled(given, **options)


def _under(make: Callable[[], Ready], **changes: Any) -> Ready:
    ready = make()

    def run() -> Results:
        with insum.settings(**changes):
            return ready.run()

    return Ready(run, ready.canonical, ready.note)


def _fresh(make: Callable[[], Ready]) -> Callable[[], Ready]:
    """With empty caches on disk at the first call."""

    def made() -> Ready:
        launch.forget()
        with empty_caches():
            ready = make()
            ready.run()
        return ready

    return made


@contextlib.contextmanager
def empty_caches() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _CACHES}
    with tempfile.TemporaryDirectory(prefix="insum-bench-", ignore_cleanup_errors=True) as folder:
        os.environ.update({name: os.path.join(folder, name) for name in _CACHES[:2]})
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def not_here(options: Options) -> list[tuple[str, str]]:
    """Routes that cannot run on this device, and why."""
    fused = [] if runs_fused(options) else [("insum, fused", "fused kernels need a GPU, or TRITON_INTERPRET=1")]
    return fused + ([] if options.gpu else [("torch.compile, native matmul", "needs a GPU")])
