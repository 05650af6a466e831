"""The pointwise functions in Triton, spelled so that the compiler, the interpreter and every
backend accept them.
"""

from __future__ import annotations

from insum.codegen.ir import Tile, apply, chain, operation, where

#: What says that a piece of a row is there: a number that neither arithmetic nor indices come to.
MARK = 0x7FF7A3C5FFF2D10B

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
    "insum_divided(": '''@triton.jit
def insum_divided(number, reciprocal, together: tl.constexpr):
    """By what this is the reciprocal of: a product and a shift, for numbers of 31 bits, of which
    so many have one quotient.
    """
    number = number.to(tl.uint32)
    high = tl.umulhi(number, reciprocal.to(tl.uint32))
    found = (high + number) >> (reciprocal >> 32).to(tl.uint32)
    return tl.max_constancy(found, together).to(tl.int32)


''',
    "insum_atomic_max(": '''@triton.jit
def insum_atomic_max(at, value, mask):
    """What is there only rises: a look at it, however old, spares the atomics that change nothing.
    Floats are compared as integers, of which NaN is the largest; negative ones fall.
    A NaN that is there stays, whichever of them it is."""
    if value.dtype.is_floating():
        kind = tl.int32 if value.dtype == tl.float32 else tl.int64
        plain = tl.uint32 if value.dtype == tl.float32 else tl.uint64
        largest = 2147483647 if value.dtype == tl.float32 else 9223372036854775807
        bits = tl.where(value != value, largest, value.to(kind, bitcast=True))
        there = tl.load(at, mask=mask, cache_modifier=".cg")
        mask, old = mask & (there == there), there.to(kind, bitcast=True)
        at = at.to(tl.pointer_type(kind), bitcast=True)
        rises, falls = mask & (bits >= 0) & (bits > old), mask & (old < 0) & (bits < old)
        tl.atomic_max(at, bits, mask=rises, sem="relaxed")
        at, bits = at.to(tl.pointer_type(plain), bitcast=True), bits.to(plain, bitcast=True)
        tl.atomic_min(at, bits, mask=falls, sem="relaxed")
    else:
        old = tl.load(at, mask=mask, cache_modifier=".cg")
        tl.atomic_max(at, value, mask=mask & (value > old), sem="relaxed")


''',
    "insum_atomic_min(": '''@triton.jit
def insum_atomic_min(at, value, mask):
    """What is there only falls: a look at it, however old, spares the atomics that change nothing.
    Floats are compared as integers, of which NaN is the smallest; negative ones fall.
    A NaN that is there stays, whichever of them it is."""
    if value.dtype.is_floating():
        kind = tl.int32 if value.dtype == tl.float32 else tl.int64
        plain = tl.uint32 if value.dtype == tl.float32 else tl.uint64
        bits = tl.where(value != value, -1, value.to(kind, bitcast=True))
        there = tl.load(at, mask=mask, cache_modifier=".cg")
        mask, old = mask & (there == there), there.to(kind, bitcast=True)
        at = at.to(tl.pointer_type(kind), bitcast=True)
        rises = mask & (bits >= 0) & (bits < old)
        falls = mask & (bits < 0) & ((old >= 0) | (bits > old))
        tl.atomic_min(at, bits, mask=rises, sem="relaxed")
        at, bits = at.to(tl.pointer_type(plain), bitcast=True), bits.to(plain, bitcast=True)
        tl.atomic_max(at, bits, mask=falls, sem="relaxed")
    else:
        old = tl.load(at, mask=mask, cache_modifier=".cg")
        tl.atomic_min(at, value, mask=mask & (value < old), sem="relaxed")


''',
    "insum_tell(": f'''@triton.jit
def insum_tell(at, place, mask, rows: tl.constexpr):
    """Tell other programs that the stores so far are done, those of all threads."""
    tl.debug_barrier()
    mark = tl.full([rows], {MARK}, tl.int64)
    tl.atomic_xchg(at + place, mark, mask=mask, sem="release")


''',
    "insum_wait(": f'''@triton.jit
def insum_wait(at, first, count, step, rows: tl.constexpr, width: tl.constexpr):
    """Wait until others have told what they did, and leave nothing of that."""
    nothing = tl.full([rows, width], 0, tl.int64)
    for t in range(0, tl.cdiv(tl.max(count, axis=0), width)):
        other = t * width + tl.arange(0, width)
        awaited = other[None, :] < count[:, None]
        place = (at + first * step)[:, None] + (other * step)[None, :]
        missing = 1
        while missing > 0:
            found = tl.atomic_or(place, nothing, mask=awaited, sem="acquire")
            missing = tl.max(tl.where(awaited & (found != {MARK}), 1, 0))
        tl.store(place, nothing, mask=awaited)


''',
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
    "insum_expm1(": '''@triton.jit
def insum_expm1(x):
    """exp(x) - 1 would lose what is small; tanh keeps it."""
    t = insum_tanh(0.5 * x)
    return tl.where(tl.abs(x) < 1, 2 * t / (1 - t), tl.exp(x) - 1)


''',
    "insum_log1p(": '''@triton.jit
def insum_log1p(x):
    """What 1 + x has lost of x is made up for by the quotient."""
    rounded = 1 + x
    lost = tl.where(rounded == 1, 1, rounded - 1)
    near = tl.where(rounded == 1, x, tl.log(rounded) * (x / lost))
    return tl.where(tl.abs(x) < 1, near, tl.log(rounded))


''',
    "insum_softplus(": """@triton.jit
def insum_softplus(x):
    positive = tl.maximum(x, 0, propagate_nan=tl.PropagateNan.ALL)
    return positive + insum_log1p(tl.exp(-tl.abs(x)))


""",
    "insum_sigmoid_of_minus(": '''@triton.jit
def insum_sigmoid_of_minus(x):
    """sigmoid(-x) of what sigmoid(x) is made of, so that both of them take one exponential."""
    e = tl.exp(-x)
    s = 1 / (1 + e)
    return tl.where(x > 0, e * s, 1 - s)


''',
    "insum_silu(": """@triton.jit
def insum_silu(x):
    return x * tl.sigmoid(x)


""",
    "insum_gelu(": """@triton.jit
def insum_gelu(x):
    return 0.5 * x * (1 + tl.erf(0.7071067811865476 * x))


""",
    "insum_leaky_relu(": """@triton.jit
def insum_leaky_relu(x, slope):
    return tl.where(x > 0, x, slope * x)


""",
    "insum_elu(": """@triton.jit
def insum_elu(x, scale):
    return tl.where(x > 0, x, scale * insum_expm1(x))


""",
    "insum_power(": '''@triton.jit
def insum_power(x, times: tl.constexpr, bits: tl.constexpr):
    """By squaring: one step for each bit of the exponent but the first."""
    result = x
    for k in tl.static_range(1, bits):
        result = result * result
        if (times >> (bits - 1 - k)) % 2 == 1:
            result = result * x
    return result


''',
    "insum_pow(": '''@triton.jit
def insum_pow(x, exponent, whole: tl.constexpr):
    """A power of a negative number is one where the exponent is whole; of -inf it always is."""
    size = tl.exp2(exponent * tl.log2(tl.abs(x)))
    if whole:
        return size
    else:
        return tl.where((x < 0) & (x > float("-inf")), float("nan"), size)


''',
}
#: What helpers need of each other.
_BELOW = {
    "insum_elu(": "insum_expm1(",
    "insum_expm1(": "insum_tanh(",
    "insum_softplus(": "insum_log1p(",
}
#: Whole powers below this one are products; numbers beyond it are even.
_MOST_FACTORS = 2**63
COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<="}


def prelude(text: str) -> list[str]:
    """The helpers that the text of a kernel calls, each behind those that it calls itself."""
    needed = {key for key in PRELUDE if key in text}
    for key, below in _BELOW.items():  # those that call others stand first here
        needed |= {below} if key in needed else set()
    return [helper for key, helper in PRELUDE.items() if key in needed]


def reduced(reduce: str, value: Tile, axis: str) -> Tile:
    """All of one axis, as torch reduces it: what meets NaN is NaN."""
    number, kept = value.axes.index(axis), tuple(a for a in value.axes if a != axis)
    if reduce == "sum":
        return apply("tl.sum", value, over=kept, axis=number)
    return apply("tl.reduce", value, number, f"insum_{reduce}", over=kept)


def merged(reduce: str, one: Tile, other: Tile) -> Tile:
    """Two parts of a reduction."""
    return chain("+", one, other) if reduce == "sum" else apply(f"insum_{reduce}", one, other)


def identity(reduce: str, dtype: str) -> str:
    """What a reduction starts from."""
    if reduce == "sum":
        return "0"
    sign = "-" if reduce == "max" else ""
    if "float" in dtype:
        return f'float("{sign}inf")'
    most = 2**63 if dtype == "int64" else 2**31
    return str(-most if sign else most - 1)


def called(function: str, args: list[Tile], numbers: list[float], dtype: str) -> Tile:
    """A function of tiles; ``numbers`` are what stands behind its arguments."""
    x = args[0]
    match function:
        case "exp" | "log" | "sqrt" | "abs" | "sin" | "cos" | "erf" | "sigmoid":
            return apply(f"tl.{function}", x)
        case "relu":
            return apply("tl.maximum", x, 0, propagate_nan="tl.PropagateNan.ALL")
        case "maximum" | "minimum":
            return apply(f"tl.{function}", x, args[1], propagate_nan="tl.PropagateNan.ALL")
        case "tanh" | "expm1" | "log1p" | "softplus" | "silu" | "gelu" | "sigmoid_of_minus":
            return apply(f"insum_{function}", x)
        case "leaky_relu" | "elu":
            return apply(f"insum_{function}", x, _typed(numbers[0], dtype))
        case "pow":
            return _power(x, numbers[0], dtype)
        case "reciprocal":
            return operation("/", "1.0", x)
        case "where":
            return where(x.differs(0), args[1], args[2])
        case "sign":
            return ((x > 0).to(f"tl.{dtype}") - (x < 0).to(f"tl.{dtype}")).grouped()
        case "step":
            return (x > 0).to(f"tl.{dtype}")
        case "eq" | "ne" | "lt" | "le":
            return operation(COMPARED[function], x, args[1]).to(f"tl.{dtype}")
        case "conj" | "whole":
            return x
    raise AssertionError(function)


def _typed(number: float, dtype: str) -> Tile:
    """By itself Triton would take a number for a float32."""
    return apply("tl.full", "[]", repr(number), f"tl.{dtype}")


def _power(x: Tile, exponent: float, dtype: str) -> Tile:
    match exponent:
        case 0:
            return x.equals(x).to(f"tl.{dtype}") * 0 + 1
        case 0.5:
            return apply("tl.sqrt", x)
        case -0.5:
            return apply("tl.rsqrt", x)
    whole = float(exponent).is_integer()
    if whole and abs(exponent) < _MOST_FACTORS:
        times = abs(int(exponent))
        product = apply("insum_power", x, times, times.bit_length())
        return product if exponent > 0 else operation("/", "1.0", product)
    return apply("insum_pow", x, _typed(exponent, dtype), str(whole))
