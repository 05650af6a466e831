"""Floats of 8 bits: read as factors, exact in what they meet, never computed in."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import insum
from insum.formats import COO, BlockGroupCOO, GroupCOO, SparseFormat
from insum.nn import (
    BlockSparseLinear,
    ElementwiseTensorProduct,
    GCNConv,
    GlobalPool,
    SemiStructuredLinear,
    SparseLinear,
    SparseTensor,
    block_mask,
    magnitude_mask,
    semi_structured_mask,
)
from insum.plan import draft
from insum.runtime import inspection
from test_compile_only import bound, compile_one, launches, spilled

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCKS = "C[AM[p],m,n] = AV[p,m,k] * B[AK[p],k,n]"
both = pytest.mark.parametrize("narrow", [E4, E5], ids=str)


def blocks(
    narrow: torch.dtype, other: torch.dtype, size: int = 16, count: int = 24
) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 5, (count,), generator=draw).sort().values
    return {
        "AM": rows,
        "AV": torch.randn(count, size, size, generator=draw).to(narrow),
        "AK": torch.randint(0, 6, (count,), generator=draw),
        "B": torch.randn(6, size, 32, generator=draw).to(other),
    }


def exact(given: dict[str, Any]) -> Tensor:
    each = given["AV"].double() @ given["B"].double()[given["AK"]]
    return each.new_zeros(5, *each.shape[1:]).index_add(0, given["AM"], each)


@both
@pytest.mark.parametrize("other", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_they_are_what_they_meet(narrow: torch.dtype, other: torch.dtype) -> None:
    given = blocks(narrow, other)
    want = exact(given)
    # nothing but the rounding of the last step and of a sum, whose order is the library's on a CPU
    allowed = 8 * torch.finfo(other).eps * float(want.abs().max())
    for _ in range(3):  # a CPU sums in other orders once it has seen the indices, and a pattern
        got = insum.insum(BLOCKS, sizes={"AM[p]": 5}, **given)
        assert got.dtype == other and float((got.double() - want).abs().max()) <= allowed
    wide = {**given, "AV": given["AV"].to(other)}
    assert torch.allclose(got, insum.insum(BLOCKS, sizes={"AM[p]": 5}, **wide), 0.0, allowed)


@both
def test_what_statements_of_them_give(narrow: torch.dtype) -> None:
    a, b = torch.randn(4, 6).to(narrow), torch.randn(6, 5).to(E5)
    wide = a.float()
    product = insum.insum("C[i,j] = A[i,k] * B[k,j]", A=a, B=b)
    assert product.dtype == torch.float32
    assert_close(product, wide @ b.float())
    assert_close(insum.insum("c[i] = exp(A[i,k])", A=a), wide.exp().sum(1))
    assert_close(insum.insum("c[i] max= A[i,k]", A=a), wide.amax(1))
    assert_close(insum.insum("c[i] mean= A[i,k]", A=a), wide.mean(1))
    assert_close(
        insum.insum("c[i] = 2 * n[k] * A[i,k]", A=a, n=torch.arange(6)),
        (2 * wide) @ torch.arange(6.0),
    )
    chain = insum.insum("C[i,n] = A[i,k] * B[k,j] * D[j,n]", A=a, B=b, D=torch.ones(5, 2).half())
    assert chain.dtype == torch.float16  # in whatever order they meet
    with torch.autocast("cpu", torch.bfloat16):
        assert (
            insum.insum("C[i,n] = A[i,k] * B[k,n]", A=a, B=torch.ones(6, 3)).dtype == torch.bfloat16
        )


@both
def test_they_are_compared_exactly(narrow: torch.dtype) -> None:
    """Nothing that they are compared with is rounded to 8 bits, nor what is made of them."""
    a, b = torch.tensor([1.0, 1.0, 2.0]).to(narrow), torch.tensor([1.0, 2.0, 1.0]).to(E5)
    near = torch.tensor([1.0, 1.001, 2.0])
    for function in ("eq", "ne", "lt", "le", "maximum", "minimum"):
        for one in (near, near.double(), near.half(), b):
            got = insum.insum(f"c[i] = {function}(A[i], x[i])", A=a, x=one)
            want = getattr(torch, function)(a.double(), one.double())
            assert torch.equal(got.double(), want.double()), (function, one.dtype)
    made = insum.insum("c[i] = eq(A[i] * 1.0625, x[i])", A=a, x=torch.full((3,), 1.0625))
    assert made.tolist() == [1, 1, 0]
    wide = insum.insum("c[i] = exp(A[i]) * x[i]", A=a, x=near.double())
    assert torch.equal(wide, a.double().exp() * near.double())  # as exact as what they meet


def test_gradients_of_what_they_meet() -> None:
    a, x = torch.randn(4, 6).to(E4), torch.randn(6, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        return insum.insum("y[i] = A[i,k] * x[k] * x[k]", A=a, x=x)

    assert torch.autograd.gradcheck(run, (x,)) and torch.autograd.gradgradcheck(run, (x,))
    leaf = a.clone().requires_grad_()
    insum.insum("y[i] = A[i,k] * x[k]", A=leaf, x=x.detach()).sum().backward()
    assert leaf.grad is not None and torch.equal(leaf.grad, x.detach().expand(4, 6).to(E4))


def test_nothing_is_stored_in_them() -> None:
    a, y = torch.ones(3, 4).to(E4), torch.zeros(3).to(E4)
    with pytest.raises(
        insum.errors.DtypeError, match="y holds float8_e4m3fn, which insum does not compute"
    ):
        insum.insum("y[i] += A[i,k]", A=a, y=y)
    with pytest.raises(insum.errors.DtypeError, match="indexes A but holds float8_e4m3fn"):
        insum.insum("c[i] = A[y[i],0]", A=a, y=y)


@pytest.mark.parametrize("kind", [COO, GroupCOO, BlockGroupCOO])
def test_formats(kind: type[SparseFormat]) -> None:
    dense = torch.randn(16, 24) * (torch.rand(16, 24) < 0.3)
    options = {"block_shape": (8, 8)} if kind is BlockGroupCOO else {}
    matrix, x = kind.from_dense(dense, **options).to(E4), torch.randn(24, 3)
    assert matrix.dtype == E4 and matrix.to_dense().dtype == E4
    assert_close(matrix.to_dense().float(), dense.to(E4).float())
    assert_close(matrix @ x, dense.to(E4).float() @ x)
    assert (matrix @ x.bfloat16()).dtype == torch.bfloat16
    for wrong in (
        lambda: matrix * 2,
        lambda: -matrix,
        lambda: matrix + matrix,
        lambda: abs(matrix),
    ):
        with pytest.raises(insum.errors.DtypeError, match=r"try: A\.to\(torch.bfloat16\)"):
            wrong()
    with pytest.raises(insum.errors.UnsupportedError, match="SciPy has no sparse arrays of"):
        matrix.to_scipy()
    row, column = map(int, dense.nonzero()[0])
    assert matrix[row, column] == dense.to(E4)[row, column]


@both
def test_entries_of_torch_that_are_there_twice(narrow: torch.dtype) -> None:
    at, values = torch.tensor([[0, 0, 2]]), torch.tensor([1.0, 2.0, 3.0]).to(narrow)
    twice = torch.sparse_coo_tensor(at, values, (3,), check_invariants=True)
    assert COO.from_torch(twice).to_dense().float().tolist() == [3, 0, 3]


@both
def test_linear_layers(narrow: torch.dtype) -> None:
    """Converted, made of such weights, and fed with them."""
    dense, x = torch.nn.Linear(16, 8), torch.randn(3, 16)
    eight = torch.nn.Linear(16, 8).to(narrow)
    eight.load_state_dict(dense.state_dict())
    for one in (
        SparseLinear.from_dense(eight, density=0.5),
        BlockSparseLinear.from_dense(eight, block_shape=(4, 4), density=0.5),
        SemiStructuredLinear.from_dense(eight),
        SemiStructuredLinear.from_dense(dense).to(narrow),
    ):
        assert {p.dtype for p in one.parameters()} == {narrow}
        flat = one.to_dense().float()
        for given in (x, x.double(), x.to(E5)):
            got = one(given)
            wide = torch.float64 if given.dtype == torch.float64 else torch.float32
            assert got.dtype == wide
            assert_close(got.float(), flat(given.float()))
    wide_layer = SemiStructuredLinear.from_dense(dense)
    assert_close(wide_layer(x.to(narrow)), wide_layer(x.to(narrow).float()))


def test_masks_of_weights_of_8_bits() -> None:
    weight = torch.randn(8, 8).to(E4)
    wide = weight.float()
    assert magnitude_mask(weight, 0.5).sum() == 32
    assert torch.equal(block_mask(weight, 4, 0.5), block_mask(wide, 4, 0.5))
    assert torch.equal(semi_structured_mask(weight), semi_structured_mask(wide))


@both
def test_single_weights_that_are_left_out(narrow: torch.dtype) -> None:
    weight, mask = torch.randn(8, 8).to(narrow), torch.rand(8, 8) < 0.5
    mask[0, 0] = True
    layer = BlockSparseLinear.from_dense(weight, mask, block_shape=4)
    assert torch.equal(layer.weight().to_dense().float(), weight.float() * mask)


def test_layers_that_compute_nothing_in_them_say_so() -> None:
    edges, x = torch.tensor([[0, 1], [1, 2]]), torch.randn(3, 4)
    for layer, given in ((GCNConv(4, 2).to(E4), x.to(E4)), (GCNConv(4, 2), x.to(E4))):
        with pytest.raises(insum.errors.DtypeError, match="in which GCNConv computes nothing"):
            layer(given, edges)
    voxels = SparseTensor(torch.tensor([[0, 0, 0], [0, 1, 1]]), torch.ones(2, 4).to(E4))
    with pytest.raises(insum.errors.DtypeError, match=r"try: x\.to\(torch\.bfloat16\)"):
        voxels + voxels
    assert GlobalPool()(voxels).dtype == torch.float32


def test_layers_of_what_nothing_is_computed_in() -> None:
    layer = torch.nn.Linear(32, 32).to(torch.float8_e5m2fnuz)
    with pytest.raises(insum.DtypeError, match="layer is a Linear") as told:
        BlockSparseLinear.from_dense(layer, density=0.5)
    assert "weights that insum computes with, or an nn.Linear that holds one" in str(told.value)


@both
def test_products_with_scalars(narrow: torch.dtype) -> None:
    """No statement is run for them; they are computed in what one would be."""
    product = ElementwiseTensorProduct("4x0e", "4x0e")
    x, y = torch.rand(3, 4).to(narrow), torch.rand(3, 4).to(narrow)
    for first, second in ((x, y), (x, y.float()), (x.double(), y)):
        got = product(first, second)
        want = product(first.double(), second.double())
        assert got.dtype == (torch.float64 if first.dtype == torch.float64 else torch.float32)
        assert_close(got.double(), want)
    with pytest.raises(insum.DtypeError, match="x is a float8_e5m2fnuz tensor"):
        product(x.float().to(torch.float8_e5m2fnuz), y)


def test_a_layer_with_weights_of_8_bits() -> None:
    dense = torch.nn.Linear(48, 32)
    layer = BlockSparseLinear.from_dense(dense, block_shape=(8, 8), density=0.5)
    x = torch.randn(3, 48)
    near, narrow = layer(x), layer.to(E4)
    assert (narrow(x) - near).abs().max() < 0.1 * near.abs().max()
    assert narrow(x.bfloat16()).dtype == torch.bfloat16
    file = io.BytesIO()
    torch.save(narrow.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert any(value.dtype == E4 for value in state.values())


@pytest.mark.interpreter
@both
@pytest.mark.parametrize("other", [torch.float16, None], ids=str)
def test_kernels_read_them(narrow: torch.dtype, other: torch.dtype | None) -> None:
    """Also where rows end inside of tiles."""
    for size in (16, 20):
        given = blocks(narrow, other or narrow, size)
        with insum.settings(backend="fused"):
            got = insum.insum(BLOCKS, sizes={"AM[p]": 5}, **given)
        want = exact(given)
        assert (got.double() - want).abs().max() < 1e-3 * want.abs().max()


@pytest.mark.interpreter
def test_kernels_read_them_as_doubles() -> None:
    a, x = torch.randn(3, 4).to(E4), torch.randn(4).double()
    with insum.settings(backend="fused"):
        got = insum.insum("y[i] = A[i,k] * lt(A[i,k], x[k])", A=a, x=x)
    assert_close(got, (a.double() * (a.double() < x)).sum(1), check_dtype=False)


@pytest.mark.parametrize(
    ("target", "narrow", "instruction"),
    [("sm_80", E5, "mma.sync"), ("sm_90", E4, "wgmma"), ("gfx942", E4, "mfma")],
)
def test_products_with_them_are_matrix_instructions(
    target: str, narrow: torch.dtype, instruction: str
) -> None:
    given = blocks(narrow, torch.bfloat16, 32, 400)
    given["B"] = torch.empty(6, 32, 128, dtype=torch.bfloat16)
    given["C"] = torch.empty(5, 32, 128, dtype=torch.bfloat16)
    look = inspection.elsewhere(bound(BLOCKS, given), given, architecture=target)
    (found,) = (compile_one(one, target) for one in launches(look)[-1:])
    assert found.uses(instruction) and not spilled(found)


@pytest.mark.parametrize(
    ("narrow", "other", "instruction"),
    [(E4, torch.float64, "e4m3x2"), (E5, torch.float64, "e5m2x2"), (E5, torch.bfloat16, "e5m2x2")],
)
def test_they_are_converted_by_the_gpu(
    narrow: torch.dtype, other: torch.dtype, instruction: str
) -> None:
    """Triton converts none to float64, and infinities of E5M2 to 65536 in bfloat16."""
    given = {**blocks(narrow, other, 32, 400), "C": torch.empty(5, 32, 32, dtype=other)}
    look = inspection.elsewhere(bound(BLOCKS, given), given, architecture="sm_90")
    (found,) = (compile_one(one, "sm_90") for one in launches(look)[-1:])
    assert found.uses(f"cvt.rn.f16x2.{instruction}")


def test_gpus_that_do_not_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "reads_e4m3", lambda device: False)
    given = blocks(E4, torch.float16)
    found = inspection.elsewhere(
        bound(BLOCKS, {**given, "C": torch.empty(5, 16, 32).half()}), given
    )
    assert "GPUs before Ada do not read" in found.program(anywhere=True).reason
