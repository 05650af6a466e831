"""The cost model: its terms go the way they must, and it says what it thinks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from applications import Application, block_spmm, spmm, tiny
from insum.plan import cost
from insum.plan.config import Config
from insum.plan.draft import Planned
from insum.plan.orientation import oriented
from insum.runtime.build import first_choice
from insum.runtime.inspection import Look
from insum.runtime.shelf import wishes_of

DEVICE = cost.Device()


def look_at(application: Application) -> Look:
    return Look(application.forward.problem(), application.values)


def prepared(application: Application) -> Planned:
    (one,) = look_at(application).planned()
    return one


def predicted(
    application: Application, *configs: Config, device: cost.Device = DEVICE
) -> cost.Cost:
    look = look_at(application)
    (one,) = look.planned()
    choice = configs or first_choice(one, look.wishes)
    turned = oriented(one.plan, one.extents, choice[0].swap)
    return cost.predict(turned, one.extents, choice, device, look.load(one))


def blocks(density: float = 0.2, n: int = 2048) -> Application:
    return block_spmm(rows=64, columns=64, block=32, n=n, density=density, dtype=torch.float16)


def rows(entries: int = 40_000, dtype: torch.dtype = torch.float32) -> Application:
    return spmm(rows=4000, columns=4000, n=128, entries=entries, heavy=1500, dtype=dtype)


@pytest.mark.parametrize("application", tiny(), ids=lambda a: a.name)
def test_every_application_has_a_prediction(application: Application) -> None:
    found = predicted(application)
    assert (
        found.total > 0
        and found.parts
        and min(found.hbm, found.l2, found.arithmetic, found.launches) >= 0
    )
    text = found.describe()
    assert all(
        word in text
        for word in (
            "µs",
            "HBM",
            "L2",
            "arithmetic",
            "launches",
            "programs",
            "waves",
            "registers",
            "shared",
        )
    )


def test_more_work_takes_longer() -> None:
    assert predicted(blocks(0.1)).total < predicted(blocks(0.4)).total
    assert predicted(blocks(n=1024)).total < predicted(blocks(n=4096)).total
    assert predicted(rows(20_000)).l2 < predicted(rows(80_000)).l2
    assert predicted(rows(400_000, torch.float16)).l2 < predicted(rows(400_000)).l2


def test_a_lesser_device_takes_longer() -> None:
    half = dataclasses.replace(DEVICE, multiprocessors=66, hbm=2.0, l2=5.0, half=350.0)
    for application in (blocks(), rows()):
        assert predicted(application, device=half).total >= predicted(application).total


def test_occupancy_is_limited_by_registers_and_shared_memory() -> None:
    small, deep = (predicted(blocks(), Config(m=128, n=32, k=32, stages=s, swap=1)) for s in (2, 8))
    assert deep.parts[0].shared > small.parts[0].shared and deep.occupancy < small.occupancy
    wide = predicted(blocks(), Config(m=256, n=32, k=32, warps=4, swap=1))
    assert wide.parts[0].registers > small.parts[0].registers


def test_matrix_instructions_want_a_long_m() -> None:
    tall, flat = (
        predicted(blocks(), Config(m=128, n=32, k=32, swap=1)),
        predicted(blocks(), Config(m=32, n=128, k=32, swap=0)),
    )
    assert tall.parts[0].rate > flat.parts[0].rate


def test_rows_have_a_part_for_each_launch() -> None:
    many = spmm(
        rows=40_000, columns=40_000, n=128, entries=400_000, heavy=1500, dtype=torch.float32
    )
    assert [part.name for part in predicted(many).parts] == ["long rows", "short rows"]
    short, long = first_choice(prepared(many), wishes_of(""))
    assert short.split and predicted(many).launches == 2 * DEVICE.launch
    whole = predicted(many, dataclasses.replace(short, split=0), long)
    assert whole.parts[0].programs < predicted(many).parts[0].programs, "pieces are more"
    assert whole.launches == predicted(many).launches, "whoever has a row's last piece sums all"


def test_few_entries_are_in_one_launch() -> None:
    few = predicted(rows())
    assert [part.name for part in few.parts] == ["long rows", "short rows"]
    assert few.launches == DEVICE.launch
    short, long = first_choice(prepared(rows()), wishes_of(""))
    other = dataclasses.replace(long, warps=2 * long.warps)
    assert predicted(rows(), short, other).launches == 2 * DEVICE.launch, "no launch has both"


def test_the_histogram_of_row_lengths() -> None:
    assert cost.histogram(torch.tensor([], dtype=torch.int32)) == ()
    lengths = torch.tensor([0, 1, 2, 3, 1000, 1024], dtype=torch.int32)
    assert cost.histogram(lengths) == ((1, 1), (2, 2), (1000, 1), (1024, 1))
    assert cost.Load({}, cost.histogram(lengths)).entries == pytest.approx(2030, rel=0.01)


def test_the_default_device_stands_in_where_there_is_none() -> None:
    assert cost.device_of(torch.device("cpu")) == DEVICE


@pytest.mark.gpu
def test_the_device_is_described_by_the_driver() -> None:
    found = cost.device_of(torch.device("cuda", 0))
    assert (
        found.name == torch.cuda.get_device_name()
        and found.multiprocessors > 0
        and 0.1 < found.hbm < 20
        and found.shared >= 48 * 1024
    )
