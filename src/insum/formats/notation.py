"""`torch.einsum`'s notation, `"mk,kn->mn"`, as a statement."""

from __future__ import annotations

import re

from insum.errors import BindingError, Span, StatementError
from insum.formats.layout import constant
from insum.lang.expr import fresh


@constant
def torch_notation(text: str, ranks: tuple[int, ...]) -> tuple[str, tuple[str, ...]]:
    """``"mk,kn->mn"`` as a statement, and the names of its operands.

    >>> torch_notation("mk,kn->mn", (2, 2))
    ('Out[m,n] = A[m,k] * B[k,n]', ('A', 'B'))
    """
    squeezed = text.replace(" ", "")
    left, arrow, right = squeezed.partition("->")
    inputs = left.split(",")
    if len(inputs) != len(ranks):
        raise BindingError(
            f"{text!r} has {len(inputs)} operand(s), but {len(ranks)} were passed", statement=text
        )
    taken = set(squeezed)
    rest = max(
        (rank - len(labels) + 3 for labels, rank in zip(inputs, ranks) if "..." in labels),
        default=0,
    )
    many = [fresh(f"e{d}", taken) for d in range(rest)]
    indices = [_labels(text, labels, rank, many) for labels, rank in zip(inputs, ranks)]
    output = _labels(text, right, None, many) if arrow else _implied(inputs, many)
    names = tuple(fresh(chr(ord("A") + i % 26), taken) for i in range(len(inputs)))
    _check_output(text, output, {v for i in indices for v in i})
    product_ = " * ".join(
        f"{name}[{','.join(i)}]" if i else name for name, i in zip(names, indices)
    )
    return f"{fresh('Out', taken)}[{','.join(output)}] = {product_}", names


@constant
def with_dimensions(text: str, ranks: tuple[tuple[str, int], ...]) -> str:
    """A statement with ``...`` written out: as many indices as an operand has dimensions that are
    not named, the last ones shared by all, as in `torch.einsum`.

    >>> with_dimensions("C[...,n] = A[...,k] * B[k,n]", (("A", 3), ("B", 2)))
    'C[e0,e1,n] = A[e0,e1,k] * B[k,n]'
    """
    known, parts = dict(ranks), _bracketed(text)
    short = {name: known[name] - count for name, count, _ in parts if name in known}
    for name, fewer in short.items():
        if fewer < 0:
            raise BindingError(
                f"{name} has {known[name]} dimension(s), fewer than are named", statement=text
            )
    most = max(short.values(), default=0)
    many = [fresh(f"e{d}", {*re.findall(r"\w+", text)}) for d in range(most)]
    for name, _, place in reversed(parts):
        labels = ",".join(many[most - short.get(name, most) :])
        before, after = text[:place].rstrip(), text[place + 3 :].lstrip()
        if not labels:  # and the comma goes with them
            after = after.removeprefix(",") if before.endswith("[") else after
            before = before.removesuffix(",")
        text = before + labels + after
    return text


def _bracketed(text: str) -> list[tuple[str, int, int]]:
    """Each access with ``...``: the tensor, how many indices it names, and where the dots are."""
    found = []
    for match in re.finditer(r"\.\.\.", text):
        start, depth = match.start(), 0
        while start >= 0 and not (text[start] == "[" and depth == 0):
            depth += (text[start] == "]") - (text[start] == "[")
            start -= 1
        end, depth, commas = start + 1, 0, 0
        while start >= 0 and end < len(text) and not (text[end] == "]" and depth == 0):
            depth += (text[end] in "[(") - (text[end] in ")]")
            commas += text[end] == "," and depth == 0
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
        found.append((name[1], commas, match.start()))
    return found


def _labels(text: str, labels: str, rank: int | None, many: list[str]) -> list[str]:
    before, dots, after = labels.partition("...")
    bad = next((c for c in before + after if not (c.isascii() and c.isalpha())), None)
    if bad is not None:
        at = text.find(bad)
        raise StatementError(
            f"{bad!r} is no index of torch.einsum's notation",
            expected="letters, ',', '->' and '...'",
            statement=text,
            span=Span(at, at + 1),
        )
    count = len(many) if rank is None else rank - len(before) - len(after)
    if rank is not None and (count < 0 or count and not dots):
        raise BindingError(
            f"an operand of {rank} dimension(s) is written {labels!r}",
            statement=text,
            expected="one letter per dimension",
        )
    return [*before, *(many[len(many) - count :] if dots else ()), *after]


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
