"""For tests and doctests alike: PyG exchanges ``torch.index_select`` for its own when a test
imports it. That ends with the test. Examples that import e3nn are skipped where it is not, and
those of several ranks have a ``mesh`` of one. Every test draws the same numbers in every run.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path

# For the few tests that reach Inductor's C++ code, which is small and runs once: without probing
# which vector instructions its compiler knows, and without processes of its own to compile in.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Every program here is traced once: keeping what each operation gave costs more than it saves.
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")

import numpy
import pytest
import torch

_index_select = torch.index_select
_LAST_FILE = pytest.StashKey[Path]()

if importlib.util.find_spec("hypothesis"):  # which tests on a GPU do without
    from hypothesis import HealthCheck, settings

    # The same examples in every run, however long one takes, and no folder that processes share.
    settings.register_profile(
        "same",
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("same")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected lives to the end: none of it is looked through for what could
    be freed.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.set_threshold(50_000, 20, 20)  # tracing makes much that lives a moment longer


def pytest_collection_finish() -> None:
    _compile_without_records()


def _compile_without_records() -> None:
    """pytest takes the records of loggers that keep theirs to themselves, and torch then writes all
    that it compiles into one of those. Beside that it measures its guards, with empty caches of the
    processor, for such a record. Neither is read here.
    """
    logging.getLogger("torch.__trace").propagate = True
    from torch._dynamo import guards

    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *given: 0.0


@pytest.hookimpl(tryfirst=True)  # before fixtures draw
def pytest_runtest_setup(item: pytest.Item) -> None:
    torch.index_select = _index_select
    _leave_alone_what_is_there(item)
    _draw_from_the_start()
    examples = item.dtest.examples if isinstance(item, pytest.DoctestItem) and item.dtest else ()
    if any("from e3nn" in one.source for one in examples) and not _has_e3nn():
        pytest.skip("e3nn is not installed")


def _leave_alone_what_is_there(item: pytest.Item) -> None:
    """What was imported, and what earlier files keep, stays: looking through millions of objects at
    every collection frees nothing.
    """
    if item.config.stash.get(_LAST_FILE, None) != item.path:
        item.config.stash[_LAST_FILE] = item.path
        gc.collect()
        gc.freeze()


def _draw_from_the_start() -> None:
    """Which tests came before in this process is decided by how long those of the others took."""
    random.seed(0)
    numpy.random.seed(0)
    torch.default_generator.manual_seed(0)  # torch.manual_seed notes the stack where no GPU is
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def one_rank(request: pytest.FixtureRequest) -> Iterator[None]:
    """Examples of `insum.distributed` see a ``mesh`` of this process alone."""
    node = request.node
    if not isinstance(node, pytest.DoctestItem) or not node.name.startswith("insum.distributed"):
        yield
        return
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert node.dtest is not None
    node.dtest.globs["mesh"] = init_device_mesh("cpu", (1,))
    yield
    dist.destroy_process_group()


def _has_e3nn() -> bool:
    return importlib.util.find_spec("e3nn") is not None
