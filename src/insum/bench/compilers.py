"""Compile time and run time of the routes from one line to a result, the paper's comparison of
compilers: first calls with empty caches on disk.

"first call" is everything from the line to the result: planning, generating and compiling.
Converting to the format is noted apart.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import insum
from insum.bench import block_spmm, conv, data, spmm, tensor_product
from insum.bench.ablation import runs_fused
from insum.bench.measure import Comparison, Contender, ReadyContender, Results, Work, clock
from insum.bench.options import BenchOptions
from insum.bench.records import FORWARD
from insum.runtime import launch

TITLE = "Compilers"
STATEMENT = conv.STATEMENT
BASELINE = "torch operations, eager"
NATIVE = "insum, TorchInductor, native matmul"
_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "INSUM_CACHE_DIR")


def cases(options: BenchOptions) -> Iterator[Comparison]:
    if options.slow:
        warm_imports(options)
    for name, build in applications(options).items():
        found = build(options)
        yield Comparison(
            "compilers",
            name,
            found.dtype,
            FORWARD,
            options.device,
            found.want,
            contenders(found, options),
            found.work,
        )


def contenders(found: Built, options: BenchOptions) -> list[Contender]:
    note = (
        f"format conversion {clock(found.convert, options.device, capture=False)[0]:.2f} ms"
        if found.convert
        else ""
    )
    fused = functools.partial(_under, found.ours, backend="fused", require_fused=True)
    every = [
        Contender("insum, fused", _fresh(fused), lines=1, note=note),
        Contender(
            "torch operations, eager",
            functools.partial(_under, found.ours, backend="graph"),
            note="settings.backend='graph'",
        ),
        Contender("torch.compile", _fresh(found.compiled), slow=True),
        Contender(
            "insum, TorchInductor",
            _fresh(functools.partial(found.compiled, native=False)),
            slow=True,
        ),
        Contender(NATIVE, _fresh(functools.partial(found.compiled, native=True)), slow=True),
    ]
    absent = {name for name, _ in not_here(options)}
    return [contender for contender in every if contender.name not in absent]


def warm_imports(options: BenchOptions) -> None:
    """The rival's imports are not its compile time."""
    torch.compile(lambda x: x + 1)(torch.ones(4, device=options.device))


@dataclass(frozen=True, eq=False)
class Built:
    """An application: its reference, its line, the program for torch.compile, and the conversion to
    its format.
    """

    dtype: torch.dtype
    want: Callable[[], Results]
    ours: Callable[[], ReadyContender]
    compiled: Callable[..., ReadyContender]
    convert: Callable[[], Any] | None
    work: Work


def applications(options: BenchOptions) -> dict[str, Callable[[BenchOptions], Built]]:
    """The paper compares on the convolution; without --quick the other three follow."""
    every = {
        "convolution": _convolution,
        "block SpMM": _block,
        "SpMM": _spmm,
        "tensor product": _product,
    }
    return {
        name: make for name, make in every.items() if name == "convolution" or not options.quick
    }


def _built(
    module: Any, given: Any, ours: Callable[[], ReadyContender], convert: Callable[[], Any] | None
) -> Built:
    want, compiled = (
        functools.partial(module.want, given, FORWARD),
        functools.partial(module.compiled, given),
    )
    return Built(given.upstream.dtype, want, ours, compiled, convert, given.work(FORWARD))


def _convolution(options: BenchOptions) -> Built:
    names = data.cloud_names(options.data)
    name = "pc-s3dis-ucf-lobby" if "pc-s3dis-ucf-lobby" in names else names[0]
    voxels = data.cloud(name, options.data, options.device, None if options.gpu else 1000)
    given = conv.inputs(
        voxels, 128 if options.gpu else 16, torch.float16 if options.gpu else torch.float32
    )
    return _built(
        conv,
        given,
        lambda: conv.ours(given, FORWARD, grouped=False),
        lambda: (data.neighbour_table(voxels),),
    )


def _block(options: BenchOptions) -> Built:
    given = block_spmm.inputs(
        4096 if options.gpu else 128,
        0.9,
        torch.float16 if options.gpu else torch.float32,
        options.device,
    )
    convert = functools.partial(
        insum.formats.BlockGroupCOO.from_dense, given.dense, block_shape=(32, 32)
    )
    return _built(block_spmm, given, lambda: block_spmm.ours(given, FORWARD), convert)


def _spmm(options: BenchOptions) -> Built:
    names = data.graph_names(options.data)
    name = "amazon0601" if options.gpu and "amazon0601" in names else names[0]
    given = spmm.inputs(
        data.graph(name, options.data, options.device), 128 if options.gpu else 16, torch.float32
    )
    return _built(
        spmm,
        given,
        lambda: spmm.ours(given, FORWARD),
        functools.partial(insum.formats.GroupCOO.from_torch, given.csr),
    )


def _product(options: BenchOptions) -> Built:
    given = tensor_product.inputs(
        1, 32 if options.gpu else 8, 10_000 if options.gpu else 50, torch.float32, options.device
    )
    return _built(tensor_product, given, lambda: tensor_product.ours(given, FORWARD), None)


def _under(make: Callable[[], ReadyContender], **changes: Any) -> ReadyContender:
    ready = make()

    def run() -> Results:
        with insum.settings(**changes):
            return ready.run()

    return ReadyContender(run, ready.canonical, ready.note)


def _fresh(make: Callable[[], ReadyContender]) -> Callable[[], ReadyContender]:
    """With empty caches on disk at the first call."""

    def made() -> ReadyContender:
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


def not_here(options: BenchOptions) -> list[tuple[str, str]]:
    """Routes that cannot run on this device, and why."""
    fused = (
        []
        if runs_fused(options)
        else [("insum, fused", "fused kernels need a GPU, or TRITON_INTERPRET=1")]
    )
    return fused + ([] if options.gpu else [(NATIVE, "needs a GPU")])
