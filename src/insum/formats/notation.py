"""`torch.einsum`'s notation, `"mk,kn->mn"`, as a statement."""

from __future__ import annotations

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
