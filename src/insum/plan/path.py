"""``optimize=``: which order of contraction is wished for, as text that ops and tracers can carry.

The values are those of opt_einsum: ``True`` or ``"auto"``, ``False`` or ``"never"``, ``"optimal"``,
``"greedy"``, or a path, positions of factors for each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from insum.errors import BindingError, InsumError
from insum.lang.bind import Problem
from insum.lang.expand import ProductTerm
from insum.lang.expr import Expr, Number
from insum.plan.order import Path

Optimize: TypeAlias = bool | str | Sequence[Sequence[int] | str]

AUTO, NEVER = "auto", "never"
_WORDS = (AUTO, NEVER, "optimal", "greedy")


def optimize_text(optimize: Optimize) -> str:
    """``optimize=`` as one word or as ``0,1;0,1``. String methods only, which a tracer folds; what
    means nothing is found when the statement is bound.

    >>> [optimize_text(wish) for wish in (True, False, "greedy", [(1, 2), (0, 1)])]
    ['auto', 'never', 'greedy', '1,2;0,1']
    """
    if isinstance(optimize, bool):
        return AUTO if optimize else NEVER
    if isinstance(optimize, list | tuple):
        # NumPy's paths begin with a word
        steps = [step for step in optimize if step != "einsum_path"]
        return ";".join(
            [
                ",".join([_position_text(p) for p in step])
                if isinstance(step, list | tuple)
                else repr(step)
                for step in steps
            ]
        )
    return optimize if isinstance(optimize, str) else repr(optimize)


#: A tracer that takes the numbers of a path for symbols has to look one up, and so to fix it.
_POSITIONS = tuple(map(str, range(64)))


def _position_text(position: int) -> str:
    usual = isinstance(position, int) and 0 <= position < len(_POSITIONS)
    return _POSITIONS[position] if usual else repr(position)


def is_path(text: str) -> bool:
    """Whether a text stands for a path rather than for a search."""
    return text not in _WORDS


def operands_of(term: ProductTerm) -> tuple[Expr, ...]:
    """What a path counts: the factors of a product, literals aside."""
    return tuple(f for f in term.factors if not isinstance(f, Number))


def wish_of(problem: Problem, text: str) -> str | Path:
    """The word, or the path, that a text stands for.

    >>> import torch
    >>> from insum.lang.bind import bind
    >>> from insum.lang.parser import parse
    >>> values = dict.fromkeys("ABC", torch.ones(2, 2))
    >>> chain = bind(parse("Y[i,l] = A[i,j] * B[j,k] * C[k,l]"), values)
    >>> wish_of(chain, "1,2;0,1")
    ((1, 2), (0, 1))
    """
    if not is_path(text):
        return text
    path = _read(problem, text)
    if len(problem.terms) != 1 or problem.statement.operator not in ("=", "+="):
        raise problem.complain(
            BindingError,
            f"optimize is a path, {_shown(path)}, but the right side is no single product",
            expected=", ".join(map(repr, _WORDS)),
        )
    left = count = len(operands_of(problem.terms[0]))
    for number, step in enumerate(path):
        if len(set(step)) != len(step) or not all(0 <= p < left for p in step):
            raise _misfit(problem, path, f"{step} is no choice among {left} factors", count)
        # of two factors one may be scattered first, or their product be gathered last
        waits = left == 2 or left == 1 and number == len(path) - 1
        if len(step) < 2 and count > 1 and not waits:
            raise _misfit(problem, path, f"{step} multiplies nothing", count)
        left -= len(step) - 1
    if left != 1:
        raise _misfit(problem, path, f"{left} factors are left at its end", count)
    return path


def _read(problem: Problem, text: str) -> Path:
    try:
        return tuple(tuple(int(p) for p in step.split(",")) for step in text.split(";"))
    except ValueError:
        raise problem.complain(
            BindingError,
            f"optimize is {text!r}",
            expected="True, False, " + ", ".join(map(repr, _WORDS)) + ", or a path",
            remedy="optimize=[(0, 1), (0, 1)] multiplies the first two factors, then the rest",
        ) from None


def _misfit(problem: Problem, path: Path, why: str, count: int) -> InsumError:
    return problem.complain(
        BindingError,
        f"optimize is {_shown(path)}: {why}",
        expected=f"positions of {count} factors, literals aside; each step takes some, and puts "
        "their product last",
        remedy=f"optimize=[{tuple(range(count))}] multiplies all of them in one statement",
    )


def _shown(path: Path) -> str:
    return f"[{', '.join(map(str, path))}]"
