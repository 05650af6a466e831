"""`insum.einsum` against `torch.einsum` on densified operands, in values and gradients, for every
format.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from insum.compat.compiler import compiled_graphs
from insum.errors import BindingError, DeviceError, StatementError, UnsupportedError
from insum.formats import COO, ELL, BlockCOO, BlockGroupCOO, GroupCOO, NeighborTable, SparseFormat
from insum.formats.einsum import einsum
from insum.formats.explained import explain_einsum

warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")


def random(
    *shape: int, density: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.where(torch.rand(shape, generator=generator) < density, x, 0.0).to(dtype)


def forms(x: Tensor) -> list[SparseFormat]:
    """A tensor in every format and grouping that holds it, nothing divisible."""
    rank = x.dim()
    dims = [()] if rank == 1 else [(0,), (rank - 1,), (1, 0) if rank > 2 else (1,)]
    block = (2, 3, 2, 2, 1)[:rank]
    made: list[SparseFormat] = [COO.from_dense(x), BlockCOO.from_dense(x, block_shape=block)]
    for d in dims:
        made += [
            ELL.from_dense(x, group_dims=d),
            GroupCOO.from_dense(x, group_dims=d, group_size=2),
            GroupCOO.from_dense(x, group_dims=d, group_size=3),
        ]
        made += [BlockGroupCOO.from_dense(x, block_shape=block, group_dims=d, group_size=2)]
    return made


CASES = [
    ("mk,kn->mn", [(5, 7), (7, 4)]),
    ("mk,k->m", [(5, 7), (7,)]),
    ("mk,m->k", [(5, 7), (5,)]),
    ("mk,kn,n->m", [(5, 7), (7, 4), (4,)]),
    ("mk,bkn->bmn", [(5, 7), (2, 7, 3)]),
    ("mk->", [(5, 7)]),
    ("mk->m", [(5, 7)]),
    ("mk->k", [(5, 7)]),
    ("mk,m,k->", [(5, 7), (5,), (7,)]),
    ("k,kn->n", [(7,), (7, 3)]),
    ("xyz,yc,zcm->xm", [(5, 4, 3), (4, 2), (3, 2, 3)]),
    ("ijkl,bju,bk,bluw->biw", [(3, 4, 3, 2), (2, 4, 2), (2, 3), (2, 2, 2, 3)]),
    ("mk,kk->m", [(5, 7), (7, 7)]),
    ("mk,nj->mkj", [(3, 4), (2, 5)]),
]


@pytest.mark.parametrize(("text", "shapes"), CASES, ids=[c[0] for c in CASES])
def test_values_and_gradients_for_every_format(text: str, shapes: list[tuple[int, ...]]) -> None:
    x = random(*shapes[0], density=0.4, seed=1)
    others = [random(*s, seed=2 + i) for i, s in enumerate(shapes[1:])]
    for a in forms(x):
        assert a.values is not None
        a = a.with_values(a.values.clone().requires_grad_())
        dense = [
            a.detach().to_dense().requires_grad_(),
            *(t.clone().requires_grad_() for t in others),
        ]
        ours = [t.clone().requires_grad_() for t in others]
        want, got = torch.einsum(text, *dense), einsum(text, a, *ours)
        assert torch.allclose(got, want), a
        weights = random(*want.shape, seed=9)
        (want * weights).sum().backward()
        (got * weights).sum().backward()
        assert a.values is not None and a.values.grad is not None and dense[0].grad is not None
        assert torch.allclose(
            a.with_values(a.values.grad).to_dense(),
            torch.where(a.pattern().to_dense() != 0, dense[0].grad, 0.0),
        ), a
        for mine, theirs in zip(ours, dense[1:]):
            assert (
                mine.grad is not None
                and theirs.grad is not None
                and torch.allclose(mine.grad, theirs.grad)
            ), a


@st.composite
def einsums(draw: Any) -> tuple[str, list[tuple[int, ...]], int]:
    """A random contraction of one sparse and up to three dense operands."""
    letters = "abcdef"
    sizes = {c: draw(st.integers(0 if draw(st.booleans()) else 1, 5)) for c in letters}
    sparse = draw(st.lists(st.sampled_from(letters), min_size=1, max_size=4, unique=True))
    dense = draw(
        st.lists(
            st.lists(st.sampled_from(letters), min_size=0, max_size=3, unique=True), max_size=3
        )
    )
    known = sorted({*sparse, *(c for d in dense for c in d)})
    output = draw(st.lists(st.sampled_from(known), unique=True, max_size=4))
    text = ",".join("".join(labels) for labels in (sparse, *dense)) + "->" + "".join(output)
    return (
        text,
        [tuple(sizes[c] for c in labels) for labels in (sparse, *dense)],
        draw(st.integers(0, 999)),
    )


@settings(max_examples=80, deadline=None)
@given(einsums(), st.data())
def test_random_contractions(
    case: tuple[str, list[tuple[int, ...]], int], data: st.DataObject
) -> None:
    text, shapes, seed = case
    x = random(*shapes[0], density=0.5, seed=seed)
    others = [random(*s, seed=seed + 1 + i) for i, s in enumerate(shapes[1:])]
    a = data.draw(st.sampled_from(forms(x)))
    got = einsum(text, a, *others, dense_output=True)
    want = torch.einsum(text, x, *others)
    assert got.shape == want.shape and torch.allclose(got, want)


def test_notations_and_matmul_agree() -> None:
    x, b = random(5, 7, density=0.4), random(7, 3, seed=1)
    for a in forms(x):
        want = x @ b
        for got in (
            einsum("C[m,n] = A[m,k] * B[k,n]", A=a, B=b),
            einsum("mk,kn->mn", a, b),
            einsum("mk, kn", a, b),
            a @ b,
        ):
            assert torch.allclose(got, want)
        assert torch.allclose(a @ b[:, 0], x @ b[:, 0])
        assert torch.allclose(b.T @ a.T, b.T @ x.T) and torch.allclose(b[:, 0] @ a.T, b[:, 0] @ x.T)


def test_ellipsis() -> None:
    x, b = random(5, 7, density=0.4), random(2, 3, 7, 4, seed=1)
    for a in forms(x)[:3]:
        assert torch.allclose(
            einsum("mk,...kn->...mn", a, b), torch.einsum("mk,...kn->...mn", x, b)
        )
        assert torch.allclose(einsum("mk,...kn", a, b), torch.einsum("mk,...kn", x, b))
    t = random(2, 5, 7, density=0.5)
    assert torch.allclose(
        einsum("...k,kn->...n", COO.from_dense(t), b[0, 0]),
        torch.einsum("...k,kn->...n", t, b[0, 0]),
    )


def test_sparse_output_has_the_pattern_of_its_operand() -> None:
    p, a, b = random(5, 7, density=0.4), random(5, 3, seed=1), random(3, 7, seed=2)
    want = p * (a @ b)
    for x in forms(p):
        s = einsum("S[m,n] = P[m,n] * A[m,k] * B[k,n]", P=x, A=a, B=b)
        assert type(s) is type(x) and torch.allclose(s.to_dense(), want)
        assert all(i is j for i, j in zip(list(s.tensors())[1:], list(x.tensors())[1:]))
        assert torch.allclose(
            einsum("S[m,n] = P[m,n] * A[m,k] * B[k,n]", P=x, A=a, B=b, dense_output=True), want
        )
        turned = einsum("S[n,m] = P[m,n] * A[m,k] * B[k,n]", P=x, A=a, B=b)
        assert type(turned) is type(x) and torch.allclose(turned.to_dense(), want.T)
        assert torch.allclose(einsum("mn,m->mn", x, a[:, 0]).to_dense(), p * a[:, :1])
        doubled = einsum("S[m,n] = P[m,n] * A[m,k] * B[k,n] + 2 * P[m,n]", P=x, A=a, B=b)
        assert type(doubled) is type(x) and torch.allclose(doubled.to_dense(), want + 2 * p)


def test_sddmm_on_a_pattern() -> None:
    mask, a, b = random(5, 7, density=0.4) != 0, random(5, 3, seed=1), random(3, 7, seed=2)
    for x in forms(mask.double()):
        s = einsum("S[m,n] = P[m,n] * A[m,k] * B[k,n]", P=x.pattern(), A=a, B=b)
        assert torch.allclose(s.to_dense(), x.pattern().to_dense().double() * (a @ b))
        type(s)(**s._fields(), validate=True)


def test_gradients_of_sddmm() -> None:
    p, a, b = (
        random(4, 5, density=0.5),
        random(4, 3, seed=1).requires_grad_(),
        random(3, 5, seed=2).requires_grad_(),
    )
    for x in forms(p):
        assert x.values is not None

        def through(values: Tensor, a: Tensor, b: Tensor, x: SparseFormat = x) -> Tensor:
            return einsum(
                "S[m,n] = P[m,n] * A[m,k] * B[k,n]", P=x.with_values(values), A=a, B=b
            ).to_dense()

        assert torch.autograd.gradcheck(through, (x.values.clone().requires_grad_(), a, b))


def test_second_derivatives() -> None:
    x, b = random(3, 4, density=0.5), random(4, 2, seed=1).requires_grad_()
    for a in (
        COO.from_dense(x),
        GroupCOO.from_dense(x, group_size=2),
        ELL.from_dense(x),
        BlockGroupCOO.from_dense(x, block_shape=(2, 3), group_size=2),
    ):
        assert a.values is not None

        def through(values: Tensor, b: Tensor, a: SparseFormat = a) -> Tensor:
            return a.with_values(values).matmul(b)

        assert torch.autograd.gradgradcheck(through, (a.values.clone().requires_grad_(), b))


def test_operands_that_share_a_pattern() -> None:
    x, b = random(5, 7, density=0.4), random(7, 3, seed=1)
    for a in forms(x):
        assert a.values is not None
        c = a.with_values(a.values + 1)
        want = (x * c.to_dense()) @ b
        assert torch.allclose(einsum("C[m,n] = A[m,k] * D[m,k] * B[k,n]", A=a, D=c, B=b), want)
        assert torch.allclose(einsum("C[m,n] = A[m,k] * A[m,k] * B[k,n]", A=a, B=b), (x * x) @ b)
        assert torch.allclose(
            einsum("C[m,n] = A[m,k] * D[m,k] * B[k,n]", A=a, D=a.pattern(), B=b),
            (x * a.pattern().to_dense().double()) @ b,
        )
        both = einsum("S[m,k] = A[m,k] * D[m,k]", A=a, D=c)
        assert type(both) is type(a) and torch.allclose(both.to_dense(), x * c.to_dense())
    grouped = GroupCOO.from_dense(x, group_size=2)
    assert torch.allclose(
        einsum("C[m,n] = A[m,k] * D[k,m] * B[k,n]", A=grouped, D=grouped.T, B=b), (x * x) @ b
    )
    table = ELL.from_dense(random(3, 3, 4, density=0.6), group_dims=(0, 1))
    turned = table.permute(1, 0, 2)
    # the same arrays, but read at other rows: not the same pattern
    with pytest.raises(UnsupportedError):
        einsum("s[] = A[i,j,k] * B[i,j,k]", A=table, B=turned)


def test_sparse_operands_that_do_not_meet() -> None:
    x, y, b = random(3, 4, density=0.5), random(2, 5, density=0.5, seed=1), random(4, 5, seed=2)
    for a in forms(x):
        for d in forms(y)[:4]:
            got = einsum("C[m,j] = A[m,k] * D[j,l] * B[k,l]", A=a, D=d, B=b)
            assert torch.allclose(got, torch.einsum("mk,jl,kl->mj", x, y, b))


def test_sparse_operands_that_meet_where_one_is_dense() -> None:
    """Rows of ELL are found by number, so that another sparse operand may choose them: no
    intersection is needed.
    """
    x, y, b = random(4, 5, density=0.5), random(5, 6, density=0.5, seed=1), random(6, 3, seed=2)
    for a in (COO.from_dense(x), GroupCOO.from_dense(x, group_size=2), ELL.from_dense(x)):
        got = einsum("C[m,n] = A[m,j] * D[j,k] * B[k,n]", A=a, D=ELL.from_dense(y), B=b)
        assert torch.allclose(got, x @ y @ b)
    rows = einsum("C[k,l] = A[m,k] * D[m,l]", A=ELL.from_dense(x), D=ELL.from_dense(x))
    assert torch.allclose(rows, x.T @ x)


def test_neighbour_tables() -> None:
    table = torch.tensor([[-1, 0, 1], [0, 1, 2], [1, 2, -1], [-1, -1, -1]])
    features, weights = random(3, 2), random(3, 2, 4, seed=1)
    weighted = NeighborTable(table, shape=(4, 3, 3), values=random(4, 3, seed=2))
    for nb in (
        NeighborTable(table, shape=(4, 3, 3)),
        weighted,
        weighted.permute(2, 1, 0).permute(2, 1, 0),
    ):
        got = einsum("Out[x,m] = Map[x,y,z] * In[y,c] * W[z,c,m]", Map=nb, In=features, W=weights)
        assert torch.allclose(
            got, torch.einsum("xyz,yc,zcm->xm", nb.to_dense(torch.float64), features, weights)
        )
    (statement,) = explain_einsum(
        "Out[x,m] = Map[x,y,z] * In[y,c] * W[z,c,m]",
        Map=NeighborTable(table, shape=(4, 3, 3)),
        In=features,
        W=weights,
    ).statements
    assert statement == "Out[x,m] = In[MapY[x,z],c] * W[z,c,m]"
    counts = einsum("n[x] = Map[x,y,z]", Map=NeighborTable(table, shape=(4, 3, 3)))
    assert counts.tolist() == [2, 3, 2, 0]


def test_patterns_count_as_one() -> None:
    x, b = (random(5, 7, density=0.4) != 0).double(), random(7, 3, seed=1)
    for a in forms(x):
        p = a.pattern()
        dense = p.to_dense().double()
        assert torch.allclose(p @ b, dense @ b)
        assert (p @ b.half()).dtype == torch.float16
        assert torch.allclose(einsum("d[m] = A[m,k]", A=p).double(), dense.sum(1))
        assert torch.allclose(einsum("d[k] = A[m,k]", A=p).double(), dense.sum(0))
        assert torch.allclose(einsum("t[] = 3 * A[m,k]", A=p).double(), 3 * dense.sum())
        assert torch.allclose(
            einsum("d[m] = A[m,k] * y[m]", A=p, y=b[:5, 0]), dense.sum(1) * b[:5, 0]
        )
        assert torch.allclose(einsum("C[m,k] = A[m,k]", A=p, dense_output=True).double(), dense)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_padding_contributes_nothing(bad: float) -> None:
    x = torch.tensor([[1.0, 2, 3], [0, 4, 0], [0, 0, 0], [5, 0, 6]])
    y = torch.tensor([1.0, bad, 1.0, 1.0])
    b = torch.tensor([[bad], [1.0], [1.0]])
    made: list[SparseFormat] = [
        ELL.from_dense(x),
        GroupCOO.from_dense(x, group_size=2),
        BlockGroupCOO.from_dense(x, block_shape=(1, 1), group_size=2),
    ]
    for a in made:
        assert a.values is not None
        mask = a.mask()
        assert mask is not None
        full = mask.reshape(*mask.shape, *[1] * (a.values.dim() - mask.dim()))
        for junk in (a, a.with_values(torch.where(full, a.values, bad))):
            assert (junk @ b)[1:3].tolist() == [[4.0], [0.0]]
            got = einsum("d[m] = A[m,k] * y[m]", A=junk, y=y)
            assert not math.isfinite(got[1]) and got[[0, 2, 3]].tolist() == [6, 0, 11]
            rows = einsum("S[m,k] = A[m,k] * y[m]", A=junk, y=y)
            assert (
                rows.to_dense()[[0, 2, 3]].tolist() == x[[0, 2, 3]].tolist()
                and rows.values[~mask].abs().sum() == 0
            )
            dense = einsum("C[m,k] = A[m,k]", A=junk, dense_output=True)
            assert dense.tolist() == x.tolist()
            junk.requires_grad_()
            (junk @ torch.ones(3, 1)).sum().backward()
            assert (
                junk.values is not None
                and junk.values.grad is not None
                and junk.values.grad[~mask].abs().sum() == 0
            )
            junk.requires_grad_(False)


def test_accumulating_in_place() -> None:
    x, b = random(6, 9, density=0.4), random(9, 3, seed=1)
    even = BlockGroupCOO.from_dense(x, block_shape=(2, 3), group_size=2)
    odd = BlockGroupCOO.from_dense(x, block_shape=(4, 2), group_size=2)
    for a in (*forms(x), even, odd):
        c = torch.ones(6, 3, dtype=torch.float64)
        kept = c
        out = einsum("C[m,n] += A[m,k] * B[k,n]", A=a, B=b, C=c)
        assert out is kept and torch.allclose(c, 1 + x @ b)
        assert torch.allclose(einsum("C[m,n] += A[m,k] * B[k,n]", A=a, B=b), x @ b)
        ones = a.with_values(torch.ones_like(a.values))  # type: ignore[arg-type]
        s = einsum("S[m,k] += A[m,k] * y[m]", A=a, y=b[:6, 0], S=ones)
        assert (
            torch.allclose(s.to_dense(), a.pattern().to_dense() * 1.0 + x * b[:6, :1])
            or a.block_shape_or_none
        )


def test_sums_of_products() -> None:
    x, y, v = random(5, 7, density=0.4), random(5, 7, density=0.4, seed=3), random(7, seed=1)
    bias = random(5, seed=2)
    for a in forms(x):
        got = einsum("y[i] = A[i,j] * v[j] + b[i]", A=a, v=v, b=bias)
        assert torch.allclose(got, x @ v + bias)
        got = einsum(
            "y[i] = A[i,j] * v[j] - 2 * D[i,j] * v[j] + b[i]", A=a, D=COO.from_dense(y), v=v, b=bias
        )
        assert torch.allclose(got, x @ v - 2 * (y @ v) + bias)
        got = einsum("y[i] = A[i,j] * (v[j] + w[j])", A=a, v=v, w=v * v)
        assert torch.allclose(got, x @ (v + v * v))
        got = einsum("y[i] = relu(A[i,j] * v[j])", A=a, v=v)
        assert torch.allclose(got, torch.relu(x * v).sum(1))
        total = einsum(
            "y[i] += A[i,j] * v[j] + b[i]", A=a, v=v, b=bias, y=torch.ones(5, dtype=torch.float64)
        )
        assert torch.allclose(total, 1 + x @ v + bias)


def test_extrema_range_over_entries() -> None:
    x, v = random(5, 7, density=0.4), random(7, seed=1)
    for a in forms(x):
        if a.block_shape_or_none:
            with pytest.raises(UnsupportedError, match="zeros inside blocks"):
                einsum("y[i] max= A[i,j] * v[j]", A=a, v=v)
            continue
        got = einsum("y[i] min= A[i,j] + v[j]", A=a, v=v)
        assert torch.allclose(got, torch.where(x != 0, x + v, float("inf")).amin(1))


def test_index_expressions_beside_sparse_operands() -> None:
    x, b = random(5, 7, density=0.4), random(8, 3, seed=1)
    order = torch.tensor([3, 1, 6, 0, 2, 5, 4])
    for a in forms(x):
        assert torch.allclose(
            einsum("C[m,n] = A[m,k] * B[I[k],n]", A=a, B=b[:7], I=order), x @ b[:7][order]
        )
        assert torch.allclose(
            einsum("C[I[m],n] = A[m,k] * B[k,n]", A=a, B=b[:7], I=order[:5], out_shape=(7, 3))[
                order[:5]
            ],
            x @ b[:7],
        )
        if not a.block_shape_or_none:
            assert torch.allclose(einsum("C[m,n] = A[m,k] * B[k+1,n]", A=a, B=b), x @ b[1:])


def test_numbers_and_dtypes() -> None:
    x, b = random(5, 7, density=0.4, dtype=torch.float32), random(7, 3, seed=1, dtype=torch.float32)
    for a in forms(x):
        assert torch.allclose(einsum("C[m,n] = s * A[m,k] * B[k,n]", s=2.5, A=a, B=b), 2.5 * x @ b)
        assert einsum("mk,kn->mn", a.to(torch.float16), b.half()).dtype == torch.float16
        assert einsum("mk,kn->mn", a.to(torch.bfloat16), b).dtype == torch.float32
        assert torch.equal(einsum("mk,kn->mn", a.to(torch.int64), b.long()), x.long() @ b.long())


def test_empty_operands() -> None:
    for shape in ((0, 4), (4, 0), (3, 4), (0, 0)):
        x = torch.zeros(shape)
        for a in forms(x):
            assert torch.equal(a @ torch.ones(shape[1], 2), torch.zeros(shape[0], 2))
            assert einsum("S[m,n] = A[m,n] * u[m]", A=a, u=torch.ones(shape[0])).nnz == 0
            assert einsum("t[] = A[m,n]", A=a).item() == 0


def test_only_dense_operands() -> None:
    a, b = random(3, 4), random(4, 2)
    assert torch.allclose(einsum("mk,kn->mn", a, b), a @ b) and torch.allclose(
        einsum("C[m,n] = A[m,k] * B[k,n]", A=a, B=b), a @ b
    )


def test_explain_shows_the_statement() -> None:
    x, b = random(6, 9, density=0.4), random(9, 3)
    want = {
        COO.from_dense(x): "C[AM[p],n] = AV[p] * B[AK[p],n]",
        GroupCOO.from_dense(x, group_size=2): "C[AM[p],n] = AV[p,q] * B[AK[p,q],n]",
        GroupCOO.from_dense(x, group_dims=1, group_size=2): "C[AM[p,q],n] = AV[p,q] * B[AK[p],n]",
        ELL.from_dense(x): "C[m,n] = AV[m,q] * B[AK[m,q],n]",
        BlockCOO.from_dense(x, block_shape=(2, 3)): "C[AM[p],bm,n] = AV[p,bm,bk] * B[AK[p],bk,n]",
        BlockGroupCOO.from_dense(
            x, block_shape=(2, 3)
        ): "C[AM[p],bm,n] = AV[p,q,bm,bk] * B[AK[p,q],bk,n]",
    }
    for a, statement in want.items():
        explained = explain_einsum("C[m,n] = A[m,k] * B[k,n]", A=a, B=b)
        assert (
            explained.statements == (statement,)
            and statement in str(explained)
            and repr(a) in str(explained)
        )
    assert "pattern of P" in str(
        explain_einsum(
            "S[m,n] = P[m,n] * A[m,k] * B[n,k]", P=COO.from_dense(x), A=random(6, 2), B=b[:, :2]
        )
    )


def test_torch_compile_fullgraph() -> None:
    x, b = random(6, 9, density=0.4, dtype=torch.float32), random(9, 3, dtype=torch.float32)

    def product(a: SparseFormat, b: Tensor) -> Tensor:
        return einsum("C[m,n] = A[m,k] * B[k,n]", A=a, B=b).relu()

    def sampled(a: SparseFormat, b: Tensor) -> SparseFormat:
        return einsum("mk,k->mk", a, b[:, 0])

    for a in (
        COO.from_dense(x),
        GroupCOO.from_dense(x, group_size=2),
        ELL.from_dense(x),
        BlockGroupCOO.from_dense(x, block_shape=(4, 2), group_size=2),
    ):
        torch.compiler.reset()
        assert a.values is not None
        a = a.with_values(a.values.clone().requires_grad_())
        b = b.clone().requires_grad_()
        got = torch.compile(product, fullgraph=True, backend="aot_eager")(a, b)
        want = product(a, b)
        assert torch.allclose(got, want)
        assert a.values is not None
        for mine, theirs in zip(
            torch.autograd.grad(got.sum(), (a.values, b)),
            torch.autograd.grad(want.sum(), (a.values, b)),
        ):
            assert torch.allclose(mine, theirs)
        compiled = torch.compile(sampled, fullgraph=True, backend="aot_eager")(a, b)
        assert type(compiled) is type(a) and torch.allclose(
            compiled.to_dense(), sampled(a, b).to_dense()
        )


def test_other_numbers_of_entries_do_not_recompile() -> None:
    torch.compiler.reset()
    before = compiled_graphs()
    step = torch.compile(
        lambda a, b: einsum("C[m,n] = A[m,k] * B[k,n]", A=a, B=b), fullgraph=True, backend="eager"
    )
    b = random(32, 4, dtype=torch.float32)
    for density in (0.1, 0.2, 0.3, 0.4):
        x = random(32, 32, density=density, dtype=torch.float32)
        assert torch.allclose(step(GroupCOO.from_dense(x, group_size=2), b), x @ b, atol=1e-5)
    assert compiled_graphs() - before <= 2  # once for the first size, once for all others


def test_matmul_under_torch_compile() -> None:
    x, b = random(6, 6, density=0.4, dtype=torch.float32), random(6, 6, dtype=torch.float32)
    a = GroupCOO.from_dense(x, group_size=2)
    assert torch.allclose(
        torch.compile(lambda a, b: a.matmul(b), fullgraph=True, backend="eager")(a, b), x @ b
    )
    # Operators between tensors and objects break the graph, and still compute what they say.
    torch.compiler.reset()
    assert torch.allclose(torch.compile(lambda a, b: a @ b, backend="eager")(a, b), x @ b)
    assert torch.allclose(torch.compile(lambda a, b: b @ a, backend="eager")(a, b), b @ x)


def test_export() -> None:
    class Layer(torch.nn.Module):
        def forward(self, a: SparseFormat, b: Tensor) -> Tensor:
            return a @ b

    x, b = random(6, 9, density=0.4, dtype=torch.float32), random(9, 3, dtype=torch.float32)
    for a in (GroupCOO.from_dense(x, group_size=2), BlockCOO.from_dense(x, block_shape=(4, 2))):
        exported = torch.export.export(Layer(), (a, b))
        assert torch.allclose(exported.module()(a, b), x @ b)


# --- refusals ---

X = COO.from_dense(torch.eye(3))
B = torch.ones(3, 2)
REFUSED: list[tuple[type[Exception], str, str, dict[str, Any]]] = [
    (
        UnsupportedError,
        "C[m,n] = A[m,k] * D[k,n]",
        r"A and D are both sparse and meet in index 'k'.*to_dense\(\)",
        {"A": X, "D": COO.from_dense(torch.eye(3))},
    ),
    (
        UnsupportedError,
        "C[m,k] = A[m,k] * D[m,k]",
        "intersected",
        {"A": X, "D": COO.from_dense(torch.eye(3))},
    ),
    (UnsupportedError, "t[] = A[i,i]", "'i' indexes it twice", {"A": X}),
    (UnsupportedError, "C[m] = A[m,0]", "indexed by 0", {"A": X}),
    (UnsupportedError, "C[m] = A[m,k+1]", r"indexed by k \+ 1", {"A": X}),
    (UnsupportedError, "C[m,n] = B[A[m,k],n]", "stands in an index", {"A": X, "B": B}),
    (UnsupportedError, "C[m] = exp(A[m,k])", "not zero where A has no entry", {"A": X}),
    (
        UnsupportedError,
        "C[m,n] = A[m,k] * B[k+1,n]",
        "runs over blocks",
        {"A": BlockCOO.from_dense(torch.eye(3), block_shape=2), "B": B},
    ),
    (
        BindingError,
        "C[m,n] = A[m,k] * B[k,n]",
        "B stands in the statement but was not passed",
        {"A": X},
    ),
    (
        BindingError,
        "C[m,n] = A[m,k] * B[k,n]",
        "D was passed but does not stand",
        {"A": X, "B": B, "D": B},
    ),
    (BindingError, "C[m,n] = A[m,k] * B[k,n]", "C is the output of '='", {"A": X, "B": B, "C": B}),
    (
        BindingError,
        "C[m,n] = A[m,k,l] * B[k,n]",
        r"A has 2 dimension\(s\) but A\[m,k,l\] has 3",
        {"A": X, "B": B},
    ),
    (
        BindingError,
        "C[m,n] = A[m,k] * B[k,n]",
        r"'k' has two extents: 3 in A \(dimension 1\) and 4 in B \(dimension 0\)",
        {"A": X, "B": torch.ones(4, 2)},
    ),
    (
        BindingError,
        "C[m,n] += A[m,k] * B[k,n]",
        "'m' has two extents: 5 in C",
        {"A": X, "B": B, "C": torch.ones(5, 2)},
    ),
    (
        UnsupportedError,
        "C[m,n] += A[m,k] * B[k,n]",
        "the output C is sparse",
        {"A": X, "B": torch.ones(3, 3), "C": X},
    ),
]


@pytest.mark.parametrize(
    ("kind", "text", "message", "operands"), REFUSED, ids=[f"{r[1]} {r[2][:20]}" for r in REFUSED]
)
def test_refusals(kind: type[Exception], text: str, message: str, operands: dict[str, Any]) -> None:
    with pytest.raises(kind, match=rf"(?s){message}"):
        einsum(text, **operands)


def test_refusals_of_the_other_notation() -> None:
    with pytest.raises(StatementError, match="'!' is no index"):
        einsum("m!,kn->mn", X, B)
    with pytest.raises(BindingError, match=r"has 2 operand\(s\), but 1 were passed"):
        einsum("mk,kn->mn", X)
    with pytest.raises(BindingError, match=r"an operand of 2 dimension\(s\) is written 'mkl'"):
        einsum("mkl,kn->mn", X, B)
    with pytest.raises(StatementError, match="'z' does not stand in any operand"):
        einsum("mk,kn->mz", X, B)
    with pytest.raises(StatementError, match="'m' stands twice"):
        einsum("mk,kn->mm", X, B)
    with pytest.raises(BindingError, match="passed by position"):
        einsum("C[m,n] = A[m,k] * B[k,n]", X, B)
    with pytest.raises(BindingError, match="passed by name"):
        einsum("mk,kn->mn", A=X, B=B)
    with pytest.raises(StatementError, match="no operands"):
        einsum("mk,kn->mn")
    with pytest.raises(UnsupportedError, match="@ between"):
        COO.from_dense(torch.ones(2, 2, 2)) @ B
    with pytest.raises(TypeError):
        X @ "text"
    with pytest.raises(BindingError, match=r"B is a list(?s:.*)torch.as_tensor\(B\)"):
        einsum("mk,kn->mn", X, B.tolist())


def test_operands_on_two_devices() -> None:
    """Found where the statement is bound, and said in terms of the operands."""
    a, b = GroupCOO.from_dense(random(4, 3, density=0.5)), random(3, 2)
    for _ in range(2):
        assert einsum("C[m,n] = A[m,k] * B[k,n]", A=a, B=b).shape == (4, 2)
        for run in (
            lambda: einsum("C[m,n] = A[m,k] * B[k,n]", A=a, B=b.to("meta")),
            lambda: explain_einsum("C[m,n] = A[m,k] * B[k,n]", A=a, B=b.to("meta")),
        ):
            with pytest.raises(DeviceError, match="A is on cpu but B is on meta"):
                run()


def test_two_formats_share_the_arrays_that_are_the_same() -> None:
    """Whichever came first, and whatever each of them has of its own."""
    a = COO.from_dense(random(4, 3, density=0.5))
    other = COO.from_dense(random(4, 3, density=0.5, seed=1))
    doubled = einsum("C[m,k] = A[m,k] * B[m,k]", A=a, B=a.with_values(a.values))
    assert torch.equal(doubled.to_dense(), a.to_dense() ** 2)
    with pytest.raises(UnsupportedError, match="both sparse and meet"):
        einsum("C[m,k] = A[m,k] * B[m,k]", A=a, B=other)
