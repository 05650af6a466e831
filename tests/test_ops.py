"""The registered ops and the short way past them: opcheck, transforms, tracers, autocast, writing
in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

import insum
from insum.call import running
from insum.call.prepared import BoundCall
from insum.call.request import Request, head
from insum.compat import calls
from insum.compat import tensors as compat_tensors
from insum.ops.eager import accumulate
from insum.ops.encoding import decode, encode
from insum.ops.traced import left_side

PRODUCT = "C[D[y],x] += A[y,E[r]] * B[r,x]"
OPS = torch.ops.insum


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def tensors(*, gradient: bool = False, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {
        "A": torch.randn(4, 9, dtype=dtype, requires_grad=gradient),
        "B": torch.randn(3, 5, dtype=dtype, requires_grad=gradient),
        "D": torch.tensor([0, 2, 2, 1]),
        "E": torch.tensor([8, 0, 3]),
    }


SHAPE = (("C", (4, 5)),)
REQUESTS = {
    "product": (Request(PRODUCT, SHAPE), {}),
    "sizes": (Request("C[D[y],x] = A[y,E[r]] * B[r,x]", (("D[y]", 4), ("r", 3))), {}),
    "max": (Request("C[D[y],x] max= A[y,E[r]] * B[r,x]", SHAPE), {}),
    "pointwise": (Request("C[D[y],x] = exp(A[y,E[r]]) * relu(B[r,x]) - 2 * B[r,x]", SHAPE), {}),
    "numbers": (Request("C[D[y],x] = A[y,E[r]] * B[r,x] * s", SHAPE), {"s": 2.5}),
    "padded": (
        Request("C[D[y],x] += A[y,E[r]] * B[r,x]", SHAPE, ("D", "E")),
        {"D": torch.tensor([0, -1, 2, 1]), "E": torch.tensor([8, -1, 3])},
    ),
}


# --- opcheck --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("gradient", [False, True])
def test_opcheck_contract(name: str, gradient: bool) -> None:
    request, more = REQUESTS[name]
    torch.library.opcheck(
        OPS.contract.default, encode(request, {**tensors(gradient=gradient), **more})
    )


@pytest.mark.parametrize("name", REQUESTS)
def test_opcheck_accumulate(name: str) -> None:
    request, more = REQUESTS[name]
    initial = torch.randn(4, 5, requires_grad=True)
    torch.library.opcheck(
        OPS.accumulate.default, (initial, *encode(request, {**tensors(gradient=True), **more}))
    )


@pytest.mark.parametrize("name", REQUESTS)
def test_opcheck_accumulate_in_place(name: str) -> None:
    request, more = REQUESTS[name]
    torch.library.opcheck(
        OPS.accumulate_.default, (torch.randn(4, 5), *encode(request, {**tensors(), **more}))
    )


#: Shapes that broadcast to those of results.
BASES = [(5,), (4, 1), (1, 5), ()]


@pytest.mark.parametrize("shape", BASES, ids=str)
def test_accumulate_from_what_is_broadcast(shape: tuple[int, ...]) -> None:
    """Values, gradients of the first and second order, tangents, batches and compiled code."""
    request = Request("C[D[y],x] += A[y,x]", (("C", (4, 5)),))
    values = {"A": torch.randn(3, 5).double().requires_grad_(), "D": torch.tensor([0, 2, 2])}
    base = torch.randn(shape).double().requires_grad_()

    def start(base: Tensor, A: Tensor) -> Tensor:
        return accumulate(request, base, {**values, "A": A})

    def called(base: Tensor, A: Tensor) -> Tensor:
        result: Tensor = OPS.accumulate(base, *encode(request, {**values, "A": A}))
        return result

    wanted = base.expand(4, 5).index_add(0, values["D"], values["A"])
    both = base, values["A"]
    torch.testing.assert_close(start(*both), wanted)
    torch.testing.assert_close(called(*both), wanted)
    assert torch.autograd.gradcheck(start, both) and torch.autograd.gradgradcheck(start, both)
    assert torch.autograd.gradcheck(called, both)
    torch.library.opcheck(OPS.accumulate.default, (base, *encode(request, values)))
    plain = base.detach(), values["A"].detach()
    tangents = torch.ones_like(plain[0]), torch.ones_like(plain[1])
    _, tangent = torch.func.jvp(start, plain, tangents)
    torch.testing.assert_close(tangent, start(*tangents))
    for given, dims in (
        ((torch.randn(3, *shape).double(), plain[1]), (0, None)),
        ((plain[0], torch.randn(3, 3, 5).double()), (None, 0)),
    ):
        one = (tuple(v if d is None else v[k] for v, d in zip(given, dims)) for k in range(3))
        wanted = torch.stack([start(*each) for each in one])
        torch.testing.assert_close(torch.vmap(start, dims)(*given), wanted)
    compiled = torch.compile(called, fullgraph=True, backend="aot_eager")(*both)
    for found, right in zip(
        torch.autograd.grad(compiled.square().sum(), both),
        torch.autograd.grad(start(*both).square().sum(), both),
    ):
        torch.testing.assert_close(found, right)


def test_accumulate_from_what_does_not_fit() -> None:
    request = Request("C[D[y],x] += A[y,x]", (("C", (4, 5)),))
    values = {"A": torch.randn(3, 5), "D": torch.tensor([0, 2, 2])}
    with pytest.raises(insum.BindingError, match=r"shape \(3,\), which does not broadcast to"):
        accumulate(request, torch.randn(3), values)


def test_opcheck_other_dtypes() -> None:
    for dtype in (torch.float16, torch.complex64, torch.int64, torch.bool):
        values = {
            name: (v > 0 if dtype == torch.bool else v.to(dtype)) if v.is_floating_point() else v
            for name, v in tensors().items()
        }
        torch.library.opcheck(OPS.contract.default, encode(Request(PRODUCT, SHAPE), values))


def test_arguments_survive_encoding() -> None:
    request = Request(
        "C[D[y],2*x] = A[y] * s",
        (("C", (4, 5)), ("D[y]", 4), (1, 5), ("x", 2)),
        ("D",),
        torch.float64,
    )
    values = {"A": torch.ones(4), "D": torch.tensor([0, 1, 2, 3]), "s": 2j}
    decoded, read = decode(encode(request, values))
    assert decoded == request
    assert read.keys() == values.keys() and read["s"] == 2j


LEFT_SIDES = [
    "t max= A[i]",
    "tmax = A[i]",
    "tmax=A[i]",
    "C[i]max=A[i]",
    "C[i] min =A[i]",
    "t+=t*2",
    "t[] = A[i]",
    "C[C[i]] = A[i]",
    "A[i]=AA[i]",
]


@pytest.mark.parametrize("statement", [*LEFT_SIDES, "C[\ni]\nmax\n=C [i]"])
def test_the_tracer_reads_the_left_side_as_the_parser_does(statement: str) -> None:
    parsed = head(statement)
    assert left_side(statement) == (parsed.target, parsed.operator, parsed.reads_target)


# --- the fallback without private names of torch --------------------------------------------------


def test_without_private_names_every_call_goes_through_the_op(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = tensors(gradient=True)
    expected = insum.insum(PRODUCT, out_shape=(4, 5), **values)
    gradients = torch.autograd.grad(expected.square().sum(), (values["A"], values["B"]))
    monkeypatch.setattr(calls, "probed", None)
    assert not calls.is_undisturbed() and not calls.is_transformed()
    result = insum.insum(PRODUCT, out_shape=(4, 5), **values)
    torch.testing.assert_close(result, expected)
    for a, b in zip(
        torch.autograd.grad(result.square().sum(), (values["A"], values["B"])), gradients
    ):
        torch.testing.assert_close(a, b)
    target = torch.zeros(4, 5)
    assert insum.insum(PRODUCT, C=target, **tensors()) is target


def test_private_names_are_there() -> None:
    assert calls._probe() is not None and calls.is_undisturbed()


def test_an_op_that_cannot_be_shortened_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        def __call__(self, *args: Any) -> Any:
            return self.run(*args)  # type: ignore[attr-defined]

    class Usual:
        def __init__(self) -> None:
            self._op = sum

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self._op(*args, **kwargs)

        def __hash__(self) -> int:
            return hash(self._op)

    quick = lambda values: 7 if len(values) > 1 else None
    assert not calls.shorten(Other(), quick)
    op = Usual()
    before = hash(op)
    assert calls.shorten(op, quick) and hash(op) == before
    with torch.no_grad():
        assert (op([1, 2]), op([1]), op([1, 2], start=1)) == (7, 1, 4)
    assert op([1, 2]) == 3  # with gradients on, as before
    silent = Usual()
    assert calls.shorten(silent, quick, gives=False)
    with torch.no_grad():
        assert (silent([1, 2]), silent([1])) == (None, 1)
    monkeypatch.setattr(calls, "probed", None)
    assert not calls.shorten(Usual(), quick)


@pytest.mark.parametrize("shape", [(), (5,), (0, 3), (4, 3, 2)])
@pytest.mark.parametrize("quickly", [True, False])
def test_tensors_without_values(
    shape: tuple[int, ...], quickly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if quickly:
        assert set(compat_tensors.strided_makers()) == {"cpu", "cuda"}
    else:
        monkeypatch.setattr(compat_tensors, "strided_makers", dict)
    made = compat_tensors.maker(shape, torch.bfloat16, torch.device("cpu"))
    one, other = made(), made()
    assert one.shape == shape and one.dtype is torch.bfloat16 and one.is_cpu and one.is_contiguous()
    assert one.numel() == 0 or one.data_ptr() != other.data_ptr()


def test_tensors_without_values_on_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
    monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cpu")
    assert compat_tensors.strided_makers.__wrapped__() == {}


def test_second_gradient_through_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "probed", None)
    values = tensors(gradient=True, dtype=torch.float64)
    fixed = {n: v for n, v in values.items() if n in "DE"}
    for statement in (PRODUCT, "C[D[y],x] max= A[y,E[r]] * B[r,x]"):
        f = lambda A, B, statement=statement: insum.insum(
            statement, A=A, B=B, out_shape=(3, 5), **fixed
        )
        assert torch.autograd.gradcheck(f, (values["A"], values["B"]))
        assert torch.autograd.gradgradcheck(f, (values["A"], values["B"]))


# --- torch.compile and torch.export ---------------------------------------------------------------


def product(A: Tensor, B: Tensor, D: Tensor, E: Tensor, rows: int) -> Tensor:
    return insum.insum(PRODUCT, A=A, B=B, D=D, E=E, out_shape=(rows, B.shape[1])).sin()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_fullgraph(backend: str) -> None:
    values = tensors(gradient=True)
    compiled = torch.compile(product, fullgraph=True, backend=backend)
    expected, result = product(**values, rows=4), compiled(**values, rows=4)
    torch.testing.assert_close(result, expected)
    inputs = (values["A"], values["B"])
    for a, b in zip(
        torch.autograd.grad(result.square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), inputs),
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
def test_compile_with_inductor() -> None:
    values = tensors()
    torch.testing.assert_close(
        torch.compile(product, fullgraph=True)(**values, rows=4), product(**values, rows=4)
    )


def test_compile_dynamic_compiles_once() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(module)
        return module.forward

    compiled = torch.compile(product, fullgraph=True, dynamic=True, backend=backend)
    for y, x, r, rows in ((4, 5, 3, 6), (7, 2, 5, 8), (3, 9, 2, 4)):
        values = {
            "A": torch.randn(y, 9),
            "B": torch.randn(r, x),
            "D": torch.randint(rows, (y,)),
            "E": torch.randint(9, (r,)),
        }
        torch.testing.assert_close(compiled(**values, rows=rows), product(**values, rows=rows))
    assert len(graphs) == 1
    calls = [n.target for n in graphs[0].graph.nodes if "insum" in str(n.target)]
    assert len(calls) == 1  # nothing of parsing or binding was traced


def test_compile_sizes_and_numbers() -> None:
    def f(x: Tensor, s: float, n: int) -> Tensor:
        return insum.insum("y[i,j] = x[i] * s", x=x, s=s, sizes={"j": n})

    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend="aot_eager")
    for s, n in ((2.0, 3), (2.5, 4)):
        torch.testing.assert_close(compiled(torch.arange(3.0), s, n), f(torch.arange(3.0), s, n))


@pytest.mark.parametrize("operator", ["+=", "max="])
@pytest.mark.parametrize("gradient", [False, True])
def test_compile_in_place(operator: str, gradient: bool) -> None:
    statement = PRODUCT.replace("+=", operator)

    def f(C: Tensor, **values: Tensor) -> Tensor:
        C = C * 2
        result = insum.insum(statement, C=C, **values)
        return result + C

    values, C = tensors(gradient=gradient), torch.randn(4, 5, requires_grad=gradient)
    expected, result = (
        f(C, **values),
        torch.compile(f, fullgraph=True, backend="aot_eager")(C, **values),
    )
    torch.testing.assert_close(result, expected)
    if gradient:
        inputs = (C, values["A"], values["B"])
        for a, b in zip(
            torch.autograd.grad(result.square().sum(), inputs),
            torch.autograd.grad(expected.square().sum(), inputs),
        ):
            torch.testing.assert_close(a, b)


def test_compile_writes_into_an_argument() -> None:
    values, C = tensors(), torch.ones(4, 5)
    expected = insum.insum(PRODUCT, C=C.clone(), **values)
    torch.compile(
        lambda C: insum.insum(PRODUCT, C=C, **values), fullgraph=True, backend="aot_eager"
    )(C)
    torch.testing.assert_close(C, expected)


def test_compile_second_gradient() -> None:
    """Forces and their training: a gradient inside the compiled function, and one of it outside."""

    def energy_and_force(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        energy = insum.insum("t[] = exp(x[i] * w[i,j]) * x[j]", x=x, w=w)
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy, force

    x, w = torch.randn(3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    expected = torch.autograd.grad(energy_and_force(x, w)[1].square().sum(), w)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        compiled = torch.compile(energy_and_force, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(
            torch.autograd.grad(compiled(x, w)[1].square().sum(), w), expected
        )


def test_export() -> None:
    class Module(torch.nn.Module):
        def forward(self, A: Tensor, B: Tensor, D: Tensor, E: Tensor, C: Tensor) -> Tensor:
            return insum.insum("C[D[y],x] = A[y,E[r]] * B[r,x]", A=A, B=B, C=C, D=D, E=E)

    y, x = torch.export.Dim("y"), torch.export.Dim("x")
    example = tuple(tensors().values())
    program = torch.export.export(
        Module(),
        (*example, torch.zeros(4, 5)),
        dynamic_shapes=({0: y}, {1: x}, {0: y}, None, {1: x}),
    )
    other = (
        torch.randn(6, 9),
        torch.randn(3, 8),
        torch.randint(4, (6,)),
        example[3],
        torch.zeros(4, 8),
    )
    torch.testing.assert_close(program.module()(*other), Module()(*other))
    assert any(n.target is OPS.contract.default for n in program.graph.nodes)


def test_fake_tensors_and_meta() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fakes = {
            "A": torch.empty(4, 9),
            "B": torch.empty(3, 5),
            "D": torch.empty(4, dtype=torch.long),
            "E": torch.empty(3, dtype=torch.long),
        }
        assert insum.insum(PRODUCT, out_shape=(7, 5), **fakes).shape == (7, 5)
    meta = {name: v.to("meta") for name, v in tensors().items()}
    assert insum.insum(PRODUCT, out_shape=(7, 5), **meta).shape == (7, 5)


# --- vmap and torch.func --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dims", "shapes"),
    [
        ({"A": 0}, {"A": (6, 4, 9)}),
        ({"A": 2, "B": 1}, {"A": (4, 9, 6), "B": (3, 6, 5)}),
        ({"D": 0}, {}),
        ({"A": 0, "B": 0, "D": 0, "E": 0}, {"A": (6, 4, 9), "B": (6, 3, 5)}),
    ],
)
@pytest.mark.parametrize(
    "statement",
    [PRODUCT, "C[D[y],x] max= A[y,E[r]] * B[r,x]", "C[D[y],x] = A[y,E[r]] - exp(B[r,x])"],
)
def test_vmap(statement: str, dims: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> None:
    values = {**tensors(), **{name: torch.randn(shape) for name, shape in shapes.items()}}
    if "D" in dims:
        values["D"] = torch.randint(4, (6, 4))
    if "E" in dims:
        values["E"] = torch.randint(9, (6, 3))
    names = list(values)
    f = lambda *args: insum.insum(statement, sizes={"D[y]": 4}, **dict(zip(names, args)))
    in_dims = tuple(dims.get(n) for n in names)
    result = vmap(f, in_dims=in_dims)(*values.values())
    each = [
        f(*(v.select(d, k) if d is not None else v for v, d in zip(values.values(), in_dims)))
        for k in range(6)
    ]
    torch.testing.assert_close(result, torch.stack(each))


def test_vmap_in_place_and_given_output() -> None:
    values, C = tensors(), torch.randn(4, 6, 5)
    expected = torch.stack([insum.insum(PRODUCT, C=C[:, k].clone(), **values) for k in range(6)])
    result = vmap(lambda c: insum.insum(PRODUCT, C=c, **values), in_dims=1)(C)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(C.movedim(1, 0), expected)
    assigned = lambda a: insum.insum(
        PRODUCT.replace("+=", "="), C=torch.empty(4, 5), **{**values, "A": a}
    )
    assert vmap(assigned)(torch.randn(2, 4, 9)).shape == (2, 4, 5)


def test_vmap_into_an_output_that_is_not_batched() -> None:
    with pytest.raises(insum.AutogradError, match="not batched"):
        vmap(lambda a: insum.insum("C[i] += a[i]", C=torch.zeros(3), a=a))(torch.ones(2, 3))


def test_torch_func() -> None:
    f = lambda a, b: insum.insum("t[] = exp(A[i,j]) * B[j,k] * A[i,j]", A=a, B=b)
    plain = lambda a, b: torch.einsum("ij,jk,ij->", a.exp(), b, a)
    a, b = torch.randn(3, 4, dtype=torch.float64), torch.randn(5, 4, 2, dtype=torch.float64)
    torch.testing.assert_close(grad(f)(a, b[0]), grad(plain)(a, b[0]))
    torch.testing.assert_close(
        vmap(grad(f), in_dims=(None, 0))(a, b), vmap(grad(plain), in_dims=(None, 0))(a, b)
    )
    torch.testing.assert_close(jacrev(jacrev(f))(a, b[0]), jacrev(jacrev(plain))(a, b[0]))


@pytest.mark.parametrize("operator", ["=", "max="])
def test_what_torch_func_gives_is_called_after_its_transform(operator: str) -> None:
    s, x = torch.randint(9, (20,)), torch.randn(9, 16, dtype=torch.float64)
    text = f"y[s[e],f] {operator} x[s[e],f] * x[s[e],f]"
    call = lambda x: insum.insum(text, x=x, s=s, out_shape=(9, 16))
    y, pull = torch.func.vjp(call, x)
    upstream = torch.randn_like(y)
    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(call(leaf), leaf, upstream)
    for _ in range(2):
        torch.testing.assert_close(pull(upstream)[0], want)


def test_torch_func_maximum() -> None:
    values = tensors()
    f = lambda c: insum.insum("C[D[y],x] max= A[y,E[r]] * B[r,x]", C=c * 1, **values)
    (expected,) = torch.autograd.functional.jacobian(f, (torch.zeros(4, 5),))
    torch.testing.assert_close(jacrev(f)(torch.zeros(4, 5)), expected)


def test_subclass_goes_through_the_dispatcher() -> None:
    seen: list[str] = []

    class Logged(Tensor):
        @classmethod
        def __torch_function__(
            cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(function))
            return super().__torch_function__(function, types, args, kwargs or {})

    insum.insum("t[] = a[i]", a=torch.ones(3).as_subclass(Logged))
    assert any("contract" in name for name in seen)


# --- autocast -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    values = tensors(gradient=True)
    with torch.autocast("cpu", dtype=dtype):
        result = insum.insum(PRODUCT, out_shape=(4, 5), **values)
        assert result.dtype == dtype
        assert (
            torch.compile(product, fullgraph=True, backend="aot_eager")(**values, rows=4).dtype
            == dtype
        )
        into = insum.insum(PRODUCT, C=torch.zeros(4, 5), **tensors())
        assert into.dtype == torch.float32  # what is passed as the output keeps its dtype
        assert (
            insum.insum("C[D[y],x] = A[y,E[r]] * B[r,x]", C=torch.zeros(4, 5), **tensors()).dtype
            == torch.float32
        )
        assert (
            insum.insum(PRODUCT, out_shape=(4, 5), **tensors(dtype=torch.float64)).dtype
            == torch.float64
        )
    gradient = torch.autograd.grad(result.float().sum(), values["A"])[0]
    assert gradient.dtype == torch.float32
    lowered = {
        name: v.detach().to(dtype) if v.is_floating_point() else v for name, v in values.items()
    }
    torch.testing.assert_close(result, insum.insum(PRODUCT, out_shape=(4, 5), **lowered))


def test_autocast_inside_of_transforms() -> None:
    """One item of a batch has the dtype of a call by itself."""
    A, x = torch.randn(3, 4), torch.randn(5, 4)

    def product(x: Tensor) -> Tensor:
        return insum.insum("y[i] = A[i,k] * x[k]", A=A, x=x)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        batch = torch.vmap(product)(x)
        assert batch.dtype == torch.bfloat16
        torch.testing.assert_close(batch, torch.stack([product(one) for one in x]))
        slopes = torch.vmap(torch.func.grad(lambda one: product(one).sum()))(x)
    assert slopes.dtype == torch.float32


def test_autocast_takes_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so does the backward pass, whose rules are kept."""
    values = tensors(gradient=True)

    def refuse(*_: Any) -> None:
        raise AssertionError("the registered op")

    monkeypatch.setattr(insum.ops.eager, "encode", refuse)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = insum.insum(PRODUCT, out_shape=(4, 5), **values)
        assert result.dtype == (result @ torch.ones(5, 2)).dtype == torch.bfloat16  # still on
    assert torch.autograd.grad(result.float().sum(), values["A"])[0].dtype == torch.float32


def test_gradients_of_parameters_under_autocast() -> None:
    """They are rounded to the parameter's own dtype and no narrower, and have gradients."""
    rows, text = torch.tensor([0, 2, 1]), "C[i,j] = A[i,k] * W[D[k],j]"
    A, W = torch.randn(4, 3).bfloat16(), torch.randn(3, 5, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = insum.insum(text, A=A.requires_grad_(), D=rows, W=W)
    upstream = torch.randn(4, 5).bfloat16()
    to_a, to_w = torch.autograd.grad(result, (A, W), upstream, create_graph=True)
    exact = (A.detach().float().T @ upstream.float())[rows.argsort()]
    assert to_w.dtype == torch.float32 and to_a.dtype == torch.bfloat16
    torch.testing.assert_close(to_w, exact, rtol=1e-6, atol=1e-6)
    (second,) = torch.autograd.grad(to_a.float().sum(), W, retain_graph=True)
    assert second.dtype == torch.float32 and second.abs().sum() > 0
    with torch.no_grad():
        W.add_(1)
    torch.autograd.grad(result, (A, W), upstream, retain_graph=True)  # of the cast, which is kept
    W.data = torch.zeros_like(W)  # and what torch's own products keep
    again = torch.autograd.grad(result, (A, W), upstream, create_graph=True)
    for found, wanted in zip(again, (to_a, to_w), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("autocast", [False, True])
def test_parameters_with_other_data_before_the_backward_pass(autocast: bool) -> None:
    """As in torch: of a parameter that was saved itself it is the new data, of a cast the old."""

    def found(product: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        x, w = (torch.nn.Parameter(torch.randn(4, 4)) for _ in range(2))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = product(x, w)
        w.data = torch.full_like(w, 3.0)
        first = torch.autograd.grad(y.float().square().sum(), (x, w), create_graph=True)
        return *first, *torch.autograd.grad(sum(g.square().sum() for g in first), (x, w))  # type: ignore[arg-type]

    ours = found(lambda x, w: insum.insum("Y[i,j] = X[i,k] * W[k,j]", X=x, W=w))
    for got, want in zip(ours, found(torch.matmul), strict=True):
        near = 0.05 * float(want.detach().abs().max()) if autocast else 1e-3
        torch.testing.assert_close(got, want, atol=near, rtol=1e-3)


# --- writing in place -----------------------------------------------------------------------------


def test_in_place_returns_the_same_object() -> None:
    for operator in ("+=", "max=", "min="):
        C = torch.zeros(4, 5)
        version = C._version
        assert insum.insum(PRODUCT.replace("+=", operator), C=C, **tensors()) is C
        assert C._version > version


def test_assignment_leaves_the_passed_output_alone() -> None:
    C = torch.full((4, 5), 7.0)
    result = insum.insum("C[D[y],x] = A[y,E[r]] * B[r,x]", C=C, **tensors())
    assert result is not C and C.eq(7).all()
    assert (
        insum.insum("C[D[y],x] = A[y,E[r]] * B[r,x]", C=C.double(), **tensors()).dtype
        == torch.float64
    )


@pytest.mark.parametrize("operator", ["+=", "max=", "min="])
def test_in_place_is_differentiable(operator: str) -> None:
    values, start = (
        tensors(gradient=True, dtype=torch.float64),
        torch.randn(4, 5, dtype=torch.float64, requires_grad=True),
    )

    def f(A: Tensor, B: Tensor, start: Tensor) -> Tensor:
        C = start * 1
        insum.insum(PRODUCT.replace("+=", operator), A=A, B=B, C=C, D=values["D"], E=values["E"])
        return C

    assert torch.autograd.gradcheck(f, (values["A"], values["B"], start))
    assert torch.autograd.gradgradcheck(f, (values["A"], values["B"], start))


def test_the_old_value_is_read() -> None:
    C = torch.arange(4.0)
    insum.insum("C[i] += C[j]", C=C)
    assert C.tolist() == [6.0, 7.0, 8.0, 9.0]
    C = torch.arange(4.0)
    insum.insum("C[i+1] += C[i+k]", C=C, sizes={"i": 2, "k": 2})
    assert C.tolist() == [0.0, 2.0, 5.0, 3.0]
    D = torch.tensor([1, 2, 0])
    insum.insum("D[D[i]] += 1", D=D)
    assert D.tolist() == [2, 3, 1]


def test_arguments_in_the_memory_of_the_output() -> None:
    for operator, expected in (("+=", [1.0, 3.0, 5.0, 3.0]), ("max=", [1.0, 2.0, 3.0, 3.0])):
        memory = torch.arange(4.0)
        insum.insum(f"C[i] {operator} a[i]", C=memory[:3], a=memory[1:])
        assert memory.tolist() == expected
    y = torch.randn(4, requires_grad=True)
    C = y * 1
    insum.insum("C[i] += C[i] * C[j]", C=C)
    (ours,) = torch.autograd.grad(C.sum(), y)
    (expected_gradient,) = torch.autograd.grad((y + y * y.sum()).sum(), y)
    torch.testing.assert_close(ours, expected_gradient)


def test_two_storages_over_the_same_memory() -> None:
    import numpy as np

    for operator, expected in (("+=", [1.0, 3.0, 5.0, 3.0]), ("max=", [1.0, 2.0, 3.0, 3.0])):
        array = np.arange(4.0)
        C, a = torch.from_numpy(array[:3]), torch.from_numpy(array[1:])
        assert C.untyped_storage().data_ptr() != a.untyped_storage().data_ptr()
        insum.insum(f"C[i] {operator} a[i]", C=C, a=a)
        assert array.tolist() == expected
    array = np.array([1, 2, 0, 0, 1])
    C, D = torch.from_numpy(array[:3]), torch.from_numpy(array[1:])
    insum.insum("C[D[i]] += x[i]", C=C, D=D, x=torch.ones(4, dtype=torch.int64))
    assert array.tolist() == [3, 3, 1, 0, 1]
    memory = torch.zeros(8)
    insum.insum("C[i] += a[i]", C=memory[::2], a=torch.ones(4))  # side by side, and no overlap
    assert memory.tolist() == [1, 0] * 4


@pytest.mark.interpreter
def test_two_storages_over_the_same_memory_in_kernels() -> None:
    import numpy as np

    array = np.arange(600.0, dtype=np.float32)
    want = array.copy()
    want[:500] += array[100:]
    C, a = torch.from_numpy(array[:500]), torch.from_numpy(array[100:])
    with insum.settings(backend="fused", require_fused=True):
        insum.insum("C[i] += a[i]", C=C, a=a)
    assert np.array_equal(array, want)


# --- extrema that are NaN -------------------------------------------------------------------------

NAN = float("nan")


def nan_gradients() -> None:
    for operator in ("max=", "min="):
        for dtype in (torch.float16, torch.float32, torch.float64):
            a = torch.tensor([[1.0, NAN, 3.0, NAN], [1.0, 2.0, 2.0, 1.0], [NAN, 1.0, 2.0, 3.0]])
            a = a.to(dtype).requires_grad_()
            y = insum.insum(f"y[i] {operator} a[i,j]", a=a)
            (got,) = torch.autograd.grad(y, a, torch.ones(3, dtype=dtype))
            middle = [0, 0.5, 0.5, 0] if operator == "max=" else [0.5, 0, 0, 0.5]
            assert got.tolist() == [[0, 0.5, 0, 0.5], middle, [1, 0, 0, 0]]
    rows = torch.tensor([2, 0, 2, 0])
    a = torch.tensor([1.0, 5.0, NAN, 7.0], requires_grad=True)
    y = insum.insum("y[rows[p]] max= a[p]", rows=rows, a=a, out_shape=(3,))
    assert torch.autograd.grad(y[0] + y[2], a)[0].tolist() == [0, 0, 1, 1]


def test_gradients_of_extrema_that_are_nan() -> None:
    """They go to the points that are NaN, and to no other."""
    nan_gradients()


@pytest.mark.interpreter
def test_gradients_of_extrema_that_are_nan_in_kernels() -> None:
    with insum.settings(backend="fused", require_fused=True):
        nan_gradients()


def test_gradients_of_extrema_whose_initial_value_is_nan() -> None:
    start = torch.tensor([NAN, 5.0, NAN, 1.0], requires_grad=True)
    a = torch.tensor([1.0, 2.0, NAN, 1.0], requires_grad=True)
    y = insum.insum("y[i] max= a[i]", y=start * 1, a=a)
    to_start, to_a = torch.autograd.grad(y.sum(), (start, a))
    assert to_start.tolist() == [1, 1, 0.5, 0.5] and to_a.tolist() == [0, 0, 0.5, 0.5]


def test_second_gradients_of_extrema() -> None:
    a = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    f = lambda a: insum.insum("y[i] max= a[i,j] * a[i,j] * a[i,j]", a=a)
    assert torch.autograd.gradcheck(f, (a,)) and torch.autograd.gradgradcheck(f, (a,))


# --- a number as an output ------------------------------------------------------------------------


@pytest.mark.parametrize("operator", ["+=", "max=", "min="])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_number_is_no_output_in_traced_code_either(operator: str, backend: str) -> None:
    message = f"t is a number, but {operator} writes into it"
    f = lambda x, t=2.0: insum.insum(f"t[] {operator} x[i]", t=t, x=x)
    with pytest.raises(insum.DtypeError) as eager:
        f(torch.ones(3))
    assert eager.value.fact == message
    torch._dynamo.reset()
    with pytest.raises(Exception, match=message.replace("+", r"\+")):
        torch.compile(f, backend=backend)(torch.ones(3))
    with torch.autocast("cpu"), pytest.raises(insum.DtypeError, match=message.replace("+", r"\+")):
        f(torch.ones(3))
    with pytest.raises(insum.DtypeError, match=message.replace("+", r"\+")):
        vmap(f)(torch.ones(2, 3))
    assert insum.insum("t[] = x[i]", t=2.0, x=torch.ones(3)).item() == 3


def test_targets_of_any_layout() -> None:
    values = tensors()
    expected = insum.insum(PRODUCT, out_shape=(4, 5), **values)
    for C in (
        torch.zeros(5, 4).t(),
        torch.zeros(4, 10)[:, ::2],
        torch.zeros(8, 5)[::2],
        torch.zeros(4, 5, 3)[..., 1],
    ):
        insum.insum(PRODUCT, C=C, **values)
        torch.testing.assert_close(C, expected)
    C = torch.zeros(4, 5, dtype=torch.bfloat16)
    insum.insum(PRODUCT, C=C, **values)
    torch.testing.assert_close(C, expected.bfloat16())


@pytest.mark.parametrize(
    ("error", "make"),
    [
        (insum.AutogradError, lambda: torch.zeros(4, 5, requires_grad=True)),
        (insum.AutogradError, lambda: torch.zeros(8, 5, requires_grad=True)[:4]),
        (insum.BindingError, lambda: torch.zeros(1, 5).expand(4, 5)),
        (insum.BindingError, lambda: torch.zeros(8).unfold(0, 5, 1)),
        (insum.BindingError, lambda: torch.zeros(4, 6)),
        (insum.DtypeError, lambda: torch.zeros(4, 5, dtype=torch.int64)),
        (insum.IndexRangeError, lambda: torch.zeros(2, 5)),
    ],
)
@pytest.mark.parametrize("operator", ["+=", "max="])
def test_failed_calls_leave_the_arguments_as_they_were(
    error: type[Exception], make: Any, operator: str
) -> None:
    C, values = make(), tensors()
    before = {name: v.clone() for name, v in {"C": C, **values}.items()}
    version = C._version
    with pytest.raises(error):
        insum.insum(PRODUCT.replace("+=", operator), C=C, **values)
    assert C._version == version
    for name, value in {"C": C, **values}.items():
        assert torch.equal(value, before[name])


def test_inference_tensors() -> None:
    with torch.inference_mode():
        C = torch.zeros(4, 5)
        assert insum.insum(PRODUCT, C=C, **tensors()) is C
    with pytest.raises(insum.AutogradError, match="inference mode"):
        insum.insum(PRODUCT, C=C, **tensors())


def test_a_leaf_may_be_written_without_grad_mode() -> None:
    C = torch.zeros(4, 5, requires_grad=True)
    with torch.no_grad():
        assert insum.insum(PRODUCT, C=C, **tensors()) is C
    assert C.ne(0).any()


# --- checks of index values -----------------------------------------------------------------------


def test_unreferenced_values_are_no_error() -> None:
    x, D = torch.arange(4.0), torch.tensor([1, 99, 3])
    assert insum.insum("y[i] = x[D[2*i]]", x=x, D=D, sizes={"i": 2}).tolist() == [1.0, 3.0]
    with pytest.raises(insum.IndexRangeError, match=r"D\[1\] is 99"):
        insum.insum("y[i] = x[D[i]]", x=x, D=D)


def test_checked_at_every_call_on_the_cpu() -> None:
    x, D = torch.arange(4.0), torch.tensor([1, 2])
    call = insum.compile("y[i] = x[D[i]]")
    call(x=x, D=D)
    D.numpy()[1] = 7  # no version counter sees this
    with pytest.raises(insum.IndexRangeError):
        call(x=x, D=D)


def test_check_never() -> None:
    with insum.settings(check="never"), pytest.raises((IndexError, RuntimeError)) as caught:
        insum.insum("y[i] = x[D[i]]", x=torch.ones(2), D=torch.tensor([5]))
    assert not isinstance(caught.value, insum.InsumError)


@pytest.mark.parametrize("length", [3, 200])
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.uint16])
def test_checks_of_many_and_of_few_values(length: int, dtype: torch.dtype) -> None:
    D = torch.zeros(length, dtype=dtype)
    insum.insum("y[i] = x[D[i]]", x=torch.ones(2), D=D)
    D[length - 1] = 2
    with pytest.raises(insum.IndexRangeError, match=rf"D\[{length - 1}\] is 2"):
        insum.insum("y[i] = x[D[i]]", x=torch.ones(2), D=D)


def test_inside_before_outside() -> None:
    with pytest.raises(
        insum.IndexRangeError, match=r"E\[0\] is 9, but it indexes dimension 0 of D"
    ):
        insum.insum(
            "y[i] = x[D[E[i]]]", x=torch.ones(2), D=torch.tensor([0, 1]), E=torch.tensor([9])
        )
    with pytest.raises(insum.IndexRangeError, match=r"D\[1\] is 5"):
        insum.insum(
            "y[i] = x[D[E[i]]]", x=torch.ones(2), D=torch.tensor([0, 5]), E=torch.tensor([1])
        )


def test_padding_goes_no_lower_than_minus_one() -> None:
    with pytest.raises(insum.IndexRangeError, match="is -2"):
        insum.insum("y[i] = x[D[i]]", x=torch.ones(2), D=torch.tensor([0, -2]), padded="D")


def test_gradients_that_are_to_be_negated(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the last backward pass ran read a gradient as it lies in memory."""
    told: list[tuple[bool, bool]] = []
    original = running.run

    def run(call: BoundCall, mode: str, values: Any, *rest: Any) -> Tensor:
        tensors = [v for v in values.values() if isinstance(v, Tensor)]
        told.append((call.prepared.negated, any(map(Tensor.is_neg, tensors))))
        return original(call, mode, values, *rest)

    x, d = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 2, 2, 1])
    result = insum.insum("y[d[e],f] = x[e,f]", d=d, x=x, out_shape=(3, 3))
    given = torch.randn(3, 3)
    monkeypatch.setattr(running, "run", run)
    for _ in range(2):
        for upstream in (given, torch._neg_view(given)):
            (found,) = torch.autograd.grad(result, x, upstream, retain_graph=True)
            assert torch.equal(found, upstream[d])
    assert told == [(False, False), (True, True)] * 2


def test_results_can_be_written_to() -> None:
    """Those, too, that were computed as a view of something else."""
    shapes = {"A": (4, 5), "B": (6, 4), "C": (4,)}
    given = {n: torch.randn(s, dtype=torch.float64, requires_grad=True) for n, s in shapes.items()}
    text = "y[] = A[b,c] * B[a,b] * C[b]"
    (want,) = torch.autograd.grad(insum.insum(text, **given), given["A"])
    found = insum.insum(text, **given)
    found.mul_(2)
    torch.testing.assert_close(torch.autograd.grad(found, given["A"])[0], 2 * want)
