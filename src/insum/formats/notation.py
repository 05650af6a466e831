"""`torch.einsum`'s notation, `"mk,kn->mn"`, as a statement."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from insum.errors import BindingError, Span, StatementError
from insum.formats.layout import memoised
from insum.lang.expr import fresh

#: Of each dimension of an operand, whether it has the extent 1, which ``...`` broadcasts.
Single: TypeAlias = tuple[bool, ...]


@memoised
def torch_notation(text: str, operands: tuple[Single, ...]) -> tuple[str, tuple[str, ...]]:
    """``"mk,kn->mn"`` as a statement, and the names of its operands.

    >>> torch_notation("mk,kn->mn", ((False, False), (False, False)))
    ('Out[m,n] = A[m,k] * B[k,n]', ('A', 'B'))
    >>> torch_notation("...k,...k->...", ((False, False), (True, False)))
    ('Out[e0] = A[e0,k] * B[0,k]', ('A', 'B'))
    """
    squeezed = text.replace(" ", "")
    left, arrow, right = squeezed.partition("->")
    inputs = left.split(",")
    if len(inputs) != len(operands):
        raise BindingError(
            f"{text!r} has {len(inputs)} operand(s), but {len(operands)} were passed",
            statement=text,
        )
    taken = set(squeezed)
    left_out = [_left_out(text, labels, one) for labels, one in zip(inputs, operands)]
    many = [fresh(f"e{d}", taken) for d in range(max(map(len, left_out)))]
    long = _long(left_out, len(many))
    indices = [_labels(labels, _read(one, many, long)) for labels, one in zip(inputs, left_out)]
    output = _labels(_letters(text, right), many) if arrow else _implied(inputs, many)
    names = tuple(fresh(chr(ord("A") + i % 26), taken) for i in range(len(inputs)))
    _check_output(text, output, {*many, *(v for i in indices for v in i)})
    product_ = " * ".join(
        f"{name}[{','.join(i)}]" if i else name for name, i in zip(names, indices)
    )
    return f"{fresh('Out', taken)}[{','.join(output)}] = {product_}", names


@memoised
def with_dimensions(text: str, operands: tuple[tuple[str, Single], ...]) -> str:
    """A statement with ``...`` written out: as many indices as an operand has dimensions that are
    not named, the last ones shared by all, as in `torch.einsum`. What has the extent 1 there, where
    another operand has more, is read at 0.

    >>> known = ("A", (False, False, False)), ("B", (False, False)), ("D", (False, True, False))
    >>> with_dimensions("C[...,n] = A[...,k] * B[k,n]", known)
    'C[e0,e1,n] = A[e0,e1,k] * B[k,n]'
    >>> with_dimensions("C[...,k] = A[...,k] * D[...,k]", known)
    'C[e0,e1,k] = A[e0,e1,k] * D[e0,0,k]'
    """
    known, parts = dict(operands), _bracketed(text)
    left_out = {
        part.name: part.left_out(text, known[part.name]) for part in parts if part.name in known
    }
    most = max(map(len, left_out.values()), default=0)
    many = [fresh(f"e{d}", {*re.findall(r"\w+", text)}) for d in range(most)]
    long = _long(left_out.values(), most)
    for part in reversed(parts):
        found = left_out.get(part.name, (False,) * most)
        # what is written to is not broadcast
        written = part.place < text.index("=") if "=" in text else False
        read = many[most - len(found) :] if written else _read(found, many, long)
        text = part.written_out(text, ",".join(read))
    return text


@dataclass(frozen=True, slots=True)
class Dotted:
    """An access with ``...``: the tensor, how many indices it names before the dots and after them,
    and where the dots are.
    """

    name: str
    before: int
    after: int
    place: int

    def left_out(self, text: str, operand: Single) -> Single:
        """The dimensions that the dots stand for."""
        if len(operand) < self.before + self.after:
            raise BindingError(
                f"{self.name} has {len(operand)} dimension(s), fewer than are named",
                statement=text,
            )
        return operand[self.before : len(operand) - self.after]

    def written_out(self, text: str, labels: str) -> str:
        before, after = text[: self.place].rstrip(), text[self.place + 3 :].lstrip()
        if not labels:  # and the comma goes with them
            after = after.removeprefix(",") if before.endswith("[") else after
            before = before.removesuffix(",")
        return before + labels + after


def _long(left_out: Iterable[Single], most: int) -> list[bool]:
    """Of each dimension that is left out, counted from the last, whether anything has more than 1
    there.
    """
    padded = [(True,) * (most - len(one)) + one for one in left_out]
    return [not all(column) for column in zip(*padded)]


def _read(left_out: Single, many: list[str], long: list[bool]) -> list[str]:
    """The indices that read what is left out of an operand."""
    first = len(many) - len(left_out)
    return [
        "0" if single and more else name
        for single, name, more in zip(left_out, many[first:], long[first:])
    ]


def _bracketed(text: str) -> list[Dotted]:
    found = []
    for match in re.finditer(r"\.\.\.", text):
        start, depth = match.start(), 0
        while start >= 0 and not (text[start] == "[" and depth == 0):
            depth += (text[start] == "]") - (text[start] == "[")
            start -= 1
        end, depth, commas = start + 1, 0, [0, 0]
        while start >= 0 and end < len(text) and not (text[end] == "]" and depth == 0):
            depth += (text[end] in "[(") - (text[end] in ")]")
            commas[end > match.start()] += text[end] == "," and depth == 0
            end += 1
        name = re.search(r"(\w+)\s*$", text[: max(start, 0)])
        inside = text[start + 1 : end]
        if start < 0 or end == len(text) or name is None or inside.count("...") > 1:
            raise StatementError(
                "'...' stands where no dimensions are left out",
                statement=text,
                span=Span(match.start(), match.end()),
                expected="once between the brackets of a tensor, C[...,n]",
            )
        found.append(Dotted(name[1], commas[0], commas[1], match.start()))
    return found


def _letters(text: str, labels: str) -> str:
    """Labels, found to be letters and perhaps the dots."""
    bad = next((c for c in labels.replace("...", "", 1) if not (c.isascii() and c.isalpha())), None)
    if bad is not None:
        at = text.find(bad)
        raise StatementError(
            f"{bad!r} is no index of torch.einsum's notation",
            expected="letters, ',', '->' and '...'",
            statement=text,
            span=Span(at, at + 1),
        )
    return labels


def _left_out(text: str, labels: str, operand: Single) -> Single:
    """The dimensions of an operand that the dots stand for."""
    before, dots, after = _letters(text, labels).partition("...")
    count = len(operand) - len(before) - len(after)
    if count < 0 or count and not dots:
        raise BindingError(
            f"an operand of {len(operand)} dimension(s) is written {labels!r}",
            statement=text,
            expected="one letter per dimension",
        )
    return operand[len(before) : len(before) + count]


def _labels(labels: str, left_out: list[str]) -> list[str]:
    before, dots, after = labels.partition("...")
    return [*before, *(left_out if dots else ()), *after]


def _implied(inputs: list[str], many: list[str]) -> list[str]:
    """Without ``->``: the ellipsis, then every letter that stands once, in alphabetical order."""
    letters = "".join(inputs).replace(".", "")
    return [*many, *sorted(c for c in set(letters) if letters.count(c) == 1)]


def _check_output(text: str, output: list[str], known: set[str]) -> None:
    for label in output:
        if label not in known or output.count(label) > 1:
            why = (
                "does not stand in any operand"
                if label not in known
                else "stands twice in the output"
            )
            raise StatementError(f"index {label!r} {why}", statement=text)
