"""The four applications under torch.compile: whole graphs, sizes that change, activation
checkpointing, generated code, and how often they are compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import applications
import insum
import insum.compat.compiler
from applications import Application
from insum.formats import COO, BlockGroupCOO, GroupCOO
from insum.testing import count_compiles

KIND: dict[str, Any] = {"dtype": torch.float32}
#: One of each, at a size that can be chosen; what the statement takes as a constant stays the same.
FOUR: dict[str, Callable[[int], Application]] = {
    "block SpMM": lambda n: applications.block_spmm(
        rows=4, columns=n, block=4, n=6, density=0.6, group=2, **KIND
    ),
    "SpMM": lambda n: applications.spmm(rows=9, columns=n, n=6, entries=5 * n, group=2, **KIND),
    "convolution": lambda n: applications.convolution(
        voxels=3 * n, offsets=3, inputs=5, outputs=6, layout="by voxel", **KIND
    ),
    "tensor product": lambda n: applications.tensor_product(
        batch=n, channels=5, constant=False, **KIND
    ),
}
SIZES = (7, 10, 13)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()


def call(application: Application) -> Callable[..., Tensor]:
    statement, sizes, padded = application.statement, dict(application.sizes), application.padded
    return lambda **values: insum.insum(statement, sizes=sizes, padded=padded, **values).tanh()


def leaves(application: Application) -> dict[str, Tensor]:
    return {
        name: v.clone().requires_grad_() if name in application.wanted else v
        for name, v in application.values.items()
    }


def differentiated(
    function: Callable[..., Tensor], application: Application
) -> tuple[Tensor | None, ...]:
    values = leaves(application)
    out = function(**values)
    out.sin().sum().backward()  # with .grad() reentrant checkpointing would not do
    return (out.detach(), *(values[name].grad for name in application.wanted))


@pytest.mark.parametrize("name", FOUR)
def test_one_graph_for_every_number_of_nonzeros(name: str) -> None:
    function = call(FOUR[name](SIZES[0]))
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    with count_compiles() as count:
        for n in SIZES:
            application = FOUR[name](n)
            for got, want in zip(
                differentiated(compiled, application), differentiated(function, application)
            ):
                assert_close(got, want)
    assert count.graphs == 1


@pytest.mark.parametrize("name", ["block SpMM", "convolution"])
def test_a_size_that_is_marked_or_seen_to_change(name: str) -> None:
    """Without ``dynamic=True``: the first size exactly, then any."""
    function = call(FOUR[name](SIZES[0]))
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with count_compiles() as count:
        for n in SIZES:
            application = FOUR[name](n)
            assert_close(compiled(**application.values), function(**application.values))
    assert count.graphs == 2


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", FOUR)
def test_activation_checkpointing(name: str, reentrant: bool) -> None:
    application = FOUR[name](SIZES[0])
    function = call(application)

    def kept(**values: Tensor) -> Tensor:
        result: Tensor = checkpoint(  # type: ignore[no-untyped-call]
            lambda *given: function(**dict(zip(values, given))),
            *values.values(),
            use_reentrant=reentrant,
        )
        return result

    expected = differentiated(function, application)
    for got, want in zip(differentiated(kept, application), expected):
        assert_close(got, want)
    if not reentrant:  # which torch.compile does not take
        for got, want in zip(
            differentiated(torch.compile(kept, fullgraph=True, backend="aot_eager"), application),
            expected,
        ):
            assert_close(got, want)


def test_generated_code_of_all_four() -> None:
    """Through TorchInductor, in one graph; on the CPU ``reduce-overhead`` is the same without CUDA
    graphs.
    """
    four = {name: make(SIZES[0]) for name, make in FOUR.items()}
    functions = {name: call(application) for name, application in four.items()}

    def together(given: dict[str, dict[str, Tensor]]) -> list[Tensor]:
        return [functions[name](**values) for name, values in given.items()]

    compiled = torch.compile(together, fullgraph=True, dynamic=True, mode="reduce-overhead")
    with count_compiles() as count:
        for n in SIZES:
            given = {name: dict(make(n).values) for name, make in FOUR.items()}
            for got, want in zip(compiled(given), together(given)):
                assert_close(got, want)
    assert count.graphs == 1


@pytest.mark.parametrize("kind", [COO, GroupCOO, BlockGroupCOO])
def test_formats_are_arguments(kind: type) -> None:
    """A format is a pytree of dense tensors: it goes through, and another number of nonzeros
    compiles nothing new.
    """
    options = (
        {"group_size": 2}
        if kind is GroupCOO
        else {"group_size": 2, "block_shape": (2, 4)}
        if kind is BlockGroupCOO
        else {}
    )
    compiled = torch.compile(
        lambda A, B: A.matmul(B), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    with count_compiles() as count:
        for n in (12, 14, 18):
            torch.manual_seed(n)
            dense = torch.randn(n, 8) * (torch.rand(n, 8) < 0.4)
            A = COO.from_dense(dense).to_format(kind, **options)
            B = torch.randn(8, 5)
            assert_close(compiled(A, B), dense @ B)
    assert count.graphs == 1


@pytest.mark.parametrize("name", FOUR)
def test_traced_by_make_fx_with_symbols(name: str) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    function = call(FOUR[name](SIZES[0]))
    module = make_fx(lambda values: function(**values), tracing_mode="symbolic")(
        dict(FOUR[name](SIZES[0]).values)
    )
    other = dict(FOUR[name](SIZES[1]).values)
    assert_close(module(other), function(**other))


# --- what torch.compile does not take, as docs/torch-compile.md says ------------------------------


def test_the_operator_breaks_a_graph_and_the_method_does_not() -> None:
    A, B = COO.from_dense(torch.eye(3)), torch.randn(3, 2)
    assert_close(torch.compile(lambda A, B: A @ B, backend="eager")(A, B), B)  # in two graphs
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(lambda A, B: A @ B, fullgraph=True, backend="eager")(A, B)


def test_transforms_of_torch_func_are_compiled_from_outside() -> None:
    f = lambda x: insum.insum("t[] = exp(x[i]) * x[i]", x=x)
    x = torch.randn(3)
    with pytest.raises(Exception, match="setup_context"):
        torch.compile(torch.func.grad(f), fullgraph=True, backend="aot_eager")(x)

    gradient = lambda x: torch.autograd.grad(f(x), x)[0]
    with insum.compat.compiler.traced_gradients():
        assert_close(
            torch.compile(gradient, fullgraph=True, backend="aot_eager")(
                x.clone().requires_grad_()
            ),
            torch.func.grad(f)(x),
        )
