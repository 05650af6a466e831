"""Text -> Statement: what is read, what prints back, and that no text does anything but parse or
raise StatementError.
"""

from __future__ import annotations

import copy
import pickle
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from insum.errors import StatementError
from insum.lang.expand import MAX_TERMS, expand
from insum.lang.expr import (
    FUNCTIONS,
    OPERATORS,
    Access,
    Affine,
    Call,
    Expr,
    Number,
    Product,
    Statement,
    Sum,
    Var,
    affine,
    index_of,
    product,
    total,
)
from insum.lang.parser import MAX_DEPTH, MAX_LENGTH, RESERVED, parse
from insum.testing import draw_cases

# --- what is read ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("C[i]=A[i]", "C[i] = A[i]"),
        ("C[D[y],x] += A[y,E[r]] * B[r,x]", "C[D[y],x] += A[y,E[r]] * B[r,x]"),
        ("  C [ AM[p] , n ]\n+=\tAV[p,q]\n * B[AK[p,q],n]", "C[AM[p],n] += AV[p,q] * B[AK[p,q],n]"),
        ("C[bm,bk] max= A[bm,bk]", "C[bm,bk] max= A[bm,bk]"),
        ("C[i] max = A[i]", "C[i] max= A[i]"),
        ("C[i]min=A[i]", "C[i] min= A[i]"),
        ("t[] = A[i,i]", "t[] = A[i,i]"),
        ("t = A[i,i]", "t[] = A[i,i]"),
        ("y[i] = s * x[i]", "y[i] = s * x[i]"),
        ("y[i] = s[] * x[i]", "y[i] = s * x[i]"),
        ("y[i] = x[p[]]", "y[i] = x[p[]]"),
        ("y[i] = 2*x[i]*3", "y[i] = 6 * x[i]"),
        ("y[i] = 1*x[i]", "y[i] = x[i]"),
        ("y[i] = 1.0*x[i]", "y[i] = 1.0 * x[i]"),
        ("y[i] = -1.0*x[i]", "y[i] = -1.0 * x[i]"),
        ("y[i] = -x[i]", "y[i] = -x[i]"),
        ("y[i] = --x[i]", "y[i] = x[i]"),
        ("y[i] = x[i] * -2", "y[i] = -2 * x[i]"),
        ("y[i] = 1e-3*x[i] - .5 + 2.", "y[i] = 0.001 * x[i] - 0.5 + 2.0"),
        ("y[i] = a[i] - b[i] * c[i] + 3", "y[i] = a[i] - b[i] * c[i] + 3"),
        ("y[i] = a[i] - (b[i] - c[i])", "y[i] = a[i] - (b[i] - c[i])"),
        ("y[i] = (a[i] + b[i]) * (c[i])", "y[i] = (a[i] + b[i]) * c[i]"),
        ("y[i] = (a[i] + b[i]) + c[i]", "y[i] = a[i] + b[i] + c[i]"),
        ("y[i] = relu(A[i,j]*x[j])", "y[i] = relu(A[i,j] * x[j])"),
        ("y[i] = eq(a[i],b[i] + 1)", "y[i] = eq(a[i], b[i] + 1)"),
        ("y[x] = I[x + r] * W[r]", "y[x] = I[x + r] * W[r]"),
        ("y[i] = A[2*(i+1) - j*3 + 4]", "y[i] = A[2*i - 3*j + 6]"),
        ("y[i] = A[i + i]", "y[i] = A[2*i]"),
        ("y[i] = A[i - i]", "y[i] = A[0]"),
        ("y[i] = A[3 - i]", "y[i] = A[-i + 3]"),
        ("y[i] = A[-(i - 3)]", "y[i] = A[-i + 3]"),
        ("y[i] = A[B[C[i]], 2*D[i]+1]", "y[i] = A[B[C[i]],2*D[i] + 1]"),
        ("y[0] = A[007]", "y[0] = A[7]"),
        ("maximum[i] = max_[i]", "maximum[i] = max_[i]"),
    ],
)
def test_reads_and_prints(text: str, printed: str) -> None:
    statement = parse(text)
    assert str(statement) == printed
    assert parse(printed) == statement
    assert statement.text == text


def test_the_tree_of_the_papers_statement() -> None:
    p, n, q = index_of("p"), index_of("n"), index_of("q")
    value = Product((Access("AV", (p, q)), Access("B", (Affine(((1, Access("AK", (p, q))),)), n))))
    assert parse("C[AM[p],n] += AV[p,q] * B[AK[p,q],n]") == Statement(
        Access("C", (Affine(((1, Access("AM", (p,))),)), n)), "+=", value
    )


@pytest.mark.parametrize("operator", OPERATORS)
def test_operators(operator: str) -> None:
    assert parse(f"C[i] {operator} A[i]").operator == operator


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions(function: str) -> None:
    takes = FUNCTIONS[function]
    values, numbers = ["A[i]", "B[i]", "D[i]"][: takes.values], ["0.5"] * len(takes.numbers)
    arguments = ", ".join(values + numbers)
    assert str(parse(f"C[i] = {function}({arguments})").value) == f"{function}({arguments})"


def test_spans_point_into_the_text() -> None:
    text = "C[AM[p], n] += 2 * exp(AV[p]) * B[AK[p]+1,n]"
    statement = parse(text)

    def shown(node: Access | Affine | Call) -> str:
        assert node.span is not None
        return text[node.span.start : node.span.end]

    assert isinstance(statement.value, Product)
    _, call, access = statement.value.factors
    assert isinstance(call, Call) and isinstance(access, Access)
    assert [shown(statement.target), shown(call), shown(access), shown(access.indices[0])] == [
        "C[AM[p], n]",
        "exp(AV[p])",
        "B[AK[p]+1,n]",
        "AK[p]+1",
    ]


def test_literals_of_different_type_are_different() -> None:
    """They promote to different dtypes, so nothing cached for one may be used for the other."""
    whole, floating = parse("y[i] = 2 * x[i]"), parse("y[i] = 2.0 * x[i]")
    assert whole != floating and Number(2) != Number(2.0) and Number(2) == Number(2)
    assert len({whole, floating, parse("y[i]=2*x[i]")}) == 2
    assert parse(str(floating)) == floating


def test_statements_are_values() -> None:
    statement = parse("C[AM[p],n] += AV[p] * B[AK[p],n]")
    assert pickle.loads(pickle.dumps(statement)) == statement == copy.deepcopy(statement)
    assert hash(parse("C[ AM[p],n ] += AV[p]*B[AK[p],n]")) == hash(statement)
    with pytest.raises(AttributeError):
        statement.operator = "="  # type: ignore[misc]


# --- round trip -----------------------------------------------------------------------------------

_variable = st.sampled_from(["i", "j", "bm", "k9"]).map(Var)


def _indices(atom: st.SearchStrategy[Var | Access]) -> st.SearchStrategy[Affine]:
    plain = st.sampled_from(["i", "j", "bm"]).map(index_of)
    term = st.tuples(st.integers(-4, 4).filter(bool), atom)
    return plain | st.builds(
        lambda terms, offset: affine(terms, offset), st.lists(term, max_size=3), st.integers(-9, 9)
    )


def _accesses(names: list[str], atom: st.SearchStrategy[Var | Access]) -> st.SearchStrategy[Access]:
    return st.builds(
        lambda name, indices: Access(name, tuple(indices)),
        st.sampled_from(names),
        st.lists(_indices(atom), max_size=3),
    )


_index_atom = st.deferred(
    lambda: _variable | _accesses(["D", "E"], _variable | _accesses(["F"], _variable))
)
_access = _accesses(["A", "B", "C0"], _index_atom)
_number = st.integers(-5, 5).map(Number) | st.floats(-1e30, 1e30, allow_nan=False).map(Number)


def _larger(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    parts = st.lists(inner, min_size=1, max_size=3)
    calls = st.sampled_from([f for f, n in FUNCTIONS.items() if str(n) == "1 argument(s)"]).flatmap(
        lambda f: inner.map(lambda a: Call(f, (a,)))
    )
    return (
        parts.map(product)
        | parts.map(total)
        | calls
        | st.tuples(inner, inner).map(lambda pair: Call("eq", pair))
        | st.tuples(inner, _number).map(lambda pair: Call("pow", pair))
        | st.tuples(inner, inner, inner).map(lambda three: Call("where", three))
    )


_value = st.recursive(_access | _number, _larger, max_leaves=8)
_statements = st.builds(
    Statement, _accesses(["R"], _index_atom), st.sampled_from(OPERATORS), _value
)


def test_every_tree_prints_as_a_text_that_parses_back() -> None:
    seen = 0

    @settings(max_examples=500, deadline=None, derandomize=True, database=None)
    @given(_statements)
    def check(statement: Statement) -> None:
        nonlocal seen
        seen += 1
        again = parse(str(statement))
        assert again == statement
        assert str(again) == str(statement)

    check()
    assert seen >= 500


def test_drawn_statements_parse_back_however_they_are_spaced() -> None:
    spaces = random.Random(0)
    for case in draw_cases(200, seed=5):
        statement = parse(case.statement)
        loose = "".join(
            c + " " * spaces.randrange(3) if c in "[](),*" else c for c in case.statement
        )
        assert parse(str(statement)) == statement == parse(loose)


# --- what is refused ------------------------------------------------------------------------------


def refused(text: str) -> StatementError:
    with pytest.raises(StatementError) as caught:
        parse(text)
    return caught.value


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\n",
        "C",
        "C[i]",
        "C[i] =",
        "= A[i]",
        "C[i] = ",
        "C[i] A[i]",
        "C[i] *= A[i]",
        "C[i] == A[i]",
        "C[i] := A[i]",
        "C[i = A[i]",
        "C[i] = A[i",
        "C[i] = A[i]]",
        "C[i] = (A[i]",
        "C[i] = A[i])",
        "C[i] = A[(i])",
        "C[i) = A[i]",
        "]",
        "(",
        "C[i] = ()",
        "C[[i]] = A[i]",
        "C[i] = A[i] B[i]",
        "C[i] = A[i] * ",
        "C[i] = * A[i]",
        "C[i] = A[i] ** B[i]",
        "C[i] = A[i] ** ",
        "C[i] = A[i] / ",
        "C[i] = A[i] <",
        "C[i] = A[i / 2]",
        "C[i] = A[i]^2",
        "C[i] = A[i] @ B[i]",
        "C[i] = A[i] +",
        "C[i] = A[i,]",
        "C[i] = A[,i]",
        "C[,] = A[i]",
        "C[i] = A[i;j]",
        "C[i] = A[i:j]",
        "C[i] = A[:]",
        "C[i] = A[...]",
        "C[i] = A[i]; D[i] = B[i]",
        "C[i] = A[i*j]",
        "C[i] = A[D[i]*j]",
        "C[i] = A[1.5]",
        "C[i] = A[1e0*i]",
        "C[i] = A[exp(i)]",
        "C[i] = A['i']",
        "C[i] = foo(A[i])",
        "C[i] = exp()",
        "C[i] = exp(A[i], A[i])",
        "C[i] = eq(A[i])",
        "C[i] = exp",
        "exp[i] = A[i]",
        "C[exp] = A[exp]",
        "C[i] = sizes[i]",
        "max[i] = A[i]",
        "C[i] = min[i]",
        "C[i] = i * A[i]",
        "A[A] = B[i]",
        "C[C] = 1",
        "2[i] = A[i]",
        "C[i] = 2[i]",
        "C[i] = 2A[i]",
        "C[i] = A[i].T",
        "C[i] = 1.2.3",
        "C[i] = 1e",
        "C[i] = 0x10",
        "C[i] = 1_000",
        "C[i] = 1e999",
        "C[i] = 1e308 * 10.0",
        "C[i] = 9223372036854775808 * A[i]",
        "C[i] = 4294967296 * 4294967296 * A[i]",
        "C[i] = A[9223372036854775807*2*i]",
        "C[i] = " + "1" * 60,
        "C[i] = A[" + "9" * 60 + "]",
        "C[ï] = A[ï]",
        "C[i] = Ä[i]",
        "C[\u0661] = A[i]",
        "C[i] = A[i]\u0000",
        "C[i] = A[i] # sum",
        "C[i] = A[i] \ud800",
        "\u0421[i] = A[i]",
        "C[i]\u00a0= A[i]",
        "C[i] \uff1d A[i]",
        "C[\u00b2] = A[i]",
    ],
)
def test_refuses(text: str) -> None:
    error = refused(text)
    assert error.fact and str(error).startswith(error.fact)
    str(error).encode()  # printable everywhere: no lone surrogate survives in the message


@pytest.mark.parametrize(
    "thing", [None, 3, b"C[i] = A[i]", ["C[i] = A[i]"], {}, parse("C[i] = A[i]")]
)
def test_refuses_what_is_no_text(thing: object) -> None:
    with pytest.raises(StatementError, match="a statement is a string, not"):
        parse(thing)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_refuses_reserved_names(name: str) -> None:
    for text in (f"C[i] = A[i] * {name}[i]", f"C[{name}] = A[{name}]", f"{name}[i] = A[i]"):
        assert f"{name!r} is a reserved name" in refused(text).fact or name in ("max", "min")


@pytest.mark.parametrize(
    "nested",
    [
        lambda n: "C[i] = " + "(" * n + "A[i]" + ")" * n,
        lambda n: "C[i] = " + "-" * n + "A[i]",
        lambda n: "C[i] = " + "exp(" * n + "A[i]" + ")" * n,
        lambda n: "C[i] = " + "A[" * n + "i" + "]" * n,
        lambda n: "C[i] = A[" + "(" * n + "i" + ")" * n + "]",
        lambda n: "C[i] = A[" + "-" * n + "i]",
        lambda n: "A[" * n + "i" + "]" * n + " = B[i]",
    ],
)
def test_depth_is_limited_and_never_reaches_pythons_own_limit(nested: object) -> None:
    assert callable(nested)
    parse(nested(MAX_DEPTH // 4))
    for depth in (MAX_DEPTH + 1, 3000):
        assert f"nested more than {MAX_DEPTH} levels" in refused(nested(depth)).fact


def test_length_is_limited() -> None:
    assert "the limit is" in refused("C[i] = A[i]" + " " * MAX_LENGTH).fact
    terms = parse("C[i] = " + " + ".join(["A[i]"] * 10_000)).value
    assert isinstance(terms, Sum) and len(terms.terms) == 10_000


def test_a_product_of_long_sums_is_refused_before_it_fills_the_memory() -> None:
    sums = "(" + " + ".join(["a[i]"] * 1000) + ")"
    start = time.process_time()
    for text in (
        f"C[i] = {sums} * {sums} * {sums}",
        f"C[i] = b[i] * ({sums} + {sums} * ({sums} * {sums}))",
        "C[i] = " + " * ".join(["(a[i] + b[i])"] * 60),
    ):
        with pytest.raises(StatementError, match=f"more than {MAX_TERMS} products"):
            expand(parse(text))
    assert time.process_time() - start < 5


def test_literals_that_meet_only_in_the_expansion_are_checked_there() -> None:
    with pytest.raises(StatementError, match="do not fit into 64 bits"):
        expand(parse("C[i] = (4294967296 + A[i]) * (4294967296 + B[i])"))


def test_deep_expansion_of_conjugates() -> None:
    terms = expand(parse("C[i] = conj(conj(A[i]) * (B[i] - 2 * conj(A[i])))"))
    assert [str(t.value) for t in terms] == ["A[i] * conj(B[i])", "-2 * A[i] * A[i]"]


def test_each_term_ranges_over_its_own_variables() -> None:
    terms = expand(parse("y[i] = A[i,j] * x[D[j,k]] + b[i] - 3"))
    assert [t.variables for t in terms] == [("i", "j", "k"), ("i",), ("i",)]
    assert [t.variables for t in expand(parse("y[i] max= A[i,j] + b[k]"))] == [("i", "j", "k")]


# --- hostile text ---------------------------------------------------------------------------------

_PIECES = [
    *"[](),+-*=",
    "+=",
    "max=",
    "min=",
    "==",
    "A",
    "B",
    "C[i]",
    "i",
    "j",
    "0",
    "2",
    "1.5",
    "9" * 19,
    "9" * 40,
    "1e308",
]
_PIECES += ["exp", "exp(", "eq(", "conj(", "max", "sizes", " ", "\n"]
_PIECES += [
    "C[i] =",
    "A[i]",
    "A[D[i]]",
    "é",
    "\0",
    "#",
    "'",
    "[" * 60,
    "(" * 60,
    "-" * 60,
    "]" * 60,
    "1e999",
    "0.",
    ".5",
    "_",
    "__class__",
]


def _undecoded(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def parses_or_says_why(text: str) -> bool:
    """True for a statement; its canonical text must then parse to it, and its terms must be
    countable or refused.
    """
    try:
        statement = parse(text)
    except StatementError as error:
        str(error).encode()
        return False
    assert parse(str(statement)) == statement
    try:
        expand(statement)
    except StatementError:
        return False
    return True


def test_arbitrary_text_parses_or_raises_a_statement_error() -> None:
    seen = 0

    @settings(max_examples=400, deadline=None, derandomize=True, database=None)
    @given(
        st.text(max_size=60)
        | st.text(alphabet="ABCij[](),+-*= .e0129\n", max_size=60)
        | st.binary(max_size=40).map(_undecoded)
    )
    def check(text: str) -> None:
        nonlocal seen
        seen += 1
        parses_or_says_why(text)
        parses_or_says_why("C[i] = " + text)

    check()
    assert seen >= 400


def test_token_soup_parses_or_raises_a_statement_error() -> None:
    source = random.Random(0)
    good = sum(
        parses_or_says_why("".join(source.choices(_PIECES, k=source.randrange(1, 16))))
        for _ in range(20_000)
    )
    assert good > 0


def test_damaged_statements_parse_or_raise_a_statement_error() -> None:
    """One edit away from a good statement: deletions, insertions, swaps."""
    source = random.Random(1)
    for case in draw_cases(150, seed=9):
        for _ in range(20):
            text = list(case.statement)
            at = source.randrange(len(text))
            match source.randrange(3):
                case 0:
                    del text[at]
                case 1:
                    text.insert(at, source.choice(_PIECES))
                case _:
                    text[at] = source.choice("[](),+-*=ij0 ")
            parses_or_says_why("".join(text))
