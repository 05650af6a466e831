"""Kernels are kept for every pattern of aligned and unaligned pointers: none is sought twice, and
none for a number or a size.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from insum.compat import streams
from insum.plan.sizes import OUT
from insum.runtime import inspection, launch
from insum.runtime.bound_launch import BoundLaunch
from insum.runtime.handwritten.kernel import Handwritten
from insum.runtime.program import Program
from kernels import bound

Launched = list[tuple[int, int, list[Any]]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Which kernels were compiled, by their unaligned pointers. They do nothing, but `launched`
    tells that they were launched.
    """
    found: list[int] = []
    monkeypatch.setattr(launch, "interpreting", lambda: False)

    def compiled(self: BoundLaunch, unaligned: int) -> object:
        found.append(unaligned)
        number = len(found)
        return lambda programs, arguments: launched.append((number, programs, list(arguments)))

    monkeypatch.setattr(BoundLaunch, "compiled", compiled)
    launched.clear()
    return found


launched: Launched = []


def look_at(statement: str, **values: Any) -> inspection.Look:
    return inspection.elsewhere(bound(statement, values), values)


def launch_of(look: inspection.Look, program: Program | None = None) -> BoundLaunch:
    program = program or look.program(anywhere=True)  # type: ignore[assignment]
    assert isinstance(program, Program)
    (one,) = look.ready(program).launches
    return one


def test_each_pattern_of_alignment_is_compiled_once(asked: list[int]) -> None:
    base = torch.zeros(64)
    start = (-base.data_ptr() % 16) // 4
    aligned, shifted = base[start : start + 8], base[start + 1 : start + 9]
    one = launch_of(look_at("y[i] = a[i]", a=aligned))
    patterns: list[tuple[Tensor, Tensor]] = [
        (shifted, aligned),
        (aligned, aligned),
        (aligned, shifted),
        (shifted, shifted),
    ]
    for _ in range(3):
        for a, out in patterns:
            one({"a": a}, out, out)
    assert len(asked) == len(set(asked)) == 4 and len(launched) == 12
    assert [kernel for kernel, _, _ in launched] == [1, 2, 3, 4] * 3
    names = [argument.name for argument in one.launch.arguments]
    for (a, out), (_, programs, arguments) in zip(patterns, launched, strict=False):
        passed = dict(zip(names, arguments, strict=True))
        assert programs == one.programs > 0
        assert passed.pop("a_ptr") == a.data_ptr() and passed.pop("out_at") == out.data_ptr()
        assert passed == {"i_size": 1}, "in units of eight"


def test_unaligned_pointers_are_those_whose_bit_is_set(asked: list[int]) -> None:
    """The bits that a kernel is compiled by are those that its launch counts."""
    base = torch.zeros(64)
    start = (-base.data_ptr() % 16) // 4
    aligned, shifted = base[start : start + 8], base[start + 1 : start + 9]
    one = launch_of(look_at("y[i] = a[i]", a=aligned))
    for a, out in ((aligned, aligned), (shifted, aligned), (aligned, shifted)):
        one({"a": a}, out, out)
    pointers = [name for _, name, _ in one.pointers]
    assert asked == [0, *(1 << pointers[::-1].index(name) for name in ("a", OUT))]


def test_index_tensors_may_begin_anywhere(asked: list[int]) -> None:
    """Rows of a table of edges begin at any address: no kernel is made for each."""
    index = torch.zeros(64, dtype=torch.int64)
    a, out = torch.zeros(8), torch.zeros(8)
    one = launch_of(look_at("y[i] = a[s[i]]", a=a, s=index[:8]))
    for shift in range(4):
        one({"a": a, "s": index[shift : shift + 8]}, out, out)
    assert len(asked) == 1


def test_numbers_are_passed_anew_and_no_kernel_is_made_for_them(asked: list[int]) -> None:
    a, out = torch.zeros(8), torch.zeros(8)
    one = launch_of(look_at("y[i] = s * a[i]", a=a, s=2.5))
    for number in (2.5, 1.0, 0.0, 16.0):
        one({"a": a, "s": number}, out, out)
    place = [argument.name for argument in one.launch.arguments].index("s_number")
    assert [arguments[place] for _, _, arguments in launched] == [2.5, 1.0, 0.0, 16.0]
    assert len(set(asked)) == len(asked) <= 2, "one for each pattern of alignment"


def test_sizes_of_one_class_share_their_kernels(asked: list[int]) -> None:
    first = look_at("y[i] = a[i]", a=torch.zeros(200))
    program = first.program(anywhere=True)
    assert isinstance(program, Program)
    for size in (200, 136, 184, 248):
        look = look_at("y[i] = a[i]", a=torch.zeros(size))
        assert look.sizes.key == first.sizes.key
        out = torch.zeros(size)
        launch_of(look, program)(look.values, out, out)
    assert len(set(asked)) == len(asked), "compiled once for each pattern of alignment"
    place = [argument.name for argument in program.steps[0].launches[0].arguments].index("i_size")
    assert [arguments[place] for _, _, arguments in launched] == [25, 17, 23, 31]


def test_an_empty_grid_launches_nothing(asked: list[int]) -> None:
    one = launch_of(look_at("y[i] = a[i]", a=torch.zeros(8)))
    one.programs = 0
    one({"a": torch.zeros(8)}, torch.zeros(8), torch.zeros(8))
    assert asked == [] and launched == []


def test_a_kernel_written_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled once for dtypes and alignment: addresses come first, then numbers."""
    compiled: list[tuple[tuple[torch.dtype, ...], int, int]] = []
    given: Launched = []

    def made(self: Handwritten, kinds: tuple[torch.dtype, ...], count: int, unaligned: int) -> Any:
        compiled.append((kinds, count, unaligned))
        return lambda programs, arguments: given.append((unaligned, programs, arguments))

    monkeypatch.setattr(launch, "interpreting", lambda: False)
    monkeypatch.setattr(streams, "device_now", lambda: None)
    monkeypatch.setattr(Handwritten, "_compiled", made)
    kernel = Handwritten("probe", 'def probe(a_ptr, b_ptr, n: "i64"):\n    pass\n')
    a, b = torch.zeros(8), torch.zeros(9, dtype=torch.int32)
    for second in (b[:8], b[1:], b[:8]):
        kernel(3, a, second, 7)
    kernel(0, a, b, 7)
    at = a.data_ptr(), b.data_ptr()
    kinds = torch.float32, torch.int32
    assert compiled == [(kinds, 3, 0), (kinds, 3, 1)]
    assert given == [(0, 3, [*at, 7]), (1, 3, [at[0], at[1] + 4, 7]), (0, 3, [*at, 7])]
