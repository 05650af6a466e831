"""Networks of scalars and gates of irreps as e3nn has them, every function of which is a statement
together with the scales before and behind it:

    Y[b,c] = 1.679 * silu(0.125 * X[b,c])
    Z[b,u,i] = 1.679 * silu(G[b,u]) * X[b,u,i]
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from insum.accepted import FLAG, TENSOR, Accepted, is_size, takes
from insum.api import insum
from insum.errors import BindingError, UnsupportedError
from insum.nn.checks import in_irreps, last_size, layer_takes
from insum.nn.gating import GateUnit, RowGate
from insum.nn.irreps import Irrep, Irreps, aligned

Activation: TypeAlias = Callable[..., Tensor] | nn.Module | None
#: Functions of the language, by what torch calls them.
FUNCTIONS: dict[Any, str] = {
    nn.functional.silu: "silu",
    torch.tanh: "tanh",
    nn.functional.tanh: "tanh",
    torch.sigmoid: "sigmoid",
    nn.functional.sigmoid: "sigmoid",
    torch.abs: "abs",
    torch.relu: "relu",
    nn.functional.relu: "relu",
    nn.SiLU: "silu",
    nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid",
    nn.ReLU: "relu",
}
EVEN, ODD = {"abs"}, {"tanh"}
VARIANCE = Accepted("a positive number", lambda v: isinstance(v, int | float) and 0 < v < math.inf)
FUNCTIONS_OF_TERMS = Accepted(
    "a list of activations, one for each term", lambda v: isinstance(v, list | tuple)
)
SIZES = Accepted(
    "a list of at least two sizes",
    lambda v: isinstance(v, tuple | list) and len(v) > 1 and all(is_size(one, 1) for one in v),
)


@dataclass(frozen=True)
class Scaled:
    """``outer * function(inner * x)``.

    >>> Scaled("silu", outer=2.0)("X[b,c]")
    '2.0 * silu(X[b,c])'
    """

    function: str
    inner: float = 1.0
    outer: float = 1.0
    #: As a statement has it, with ``@`` for its argument; written once, for a tracer may take
    #: numbers for unknown.
    text: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        before = "" if self.outer == 1 else f"{self.outer!r} * "
        within = "" if self.inner == 1 else f"{self.inner!r} * "
        object.__setattr__(self, "text", f"{before}{self.function}({within}@)")

    @classmethod
    def of(cls, activation: Any) -> Scaled:
        """A function of torch's, as it is."""
        hashed = callable(activation) and getattr(activation, "__hash__", None)
        known = FUNCTIONS.get(activation) if hashed else None
        found = known or FUNCTIONS.get(type(activation))
        if found is None:
            name = getattr(activation, "__name__", type(activation).__name__)
            raise UnsupportedError(
                f"{name} is no activation that statements have",
                expected="one of " + ", ".join(sorted(set(FUNCTIONS.values()))),
            )
        return cls(found)

    @classmethod
    def normalised(cls, activation: Any) -> Scaled:
        """The same, scaled as e3nn does it: squares have the mean 1 where arguments are normal."""
        found = cls.of(activation)
        return replace(found, outer=_scale_of(found.function))

    @property
    def parity(self) -> int:
        """Of its values at odd arguments; 0: none."""
        return 1 if self.function in EVEN else -1 if self.function in ODD else 0

    def __call__(self, argument: str) -> str:
        return self.text.replace("@", argument)

    def at(self, x: Tensor) -> Tensor:
        """At a tensor of rows."""
        return insum(f"Y[b,c] = {self('X[b,c]')}", X=x)


@functools.cache
@torch.inference_mode(False)
def _scale_of(function: str) -> float:
    """By the same numbers as e3nn's, so that weights mean the same."""
    draw = torch.Generator(device="cpu").manual_seed(0)
    with torch.no_grad():
        at = torch.randn(1_000_000, generator=draw, dtype=torch.float64, device="cpu")
        found = getattr(torch.nn.functional, function, None) or getattr(torch, function)
        scale = float(found(at).pow(2).mean().pow(-0.5))
    return 1.0 if abs(scale - 1) < 1e-4 else scale


# --- networks -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NetStep:
    """A product with weights, that are multiplied with ``scale``, and a function behind it."""

    scale: float
    function: Scaled | None = None


def folded(steps: Sequence[NetStep]) -> tuple[NetStep, ...]:
    """The same with scales of weights in the functions before or behind them, where there is one.

    >>> first, second = folded([NetStep(0.5, Scaled("silu")), NetStep(3.0)])
    >>> first.function, second.scale
    (Scaled(function='silu', inner=0.5, outer=3.0), 1.0)
    """
    found: list[NetStep] = []
    for step in steps:
        if step.function is not None:
            inner = step.function.inner * step.scale
            found.append(NetStep(1.0, replace(step.function, inner=inner)))
        elif found and (before := found[-1].function) is not None:
            outer = before.outer * step.scale
            found[-1] = replace(found[-1], function=replace(before, outer=outer))
            found.append(NetStep(1.0))
        else:
            found.append(step)
    return tuple(found)


def times(steps: Sequence[NetStep], factor: float) -> tuple[NetStep, ...]:
    """The same with their result multiplied.

    >>> [step.scale for step in times([NetStep(0.5)], 3.0)]
    [1.5]
    """
    *first, last = steps
    if last.function is None:
        return folded([*first, replace(last, scale=last.scale * factor)])
    outer = last.function.outer * factor
    return (*first, replace(last, function=replace(last.function, outer=outer)))


def through(x: Tensor, weights: Sequence[Tensor], steps: Sequence[NetStep]) -> Tensor:
    """From (..., inputs) to (..., outputs)."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    for weight, step in zip(weights, steps, strict=True):
        rows = rows @ (weight if step.scale == 1 else weight * step.scale)
        rows = rows if step.function is None else step.function.at(rows)
    return rows if x.dim() == 2 else rows.reshape(*x.shape[:-1], rows.shape[-1])


class NetLayer(nn.Module):
    """The weights of one layer of `FullyConnectedNet`, by their name in e3nn."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))


class FullyConnectedNet(nn.Module):
    """Linear layers of scalars with activations between them, weight for weight
    ``e3nn.nn.FullyConnectedNet``: the radial network of equivariant models.

    Scales of weights and of activations are part of the statement of each activation,

        Y[b,c] = 1.679 * silu(0.125 * X[b,c])

    so that a layer is one matrix product and one kernel; and its gradients are such kernels, too.

    Args:
        hs: Sizes: of the input, between layers, and of the output.
        act: An activation such as ``torch.nn.functional.silu``, scaled as in e3nn; None: none.
        variance_in: Of the inputs.
        variance_out: That the outputs shall have.
        out_act: Whether there is an activation behind the last layer, too.

    Examples:
        >>> net = FullyConnectedNet([8, 64, 64, 5], torch.nn.functional.silu)
        >>> net
        FullyConnectedNet([8, 64, 64, 5])
        >>> net(torch.randn(10, 8)).shape
        torch.Size([10, 5])
    """

    @takes(hs=SIZES, variance_in=VARIANCE, variance_out=VARIANCE, out_act=FLAG)
    def __init__(
        self,
        hs: Sequence[int],
        act: Activation = None,
        variance_in: float = 1,
        variance_out: float = 1,
        out_act: bool = False,
    ) -> None:
        super().__init__()
        self.hs = list(hs)
        function, variance, steps = None if act is None else Scaled.normalised(act), variance_in, []
        for number, (inputs, outputs) in enumerate(itertools.pairwise(self.hs)):
            last = number == len(self.hs) - 2
            own = function if out_act or not last else None
            steps.append(e3nn_step(inputs, variance, variance_out if last else 1, own))
            setattr(self, f"layer{number}", NetLayer(inputs, outputs))
            variance = 1
        self._steps = folded(steps)

    @layer_takes(x=TENSOR)
    def forward(self, x: Tensor) -> Tensor:
        """From (..., inputs) to (..., outputs)."""
        last_size("x", x, self.hs[0], "the first of hs")
        weights = [getattr(self, f"layer{n}").weight for n in range(len(self._steps))]
        return through(x, weights, self._steps)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.hs})"


def e3nn_step(inputs: int, before: float, after: float, function: Scaled | None) -> NetStep:
    """A layer of e3nn's: from variance to variance."""
    if function is None:
        return NetStep((inputs * before / after) ** -0.5)
    outer = function.outer * math.sqrt(after)
    return NetStep((inputs * before) ** -0.5, replace(function, outer=outer))


# --- gates ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gated:
    """Columns of the input that become columns of the output: scalars, where ``gates`` is None, or
    irreps of this dimension, times a function of as many scalars.
    """

    start: int
    count: int
    dim: int
    function: Scaled | None
    gates: int | None = None

    def followed_by(self, other: Gated) -> Gated | None:
        """Both in one, where they lie side by side."""
        alike = (self.dim, self.function) == (other.dim, other.function)
        alike = alike and (self.gates is None) == (other.gates is None)
        beside = self.start + self.count * self.dim == other.start
        if self.gates is not None and other.gates is not None:
            beside = beside and self.gates + self.count == other.gates
        return replace(self, count=self.count + other.count) if alike and beside else None

    def places(self) -> Iterator[tuple[int, int]]:
        yield self.start, self.start + self.count * self.dim
        if self.gates is not None:
            yield self.gates, self.gates + self.count

    def units(self, out: int) -> Iterator[GateUnit]:
        """One by one; ``out``: where they begin in the result."""
        told = () if (f := self.function) is None else (f.function, f.inner, f.outer)
        for n in range(self.count):
            at = self.start + n * self.dim
            scalar, first = (at, None) if self.gates is None else (self.gates + n, at)
            yield GateUnit(scalar, out + n * self.dim, self.dim, first, *told)

    def at(self, pieces: dict[int, Tensor]) -> Tensor:
        x = pieces[self.start]
        if self.gates is None:
            return x if self.function is None else self.function.at(x)
        gates = pieces[self.gates]
        values = x.view(x.shape[0], self.count, self.dim)
        if self.function is None:
            return (values * gates.unsqueeze(-1)).flatten(1)
        statement = f"Z[b,u,i] = {self.function('G[b,u]')} * X[b,u,i]"
        return insum(statement, G=gates, X=values).flatten(1)


class Gate(nn.Module):
    """Scalars through activations, and other irreps times scalars that went through activations:
    the values of ``e3nn.nn.Gate``.

    Args:
        irreps_scalars: Scalars that stay.
        act_scalars: An activation for each of their terms, or None.
        irreps_gates: Scalars that others are multiplied with.
        act_gates: An activation for each of their terms, or None.
        irreps_gated: What is multiplied, as many irreps as there are gates.

    Examples:
        >>> gate = Gate("16x0e", [torch.nn.functional.silu], "8x0e", [torch.sigmoid], "8x1o")
        >>> gate
        Gate(24x0e+8x1o -> 16x0e+8x1o)
        >>> gate(torch.randn(5, gate.irreps_in.dim)).shape
        torch.Size([5, 40])
    """

    @takes(act_scalars=FUNCTIONS_OF_TERMS, act_gates=FUNCTIONS_OF_TERMS)
    def __init__(
        self,
        irreps_scalars: object,
        act_scalars: Sequence[Activation],
        irreps_gates: object,
        act_gates: Sequence[Activation],
        irreps_gated: object,
    ) -> None:
        scalars, gates = Irreps.of(irreps_scalars), Irreps.of(irreps_gates)
        of_scalars = [_normalised(act) for act in act_scalars]
        of_gates = [_normalised(act) for act in act_gates]
        self._set_up(scalars, gates, Irreps.of(irreps_gated), of_scalars, of_gates)

    @classmethod
    def with_functions(
        cls,
        irreps: Sequence[object],
        of_scalars: list[Scaled | None],
        of_gates: list[Scaled | None],
    ) -> Gate:
        """The same with scales that are known; ``irreps``: of scalars, gates and what is gated."""
        made = cls.__new__(cls)
        scalars, gates, gated = map(Irreps.of, irreps)
        made._set_up(scalars, gates, gated, of_scalars, of_gates)
        return made

    def _set_up(
        self,
        scalars: Irreps,
        gates: Irreps,
        gated: Irreps,
        of_scalars: list[Scaled | None],
        of_gates: list[Scaled | None],
    ) -> None:
        super().__init__()
        for name, irreps, functions in (
            ("irreps_scalars", scalars, of_scalars),
            ("irreps_gates", gates, of_gates),
        ):
            if any(ir.l for _, ir in irreps):
                raise BindingError(f"{name} is {irreps}", expected="irreps of degree 0")
            if len(irreps) != len(functions):
                raise BindingError(
                    f"{name} has {len(irreps)} terms, but {len(functions)} activations were given",
                    expected="one for each term, or None",
                )
        starts, self.irreps_in = _sorted_places(scalars, gates, gated)
        first = [
            Gated(start, mul, 1, function)
            for (mul, _), function, start in zip(scalars, of_scalars, starts[0])
        ]
        after = Irreps(
            tuple((mul, _through(ir, f)) for (mul, ir), f in zip(gates, of_gates, strict=True))
        )
        second, out = _products(gates, after, of_gates, gated, starts[1], starts[2])
        kept = [(mul, _through(ir, f)) for (mul, ir), f in zip(scalars, of_scalars)]
        self.irreps_out = Irreps((*kept, *out))
        self._parts = _merged([*first, *second])
        ends = {place for part in self._parts for pair in part.places() for place in pair}
        self._ends = sorted({0, self.irreps_in.dim, *ends})
        self._in_one = self._units()
        self.register_load_state_dict_pre_hook(_without_product)  # type: ignore[no-untyped-call]

    @layer_takes(features=TENSOR)
    def forward(self, features: Tensor) -> Tensor:
        """From (..., irreps_in.dim) to (..., irreps_out.dim)."""
        in_irreps("features", features, "irreps_in", self.irreps_in)
        rows = features if features.dim() == 2 else features.reshape(-1, self.irreps_in.dim)
        gate = self._in_one
        whole = gate(rows) if gate.suits(rows) else self._stated(rows)
        if features.dim() == 2:
            return whole
        return whole.view(*features.shape[:-1], self.irreps_out.dim)

    def _stated(self, rows: Tensor) -> Tensor:
        """By a statement for each part."""
        sizes = [b - a for a, b in itertools.pairwise(self._ends)]
        pieces = dict(zip(self._ends, torch.split(rows, sizes, 1)))
        found = [part.at(pieces) for part in self._parts]
        return found[0] if len(found) == 1 else torch.cat(found or [rows[:, :0]], 1)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if "_in_one" not in state:  # stored when there was none
            self._in_one = self._units()

    def _units(self) -> RowGate:
        units, out = list[GateUnit](), 0
        for part in self._parts:
            units += part.units(out)
            out += part.count * part.dim
        return RowGate(tuple(units), (self.irreps_in.dim, self.irreps_out.dim))

    def extra_repr(self) -> str:
        return f"{self.irreps_in} -> {self.irreps_out}"


def _without_product(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """e3nn's gate has a product without weights inside, whose empty arrays are in its states."""
    for key in [k for k in state if k.startswith(f"{prefix}mul.")]:
        del state[key]


def _normalised(activation: Activation) -> Scaled | None:
    return None if activation is None else Scaled.normalised(activation)


def _through(ir: Irrep, function: Scaled | None) -> Irrep:
    """What scalars are behind a function."""
    if function is None or ir.p == 1:
        return ir
    if not function.parity:
        raise BindingError(
            f"{function.function} of {ir}, which is odd, has no parity",
            expected="an activation that is even or odd, as abs and tanh are",
        )
    return Irrep(0, function.parity)


def _sorted_places(*every: Irreps) -> tuple[list[list[int]], Irreps]:
    """Where each term begins when all are sorted by their irreps, and what that is."""
    listed = [
        (ir, n, k, mul) for n, irreps in enumerate(every) for k, (mul, ir) in enumerate(irreps)
    ]
    starts, at = [[0] * len(irreps) for irreps in every], 0
    whole = []
    for ir, n, k, mul in sorted(listed, key=lambda one: one[0]):
        starts[n][k] = at
        at += mul * ir.dim
        whole.append((mul, ir))
    return starts, Irreps(tuple(whole)).simplified()


def _products(
    gates: Irreps,
    after: Irreps,
    functions: Sequence[Scaled | None],
    gated: Irreps,
    gate_starts: Sequence[int],
    starts: Sequence[int],
) -> tuple[list[Gated], list[tuple[int, Irrep]]]:
    """The gated irreps in runs that have one term of each, and what comes out."""
    parts, out = [], []
    list(aligned(gated, gates))  # raises where they are not as many
    ends = [list(itertools.accumulate(mul for mul, _ in irreps)) for irreps in (gates, gated)]
    cuts = [0, *sorted({*ends[0], *ends[1]})]
    for low, high in itertools.pairwise(cuts):
        g, x = (next(n for n, end in enumerate(these) if end > low) for these in ends)
        begun = [these[n] - irreps[n][0] for these, n, irreps in zip(ends, (g, x), (gates, gated))]
        ir = gated[x][1]
        start = starts[x] + (low - begun[1]) * ir.dim
        gate = gate_starts[g] + low - begun[0]
        parts.append(Gated(start, high - low, ir.dim, functions[g], gate))
        out.append((high - low, Irrep(ir.l, ir.p * after[g][1].p)))
    return parts, out


def _merged(parts: list[Gated]) -> list[Gated]:
    found: list[Gated] = []
    for part in parts:
        if not part.count:
            continue
        both = found[-1].followed_by(part) if found else None
        found = [*found[:-1], both] if both is not None else [*found, part]
    return found
