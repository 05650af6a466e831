"""``settings.backend = "inductor"``: what it computes, what it compiles and how often, what it
leaves alone, and what happens when it fails.

Real compilations take seconds, so most tests send the graphs through ``aot_eager``, which traces
and differentiates but generates no code.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import insum
from insum import bounded
from insum.compat import compiler
from insum.graph import inductor
from insum.graph.matmul import flattened
from insum.testing import count_compiles, draw_cases

BLOCKS = "C[AM[p],m,n] = AV[p,q,m,k] * B[AK[p,q],k,n]"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    monkeypatch.setattr(inductor, "_compiled", {})
    bounded.say_again()
    # equal settings are one object: calls that were prepared are not prepared anew
    with insum.settings(backend="inductor", check="async"):
        yield
    torch.compiler.reset()


@pytest.fixture
def unprepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what earlier tests have left behind."""
    monkeypatch.setattr("insum.call.prepared._forms", {})
    monkeypatch.setattr("insum.call.lookup._fronts", {})


class Recorded:
    """Stands for `torch.compile`: keeps its options and traces only."""

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []
        self.compile = torch.compile

    def __call__(
        self, function: Callable[..., Any], *, fullgraph: bool, options: dict[str, Any]
    ) -> Callable[..., Any]:
        self.options.append(options)
        return self.compile(function, fullgraph=fullgraph, backend="aot_eager")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch, unprepared: None) -> Recorded:
    recorded = Recorded()
    monkeypatch.setattr(inductor.torch, "compile", recorded)
    return recorded


def blocks(
    groups: int, rows: int, *, dtype: torch.dtype = torch.float32, gradient: bool = False
) -> dict[str, Tensor]:
    return {
        "AM": torch.randint(rows, (groups,)),
        "AK": torch.randint(-1, 3, (groups, 2)),
        "AV": torch.randn(groups, 2, 4, 4, dtype=dtype, requires_grad=gradient),
        "B": torch.randn(3, 4, 8, dtype=dtype, requires_grad=gradient),
    }


def product(rows: int, values: dict[str, Tensor]) -> Tensor:
    return insum.insum(BLOCKS, sizes={"AM[p]": rows}, padded=("AK",), **values)


def reference(rows: int, values: dict[str, Tensor]) -> Tensor:
    with insum.settings(backend="graph"):
        return product(rows, values)


# --- through to generated code --------------------------------------------------------------------


def state() -> tuple[Any, ...]:
    """Everything in the user's configuration that compiling could change."""
    import torch._dynamo.config
    import torch._inductor.config
    import torch.fx.experimental._config

    configs = torch._inductor.config, torch._dynamo.config, torch.fx.experimental._config
    return tuple(
        {
            k: v
            for k, v in c.get_config_copy().items()
            if isinstance(v, bool | int | float | str | None)
        }
        for c in configs
    )


def test_generated_code(unprepared: None) -> None:
    """Values and gradients, sizes that change without compiling anew, and a configuration that is
    as it was.
    """
    before = state()
    with count_compiles() as count:
        for groups, rows in ((3, 3), (5, 6)):
            values = blocks(groups, rows, gradient=True)
            result, expected = product(rows, values), reference(rows, values)
            assert_close(result, expected)
            for a, b in zip(
                torch.autograd.grad(result.sin().sum(), values["AV"]),
                torch.autograd.grad(expected.sin().sum(), values["AV"]),
            ):
                assert_close(a, b)
    # forward and two gradients, each for its first sizes and once more for any
    assert 2 <= count.graphs <= 6
    with count_compiles() as more:
        for groups, rows in ((7, 6), (8, 9), (9, 4)):
            values = blocks(groups, rows, gradient=True)
            result = product(rows, values)
            assert_close(result, reference(rows, values))
            torch.autograd.grad(result.sin().sum(), values["AV"])
    assert more.graphs == 0
    assert state() == before


def test_a_missing_compiler_is_told_once_and_the_graph_runs(unprepared: None) -> None:
    import torch._inductor.config as config

    with (
        config.patch({"cpp.cxx": (None, "no-such-compiler"), "force_disable_caches": True}),
        warnings.catch_warnings(record=True) as seen,
    ):
        warnings.simplefilter("always")
        for n in (3, 4):
            x = torch.randn(n)
            assert_close(insum.insum("y[i] = exp(x[i]) * x[i]", x=x), x.exp() * x)
            assert_close(insum.insum("z[i] = tanh(x[i])", x=x), x.tanh())
        assert len([w for w in seen if "TorchInductor did not compile" in str(w.message)]) == 1
        with (
            insum.settings(require_fused=True),
            pytest.raises(
                insum.NotFusedError, match="TorchInductor did not compile this statement"
            ),
        ):
            insum.insum("y[i] = exp(x[i]) * x[i]", x=torch.ones(5))


# --- what is asked of torch.compile ---------------------------------------------------------------


@pytest.mark.parametrize("native", [True, False])
def test_the_variants_of_the_ablation(traced: Recorded, native: bool) -> None:
    values = blocks(4, 5)
    with insum.settings(native_matmul=native):
        assert_close(product(5, values), reference(5, values))
    (options,) = traced.options
    assert options["triton.native_matmul"] is native
    assert options["assert_indirect_indexing"] is False and options["triton.cudagraphs"] is False


def test_both_variants_are_kept(traced: Recorded) -> None:
    values = blocks(4, 5)
    for native in (True, False, True, False):
        with insum.settings(native_matmul=native):
            product(5, values)
    assert [o["triton.native_matmul"] for o in traced.options] == [True, False]


def test_options_that_torch_does_not_know_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiler.inductor_options(True)["triton.native_matmul"]
    monkeypatch.setattr(compiler, "_inductor_has", lambda: frozenset({"triton.cudagraphs"}))
    assert compiler.inductor_options(True) == {"triton.cudagraphs": False}
    monkeypatch.setattr(compiler, "_inductor_has", frozenset)
    assert compiler.inductor_options(True) == {}


def test_private_names_of_torch_are_there() -> None:
    import torch.fx.experimental._config as config

    with compiler.free_sizes():
        assert config.use_duck_shape is False
    assert config.use_duck_shape is True
    assert len(compiler.compile_errors()) >= 2


def test_without_private_names_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.fx.experimental._config", None)
    with compiler.free_sizes():
        pass
    monkeypatch.setitem(sys.modules, "torch._dynamo.exc", None)
    monkeypatch.delattr(torch._dynamo, "exc")
    assert compiler.compile_errors.__wrapped__() == (RuntimeError,)


# --- what it computes -----------------------------------------------------------------------------


def test_drawn_statements(traced: Recorded) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing falls back
        for case in draw_cases(12, seed=11, dtypes=(torch.float32, torch.float64)):
            case.check()


def test_second_derivatives(traced: Recorded) -> None:
    values = blocks(3, 2, dtype=torch.float64, gradient=True)
    f = lambda AV, B: product(2, {**values, "AV": AV, "B": B})
    small = (
        values["AV"][:, :, :2, :2].detach().requires_grad_(),
        values["B"][:, :2, :2].detach().requires_grad_(),
    )
    assert torch.autograd.gradcheck(f, small)
    assert torch.autograd.gradgradcheck(f, small)


@pytest.mark.parametrize("operator", ["+=", "max="])
def test_in_place(traced: Recorded, operator: str) -> None:
    C = torch.randn(5, 4, 8)
    values = blocks(4, 5)
    statement = BLOCKS.replace("=", operator, 1)
    with insum.settings(backend="graph"):
        expected = insum.insum(statement, C=C.clone(), padded=("AK",), **values)
    assert insum.insum(statement, C=C, padded=("AK",), **values) is C
    assert_close(C, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_in_place_without_dimensions(traced: Recorded, dtype: torch.dtype) -> None:
    t = torch.tensor(1.0, dtype=dtype)
    assert insum.insum("t[] += x[i] * x[i]", t=t, x=torch.ones(3, dtype=dtype)) is t
    assert t.item() == 4.0


def test_conjugates_numbers_and_index_tensors_without_dimensions(traced: Recorded) -> None:
    x = torch.randn(3, 4, dtype=torch.complex64)
    assert_close(insum.insum("y[i] = x[i,j] * s", x=x.conj(), s=2.0), 2 * x.conj().sum(1))
    assert_close(
        insum.insum("y[i] = x[E[],i] * z[E[],j]", x=x, z=x, E=torch.tensor(2)), x[2] * x[2].sum()
    )


def test_the_device_must_be_known_to_inductor(traced: Recorded) -> None:
    assert insum.insum(
        "y[i] = A[i,j] * x[j]", A=torch.empty(2, 3, device="meta"), x=torch.empty(3, device="meta")
    ).shape == (2,)
    assert not traced.options


def test_inside_a_compiled_function(traced: Recorded) -> None:
    values = blocks(4, 5, gradient=True)
    expected = reference(5, values).sin()
    result = traced.compile(lambda **v: product(5, v).sin(), fullgraph=True, backend="aot_eager")(
        **values
    )
    assert_close(result, expected)
    assert traced.options  # the op, which a compiled function calls, compiles its own graph
    for a, b in zip(
        torch.autograd.grad(result.sum(), (values["AV"], values["B"])),
        torch.autograd.grad(expected.sum(), (values["AV"], values["B"])),
    ):
        assert_close(a, b)


# --- failing --------------------------------------------------------------------------------------


def test_failure(monkeypatch: pytest.MonkeyPatch, unprepared: None) -> None:
    calls = []

    def refuse(*_: Any) -> Tensor:
        calls.append(1)
        raise torch._dynamo.exc.TorchDynamoException("no luck\nand more")

    monkeypatch.setattr(inductor.torch, "compile", lambda *_, **__: refuse)
    values = blocks(4, 5)
    with pytest.warns(
        UserWarning,
        match=r"TorchInductor did not compile .* which runs as a graph: TorchDynamoException: "
        r"no luck$",
    ):
        assert_close(product(5, values), reference(5, values))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        product(5, values)
    assert len(calls) == 1  # what cannot be compiled is not tried again
    with (
        insum.settings(require_fused=True),
        pytest.raises(
            insum.NotFusedError,
            match="did not compile this statement: TorchDynamoException: no luck",
        ),
    ):
        product(5, values)


def test_too_many_kinds_of_arguments(traced: Recorded) -> None:
    """What exceeds torch's limit runs as a graph; what was compiled before still runs compiled."""
    first, second = blocks(4, 5), blocks(6, 5)
    with torch._dynamo.config.patch(recompile_limit=1):
        product(5, first)
        with pytest.warns(UserWarning, match="RecompileLimit"):
            assert_close(product(5, second), reference(5, second))
        with warnings.catch_warnings(), count_compiles() as count:
            warnings.simplefilter("error")
            assert_close(product(5, first), reference(5, first))
    assert count.graphs == 0


# --- contractions as matrix products --------------------------------------------------------------

EQUATIONS = [
    "pqmk,pqkn->pmn",
    "ij,jk->ik",
    "pq,pqn->pn",
    "ab,cd->abcd",
    "ij,ij->",
    "pkqm,nqkp->nmp",
    "ab,bc,cd->ad",
    "ab,abc,bd->cd",
    "ijk,k->i",
    "ab,ab,ab->ba",
]


@pytest.mark.parametrize("equation", EQUATIONS)
def test_flattened(equation: str) -> None:
    graph = torch.fx.Graph()
    operands = equation.split("->")[0].split(",")
    nodes = [graph.placeholder(f"x{k}") for k in range(len(operands))]
    graph.output(graph.call_function(torch.einsum, (equation, *nodes)))
    module = flattened(torch.fx.GraphModule(torch.nn.Module(), graph))
    sizes = {v: 2 + k for k, v in enumerate(dict.fromkeys("".join(operands)))}
    values = [torch.randn([sizes[v] for v in o], dtype=torch.float64) for o in operands]
    assert_close(module(*values), torch.einsum(equation, *values))
    assert all(n.target is not torch.einsum for n in module.graph.nodes)


def test_operands_keep_their_layout() -> None:
    """The reduced variables of gathered blocks are flattened in the order in which they lie: no
    copy of what was gathered.
    """
    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    graph.output(graph.call_function(torch.einsum, ("pqmk,pqkn->pmn", a, b)))
    module = flattened(torch.fx.GraphModule(torch.nn.Module(), graph))
    right = next(n for n in module.graph.nodes if n.target is torch.bmm).args[1]
    kept = torch.fx.Interpreter(module)
    seen: dict[str, Tensor] = {}
    run_node = kept.run_node
    kept.run_node = functools.partial(lambda node: seen.setdefault(node.name, run_node(node)))  # type: ignore[method-assign]
    gathered = torch.randn(3, 2, 4, 5)
    kept.run(torch.randn(3, 2, 6, 4), gathered)
    assert seen[right.name].data_ptr() == gathered.data_ptr() and seen[right.name].shape == (
        3,
        8,
        5,
    )
