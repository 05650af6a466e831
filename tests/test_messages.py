"""What insum says to every mistake a user can make: tests/golden/messages.txt, which reads as a
list of them.

Each call of that file must fail with the text beneath it, and leave what was passed to it as it
was.
"""

from __future__ import annotations

import os
import pickle
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, ones, tensor, zeros
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import insum
from insum.accepted import odd_tensor
from insum.errors import InsumError, Span
from insum.lang.types import INTEGERS as INDEX_DTYPES
from insum.testing import Case, assert_close, draw_cases

GALLERY = Path(__file__).parent / "golden" / "messages.txt"
UPDATE = bool(os.environ.get("INSUM_UPDATE_GOLDEN"))
_ENTRY = re.compile(
    r"^== (?P<title>.*)\n>>> (?P<call>.*)\n(?P<answer>(?:(?!== |# ).*\n?)*)", re.MULTILINE
)


def inference() -> Tensor:
    with torch.inference_mode():
        return zeros(3)


NAMES = {
    "torch": torch,
    "np": np,
    "ones": ones,
    "zeros": zeros,
    "tensor": tensor,
    "inference": inference,
}
ENTRIES = {entry["title"]: entry for entry in _ENTRY.finditer(GALLERY.read_text(encoding="utf-8"))}


def arguments(title: str) -> tuple[str, dict[str, Any]]:
    """The statement and the keywords of an entry, made anew."""
    statement, keywords = eval(
        f"(lambda statement, **keywords: (statement, keywords))({ENTRIES[title]['call']})",
        dict(NAMES),
    )
    return statement, keywords


OPTIONS = ("sizes", "out_shape", "padded", "optimize")


def options_of(keywords: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    options = {k: v for k, v in keywords.items() if k in OPTIONS}
    return options, {k: v for k, v in keywords.items() if k not in options}


def error_of(call: Callable[[], object]) -> InsumError:
    with pytest.raises(InsumError) as caught:
        call()
    return caught.value


def shown(error: InsumError) -> str:
    """As it stands in the file: the class, then the message, without blanks at ends of lines."""
    return "\n".join(line.rstrip() for line in [type(error).__name__, *str(error).splitlines()])


def snapshot(value: Any) -> Any:
    if isinstance(value, Tensor) and odd_tensor(value):
        return odd_tensor(value)
    if not isinstance(value, Tensor) or value.device.type == "meta":
        return repr(value)
    raw = bytes(value.detach().untyped_storage().tolist())
    return (
        raw,
        None if value.is_inference() else value._version,
        value.shape,
        value.stride(),
        value.requires_grad,
        value.grad_fn,
    )


# --- the gallery ----------------------------------------------------------------------------------


def update() -> None:
    """Rewrite the answers of the file."""

    def answered(entry: re.Match[str]) -> str:
        statement, keywords = arguments(entry["title"])
        return (
            f"== {entry['title']}\n>>> {entry['call']}\n"
            f"{shown(error_of(lambda: insum.insum(statement, **keywords)))}\n\n"
        )

    GALLERY.write_text(_ENTRY.sub(answered, GALLERY.read_text(encoding="utf-8")), encoding="utf-8")
    ENTRIES.update(
        {entry["title"]: entry for entry in _ENTRY.finditer(GALLERY.read_text(encoding="utf-8"))}
    )


if UPDATE:
    update()


@pytest.mark.parametrize("title", ENTRIES)
def test_message(title: str) -> None:
    statement, keywords = arguments(title)
    before = {name: snapshot(value) for name, value in keywords.items()}
    error = error_of(lambda: insum.insum(statement, **keywords))
    assert shown(error) == ENTRIES[title]["answer"].strip("\n")
    assert {name: snapshot(value) for name, value in keywords.items()} == before, (
        "a failed call changed an argument"
    )
    assert shown(error_of(lambda: insum.insum(statement, **keywords))) == shown(error), (
        "the second call says something else"
    )


@pytest.mark.parametrize("title", ENTRIES)
def test_a_compiled_statement_says_the_same(title: str) -> None:
    statement, keywords = arguments(title)
    options, tensors = options_of(keywords)
    direct = error_of(lambda: insum.insum(statement, **keywords))
    assert shown(error_of(lambda: insum.compile(statement, **options)(**tensors))) == shown(direct)


class Passing(TorchFunctionMode):
    """Takes a call off the short way past the dispatcher, and changes nothing else."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("title", ENTRIES)
def test_the_registered_op_says_the_same(title: str) -> None:
    statement, keywords = arguments(title)
    before = {name: snapshot(value) for name, value in keywords.items()}
    direct = error_of(lambda: insum.insum(statement, **keywords))
    with Passing():
        through = error_of(lambda: insum.insum(statement, **keywords))
    assert (type(through), through.fact, through.span, through.remedy) == (
        type(direct),
        direct.fact,
        direct.span,
        direct.remedy,
    )
    assert {name: snapshot(value) for name, value in keywords.items()} == before


@pytest.mark.parametrize("title", ENTRIES)
def test_every_message_is_complete(title: str) -> None:
    """The fact first; the statement as it was written; a place or the arguments wherever they are
    known; something to do.
    """
    statement, keywords = arguments(title)
    error = error_of(lambda: insum.insum(statement, **keywords))
    lines = str(error).splitlines()
    assert lines[0] == error.fact and not error.fact.endswith(".")
    assert error.expected or error.remedy or error.span is not None
    if isinstance(statement, str) and statement:
        assert statement[:20].splitlines()[0] in str(error) or "..." in str(error)
    if error.span is not None and error.statement:
        caret = next(line for line in lines if line.strip(" ^") == "" and "^" in line)
        above = lines[lines.index(caret) - 1]
        marked = error.statement[error.span.start : error.span.end]
        assert above[caret.index("^") : caret.rindex("^") + 1] == marked[
            :100
        ] or error.span.start >= len(error.statement)


def test_the_gallery_holds_what_was_promised() -> None:
    kinds = {entry["answer"].split("\n")[0] for entry in ENTRIES.values()}
    assert kinds == {
        "StatementError",
        "BindingError",
        "DtypeError",
        "DeviceError",
        "IndexRangeError",
        "AutogradError",
    }
    text = GALLERY.read_text(encoding="utf-8")
    promised = [
        "unknown character",
        "unbalanced bracket",
        "unknown tensor",
        "unused tensor",
        "dimension(s)",
        "has two extents",
        "D indexes A but holds",
    ]
    promised += [
        "D[1] is 3, but it indexes dimension 0 of x, which has size 3",
        "is -1",
        "is unknown",
        "the output y holds int64",
    ]
    promised += [
        "is on cpu but y is on meta",
        "cannot be written in place",
        "is a reserved name",
        "nested more than 50 levels",
    ]
    assert [fact for fact in promised if fact not in text] == []
    assert len(ENTRIES) > 90


# --- errors that need more than one call ----------------------------------------------------------


@contextmanager
def recorded() -> Iterator[list[InsumError]]:
    found: list[InsumError] = []
    with pytest.raises(InsumError) as caught:
        yield found
    found.append(caught.value)


def test_what_torch_itself_forbids_is_explained() -> None:
    row = (zeros(2, 3, requires_grad=True) * 1).unbind()[0]
    error = error_of(lambda: insum.insum("y[i] += x[i]", y=row, x=ones(3)))
    assert isinstance(error, insum.AutogradError) and "in-place" in error.fact.lower().replace(
        "inplace", "in-place"
    )
    assert "pass y=y.clone()" in str(error) and torch.equal(row, zeros(3))


def test_no_gradient_no_refusal() -> None:
    leaf = zeros(3, requires_grad=True)
    with torch.no_grad():
        assert insum.insum("y[i] += x[i]", y=leaf, x=ones(3)) is leaf
    assert leaf.tolist() == [1, 1, 1]


def test_values_that_are_not_referred_to_are_no_error() -> None:
    assert insum.insum(
        "y[i] = x[D[2*i]]", x=tensor([5.0, 6.0]), D=tensor([0, 99, 1]), sizes={"i": 2}
    ).tolist() == [5, 6]
    with recorded() as found:
        insum.insum("y[i] = x[D[2*i]]", x=tensor([5.0, 6.0]), D=tensor([0, 1, 99]), sizes={"i": 2})
    assert found[0].fact.startswith("D[2] is 99")


def test_index_values_are_looked_at_again_when_they_change() -> None:
    x, D = ones(3), tensor([0, 1, 2])
    for check in ("async", "always"):
        with insum.settings(check=check):
            insum.insum("y[p] = x[D[p]]", x=x, D=D)
            D[1] = 7
            with recorded() as found:
                insum.insum("y[p] = x[D[p]]", x=x, D=D)
            assert "D[1] is 7" in str(found[0])
            D[1] = 1


def test_checks_can_be_turned_off() -> None:
    """The padding convention needs no check; what torch does with a bad index is then torch's
    affair, but nothing is written.
    """
    with insum.settings(check="never"):
        assert insum.insum("y[p] = x[D[p]]", x=ones(3), D=tensor([0, -1]), padded="D").tolist() == [
            1,
            0,
        ]


def test_no_fused_kernel() -> None:
    with insum.settings(require_fused=True, backend="graph"), recorded() as found:
        insum.insum("y[i] = x[i]", x=ones(3))
    assert (
        isinstance(found[0], insum.NotFusedError)
        and "no fused kernel" in found[0].fact
        and "require_fused = False" in found[0].remedy
    )
    assert "x: float32 (3,) on cpu" in str(found[0])


def test_settings() -> None:
    with recorded() as found:
        insum.settings.check = "sometimes"
    assert (
        str(found[0])
        == "settings.check cannot be 'sometimes'\n  expected: one of 'async', 'always', 'never'"
    )


@pytest.mark.parametrize("bad", ["y[i] = ", "y[i] = A[i"])
def test_a_statement_that_cannot_be_read_fails_when_it_is_compiled(bad: str) -> None:
    assert isinstance(error_of(lambda: insum.compile(bad)), insum.StatementError)


def test_a_fake_tensor_beside_others() -> None:
    with FakeTensorMode():
        fake = ones(3)
    error = error_of(lambda: insum.insum("y[i] = x[i] * w[i]", x=fake, w=ones(3)))
    assert isinstance(error, insum.DeviceError)
    assert error.fact == "x is a fake tensor, but w is none"
    assert "all tensors of one FakeTensorMode" in error.expected
    with FakeTensorMode():
        other = ones(3)
    error = error_of(lambda: insum.insum("y[i] = x[i] * w[i]", x=fake, w=other))
    assert error.fact == "x and w are fake tensors of two modes"


def test_a_gradient_beside_a_tensor_of_inference_mode() -> None:
    call = partial(insum.insum, "y[i] = x[i] * w[i]", x=inference(), w=ones(3, requires_grad=True))
    error = error_of(call)
    assert isinstance(error, insum.AutogradError)
    assert error.fact.startswith("x was made under inference mode, so that no gradient")
    assert "x=x.clone()" in error.remedy


@pytest.mark.parametrize(
    ("call", "fact", "expected"),
    [
        (lambda: insum.unchanging([1]), "tensor is [1]", "a dense tensor whose elements are here"),
        (
            lambda: insum.constant(ones(2).to(torch.complex64)),
            "tensor is a complex64 tensor (2,) on cpu",
            "integers or floating-point numbers",
        ),
        (lambda: insum.synchronize("nowhere"), "device is 'nowhere'", "a device that holds"),
        (lambda: insum.nn.GCNConv(None, 2), "in_channels is None", "an integer of at least 0"),
        (lambda: insum.nn.Irrep(1, 3), "p is 3", "1 or -1"),
        (
            lambda: insum.formats.COO.from_dense(torch.eye(2)).to_dense("float32"),
            "dtype is 'float32'",
            "a torch.dtype, or None",
        ),
        (
            lambda: insum.formats.COO.from_dense(torch.eye(2, device="meta")),
            "x is a float32 tensor (2, 2) on meta",
            "a dense tensor of numbers that insum computes with",
        ),
    ],
)
def test_kinds_of_arguments(call: Callable[[], object], fact: str, expected: str) -> None:
    error = error_of(call)
    assert error.fact == fact and expected in error.expected


def test_explain_says_the_same() -> None:
    keywords: dict[str, Any] = {"A": ones(2, 3), "x": ones(4)}
    call = "y[i] = A[i,j] * x[j]"
    assert str(error_of(lambda: insum.explain(call, **keywords))) == str(
        error_of(lambda: insum.insum(call, **keywords))
    )


# --- calls that went wrong in some way or other ---------------------------------------------------


def damaged(case: Case, source: random.Random) -> Case:
    """One thing about a good call changed: an argument, its shape, its dtype, its values, the
    options.
    """
    values, sizes, padded = dict(case.clone().values), dict(case.sizes), case.padded
    name = source.choice(sorted(values)) if values else "A"
    value = values.get(name, 1.0)
    match source.randrange(8):
        case 0:
            values.pop(name, None)
        case 1:
            values[source.choice([name, "unused"])] = source.choice(
                [None, [1.0], {}, "x", 2, 2.5, 1j, ones(2, 2)]
            )
        case 2 if isinstance(value, Tensor):
            values[name] = source.choice(
                [
                    value.unsqueeze(0),
                    value.reshape(-1),
                    torch.cat([value, value]) if value.dim() else value,
                ]
            )
        case 3 if isinstance(value, Tensor):
            values[name] = value.to(
                source.choice(
                    [
                        torch.float32,
                        torch.int64,
                        torch.bool,
                        torch.complex64,
                        torch.uint16,
                        torch.float16,
                    ]
                )
            )
        case 4 | 5 if isinstance(value, Tensor) and value.numel() and value.dtype in INDEX_DTYPES:
            flat = value.long().flatten()
            flat[source.randrange(len(flat))] = source.choice([-1, -2, 7, 100])
            values[name] = flat.reshape(value.shape)
        case 6:
            padded = source.choice([(), ("nothing",), (name,)])
        case _:
            sizes = source.choice(
                [{}, {"i": 7}, {0: 1}, {"C": ()}, {**sizes, "j": 2}, {**sizes, "i": -1}]
            )
    return Case(case.statement, values, sizes, padded)


def outcome(call: Callable[[], Any]) -> Any:
    """The result, or the class of the error; anything but an InsumError is let through."""
    try:
        return call()
    except InsumError as error:
        assert error.fact and str(error)
        return type(error)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_damaged_calls_fail_with_an_explanation_or_not_at_all() -> None:
    source, failures = random.Random(0), Counter[str]()
    for case in draw_cases(
        400, seed=11, dtypes=(torch.float32, torch.int64), functions=("sigmoid", "abs")
    ):
        bad = damaged(case, source)
        passed = dict(bad.clone().values)
        before = {name: snapshot(value) for name, value in passed.items()}
        found = outcome(
            partial(insum.insum, bad.statement, sizes=dict(bad.sizes), padded=bad.padded, **passed)
        )
        expected = outcome(bad.expected)
        if isinstance(found, type):
            assert {name: snapshot(value) for name, value in passed.items()} == before, bad
            # The library also looks at indices beside an absent one, and refuses to write into a
            # number.
            stricter = (
                found is insum.IndexRangeError
                and bad.padded
                or not isinstance(bad.values.get(bad.target), Tensor | None)
            )
            assert expected is found or stricter, (found, bad)
        else:
            assert not isinstance(expected, type), (expected, bad)
            assert_close(found, expected, bad.precision)
        failures[found.__name__ if isinstance(found, type) else "none"] += 1
    assert (
        failures["BindingError"] > 100
        and failures["IndexRangeError"] > 20
        and failures["DtypeError"] > 20
        and failures["none"] > 50
    ), failures


# --- the errors as Python objects -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (insum.StatementError, ValueError),
        (insum.BindingError, ValueError),
        (insum.DtypeError, TypeError),
        (insum.DeviceError, RuntimeError),
        (insum.IndexRangeError, IndexError),
        (insum.AutogradError, RuntimeError),
        (insum.FormatError, ValueError),
        (insum.SettingsError, ValueError),
        (insum.UnsupportedError, NotImplementedError),
        (insum.NotFusedError, RuntimeError),
    ],
)
def test_one_tree_that_fits_into_pythons_own(kind: type[InsumError], base: type[Exception]) -> None:
    assert issubclass(kind, InsumError) and issubclass(kind, base)
    error = kind(
        "a fact",
        expected="this",
        remedy="that",
        statement="y[i] = A[i]",
        span=Span(7, 11),
        passed=["A: float32"],
    )
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == str(error)
    assert (
        str(error)
        == "a fact\n    y[i] = A[i]\n           ^^^^\n    A: float32\n  expected: this\n  try: that"
    )


def test_long_statements_are_cut_around_the_place() -> None:
    text = "y[i] = " + "A[i] + " * 100 + "B"
    for start in (0, 7, 300, len(text) - 1):
        lines = str(
            insum.BindingError("fact", statement=text, span=Span(start, start + 4))
        ).splitlines()
        at = lines[2].index("^")
        assert len(lines[1]) < 115 and lines[1][at] == text[start]


def test_control_characters_do_not_reach_the_terminal() -> None:
    error = error_of(lambda: insum.insum("y[i] = \x1b[31mA[i]\r\n\ud800"))
    assert "\x1b" not in str(error) and "\r" not in str(error)
    str(error).encode()
