"""The pointwise functions in Triton, spelled so that the compiler, the interpreter and every
backend accept them.
"""

from __future__ import annotations

#: Helpers that a kernel needs when it uses their name; Triton has no tanh of its own, and its
#: maximum of a number and NaN is the number.
PRELUDE = {
    "insum_max": """@triton.jit
def insum_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


""",
    "insum_min": """@triton.jit
def insum_min(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


""",
    "insum_tanh(": '''@triton.jit
def insum_tanh(x):
    """exp(-2|x|) never overflows; near zero a series keeps the relative accuracy of a double."""
    e = tl.exp(-2 * tl.abs(x))
    large = (1 - e) / (1 + e)
    square = x * x
    odd = 0.021869488536155203 - square * (0.008863235529902197 - square * 0.003592128036572481)
    odd = 0.3333333333333333 - square * (0.13333333333333333 - square * (0.05396825396825397 - square * odd))
    small = tl.abs(x) * (1 - square * odd)
    magnitude = tl.where(tl.abs(x) < 0.1, small, large)
    return tl.where(x < 0, -magnitude, magnitude)


''',  # noqa: E501
}


def reduced(reduce: str, value: str, axis: int) -> str:
    """All of one axis, as torch reduces it: what meets NaN is NaN."""
    return (
        f"tl.sum({value}, axis={axis})"
        if reduce == "sum"
        else f"tl.reduce({value}, {axis}, insum_{reduce})"
    )


def call(function: str, args: list[str], dtype: str) -> str:
    x = args[0]
    match function:
        case "exp" | "log" | "sqrt" | "abs":
            return f"tl.{function}({x})"
        case "sigmoid":
            return f"tl.sigmoid({x})"
        case "relu":
            return f"tl.maximum({x}, 0, propagate_nan=tl.PropagateNan.ALL)"
        case "tanh":
            return f"insum_tanh({x})"
        case "reciprocal":
            return f"(1.0 / ({x}))"
        case "sign":
            return f"(({x}) > 0).to(tl.{dtype}) - (({x}) < 0).to(tl.{dtype})"
        case "step":
            return f"(({x}) > 0).to(tl.{dtype})"
        case "eq":
            return f"(({x}) == ({args[1]})).to(tl.{dtype})"
        case "conj":
            return x
    raise AssertionError(function)
