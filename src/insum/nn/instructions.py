"""Instructions of a tensor product, checked and normalised as e3nn normalises them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from insum.accepted import Accepted, is_number, require
from insum.errors import BindingError, UnsupportedError
from insum.nn.irreps import Irreps
from insum.nn.paths import MODES, Instruction

#: A square root is taken of it.
VARIANCE = Accepted(
    "a finite number of at least 0",
    lambda v: is_number(v) and not isinstance(v, complex) and 0 <= v < math.inf,
)


@dataclass(frozen=True)
class Normalisation:
    """How outputs are scaled: e3nn's options of the same names."""

    irrep: str = "component"
    path: str = "element"
    in1_var: tuple[float, ...] | None = None
    in2_var: tuple[float, ...] | None = None
    out_var: tuple[float, ...] | None = None

    @classmethod
    def of(cls, irrep: str, path: str, *variances: Sequence[float] | None) -> Normalisation:
        return cls(irrep, path, *(None if v is None else tuple(map(float, v)) for v in variances))


def paths_of(
    in1: Irreps,
    in2: Irreps,
    out: Irreps,
    instructions: Sequence[Sequence[object]],
    rule: Normalisation,
) -> tuple[Instruction, ...]:
    """Checked and normalised paths from instructions ``(i_in1, i_in2, i_out, mode, has_weight[,
    path_weight])``.
    """
    _check_rule(in1, in2, out, rule)
    found = [
        _path(in1, in2, out, number, instruction) for number, instruction in enumerate(instructions)
    ]
    return tuple(
        replace(path, coefficient=_coefficient(path, found, in1, in2, out, rule)) for path in found
    )


def _check_rule(in1: Irreps, in2: Irreps, out: Irreps, rule: Normalisation) -> None:
    for name, value, first in (
        ("irrep_normalization", rule.irrep, ("component", "norm")),
        ("path_normalization", rule.path, ("element", "path")),
    ):
        if value not in (allowed := (*first, "none")):
            raise UnsupportedError(f"{name} is {value!r}", expected=" or ".join(map(repr, allowed)))
    for name, variances, irreps in (
        ("in1_var", rule.in1_var, in1),
        ("in2_var", rule.in2_var, in2),
        ("out_var", rule.out_var, out),
    ):
        for number, variance in enumerate(variances or ()):
            require(f"{name}[{number}]", variance, VARIANCE)
        if variances is not None and len(variances) != len(irreps):
            raise BindingError(
                f"{name} has {len(variances)} value(s), but the irreps {irreps} have "
                f"{len(irreps)} term(s)",
                expected="one for each term",
            )


def _path(
    in1: Irreps, in2: Irreps, out: Irreps, number: int, instruction: Sequence[object]
) -> Instruction:
    where = f"instruction {number}, {tuple(instruction)}"
    if len(instruction) not in (5, 6):
        raise BindingError(
            f"{where}, has {len(instruction)} parts",
            expected="(i_in1, i_in2, i_out, mode, has_weight) or these and path_weight",
        )
    a, b, c, mode, has_weight, weight = (*instruction, 1.0)[:6]
    for name, i, irreps in (("i_in1", a, in1), ("i_in2", b, in2), ("i_out", c, out)):
        if not isinstance(i, int) or not 0 <= i < len(irreps):
            raise BindingError(
                f"{where}: {name} is {i}",
                expected=f"a term of {irreps}, from 0 to {len(irreps) - 1}",
            )
    require(f"{where}: path_weight", weight, VARIANCE)
    assert isinstance(a, int) and isinstance(b, int) and isinstance(c, int)
    (mul1, ir1), (mul2, ir2), (mul3, ir3) = in1[a], in2[b], out[c]
    if ir3 not in ir1 * ir2:
        raise BindingError(
            f"{where}: {ir1} and {ir2} do not couple to {ir3}",
            expected="one of " + ", ".join(map(str, ir1 * ir2)),
        )
    if mode not in MODES:
        raise UnsupportedError(f"{where}: there is no mode {mode!r}", expected=", ".join(MODES))
    assert isinstance(mode, str)
    sizes = _multiplicities(where, mode, mul1, mul2, mul3)
    if not has_weight and MODES[mode].weighs:
        raise UnsupportedError(
            f"{where}: {mode} without weights", expected="weights, which say how u and v become w"
        )
    return Instruction(
        a,
        b,
        c,
        mode,
        bool(has_weight),
        float(weight),  # type: ignore[arg-type]
        tuple(sizes[letter] for letter in MODES[mode].weight),
    )


def _multiplicities(where: str, mode: str, mul1: int, mul2: int, mul3: int) -> dict[str, int]:
    """The extent of each letter of a mode; a letter that stands twice must mean one number."""
    letters = MODES[mode]
    first, second = ("u", "u") if letters.pairs else (letters.first, letters.second)
    sizes: dict[str, int] = {}
    for letter, mul, which in (
        (first, mul1, "the first input"),
        (second, mul2, "the second input"),
        *(((letters.out[0], mul3, "the output"),) if letters.out in (("u",), ("v",)) else ()),
    ):
        if sizes.setdefault(letter, mul) != mul:
            raise BindingError(
                f"{where}: {letter} is {sizes[letter]}, but {mul} in {which}",
                expected=f"equal multiplicities, as mode {mode} asks",
            )
    sizes |= {"r": mul1 * (mul1 - 1) // 2} if letters.pairs else {}
    sizes |= {"w": mul3} if "w" in letters.out else {}
    if math.prod(sizes[letter] for letter in letters.out) != mul3:
        asked = f"{mul1} * ({mul1} - 1) / 2" if letters.pairs else f"{mul1} * {mul2}"
        raise BindingError(
            f"{where}: the output has multiplicity {mul3}",
            expected=f"{asked}, as mode {mode} asks",
        )
    return sizes


def _coefficient(
    path: Instruction,
    paths: Sequence[Instruction],
    in1: Irreps,
    in2: Irreps,
    out: Irreps,
    rule: Normalisation,
) -> float:
    """The square root of e3nn's alpha; ``path.coefficient`` is still the path weight."""
    dims = in1[path.i_in1][1].dim, in2[path.i_in2][1].dim, out[path.i_out][1].dim
    alpha = {"component": dims[2], "norm": dims[0] * dims[1], "none": 1}[rule.irrep]

    def elements(p: Instruction) -> float:
        variance = (rule.in1_var[p.i_in1] if rule.in1_var else 1.0) * (
            rule.in2_var[p.i_in2] if rule.in2_var else 1.0
        )
        summed = {
            "uvw": in1[p.i_in1][0] * in2[p.i_in2][0],
            "uvu": in2[p.i_in2][0],
            "uvv": in1[p.i_in1][0],
            "uuw": in1[p.i_in1][0],
            "u<vw": in1[p.i_in1][0] * (in2[p.i_in2][0] - 1) // 2,
        }
        return variance * summed.get(p.mode, 1)

    others = [p for p in paths if p.i_out == path.i_out]
    share = {
        "element": sum(map(elements, others)),
        "path": elements(path) * len(others),
        "none": 1.0,
    }[rule.path]
    scaled = alpha * (rule.out_var[path.i_out] if rule.out_var else 1.0) * path.coefficient
    return math.sqrt(scaled / share if share > 0 else scaled)
