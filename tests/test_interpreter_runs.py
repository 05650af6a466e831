"""Places that are walked one after the other, whatever their dimensions, in the interpreter:
stores, sums and atomics of every width, of factors that lie in memory one way or another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

import insum
from insum.testing.oracle import oracle
from kernels import error, plan_of, poison_new_memory, run

pytestmark = pytest.mark.interpreter
#: By statement the variables of what it reads; capital letters are index tensors.
STATEMENTS = {
    "y[a,b,c] = x[a,c] * z[b,c]": {"x": "ac", "z": "bc"},
    "y[a,b,c] = x[a,b,c] + z[b,c] * u[a]": {"x": "abc", "z": "bc", "u": "a"},
    "y[a,b,c] = x[b,c] * z[a,b]": {"x": "bc", "z": "ab"},
    "y[a,b] = x[a,J[b]] * z[b]": {"x": "ab", "z": "b", "J": "b"},
    "y[a,b] = x[a,J[a,b]]": {"x": "ab", "J": "ab"},
    "y[a,b,c] = x[J[a,b],c] - z[a,c]": {"x": "ac", "z": "ac", "J": "ab"},
    "y[a,b,c] = x[a,d,b,c] * z[d,c]": {"x": "adbc", "z": "dc"},
    "y[c,a] = x[a,b,c] * z[a,b,c]": {"x": "abc", "z": "abc"},
    "y[a,c] = x[a,b,d,c] * z[b]": {"x": "abdc", "z": "b"},
    "y[a,c] max= x[a,b,c]": {"x": "abc"},
    "y[a,J[a,b]] += x[a,b]": {"x": "ab", "J": "ab"},
    "y[a,J[b],c] += x[a,b,c]": {"x": "abc", "J": "b"},
}
#: Extents of a, b, c and d.
SIDES = {
    "odd": (3, 5, 7, 2),
    "by two": (5, 3, 6, 4),
    "by eight": (3, 8, 24, 3),
    "one": (4, 1, 3, 5),
}


def values_of(reads: Mapping[str, str], sides: Sequence[int], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    extents, found = dict(zip("abcd", sides, strict=True)), {}
    for name, names in reads.items():
        shape = [extents[v] for v in names]
        if name.isupper():
            found[name] = torch.randint(0, min(sides), shape, generator=generator)
        else:
            found[name] = torch.randn(shape, generator=generator)
    return found


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("statement", STATEMENTS)
def test_every_place_is_written_once(
    statement: str, sides: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_new_memory(monkeypatch)
    values = values_of(STATEMENTS[statement], SIDES[sides], len(statement))
    extents = dict(zip("abcd", SIDES[sides], strict=True))
    sizes = None
    if "J" in statement.partition("=")[0]:
        sizes = {0: extents["a"], 1: extents["b"]} | ({2: extents["c"]} if "c" in statement else {})
    want = torch.from_numpy(oracle(statement, values, sizes=sizes))
    assert error(run(statement, sizes=sizes, **values), want) < 1e-6
    apart = {  # the same numbers, as they lie in larger tensors, or the other way round
        n: v if n.isupper() else _elsewhere(v, turned=bool(k % 2))
        for k, (n, v) in enumerate(values.items())
    }
    assert error(run(statement, sizes=sizes, **apart), want) < 1e-6


def _elsewhere(value: Tensor, *, turned: bool) -> Tensor:
    if turned and value.dim() > 1:
        return value.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.full([2 * n for n in value.shape], math.nan)
    found = wide[tuple(slice(0, n) for n in value.shape)]
    return found.copy_(value)


def test_what_is_there_is_added_to() -> None:
    x, z, base = torch.randn(5, 12), torch.randn(3, 12), torch.randn(5, 3, 12)
    want = base + x[:, None] * z
    found = run("y[a,b,c] += x[a,c] * z[b,c]", x=x, z=z, y=base.clone())
    assert error(found, want) < 1e-6
    strided = torch.randn(5, 3, 24)[..., ::2]
    want = strided + x[:, None] * z
    assert error(run("y[a,b,c] += x[a,c] * z[b,c]", x=x, z=z, y=strided), want) < 1e-6


@pytest.mark.parametrize("width", [7, 8])
def test_names_of_variables_do_not_meet_those_of_parts(width: int) -> None:
    """Parts of a run are called after their variables, which may be called anything."""
    x, z, u = torch.randn(3, 5), torch.randn(2, width), torch.randn(2)
    v = torch.randn(3, 5)
    want = torch.einsum("ij,kl,h,ij->hijkl", x, z, u, v)
    statement = "y[n,a_b,c,a,b_c] = x[a_b,c] * z[a,b_c] * u[n] * v[a_b,c]"
    assert error(run(statement, x=x, z=z, u=u, v=v), want) < 1e-6
    own = "y[seg,task,group,m,n] = x[task,group] * z[m,n] * u[seg] * v[task,group]"
    assert error(run(own, x=x, z=z, u=u, v=v), want) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_through_several_unique_indices(dtype: torch.dtype) -> None:
    """Nothing meets: neither atomics nor, where all places are written, zeros."""
    p, q = (insum.unchanging(torch.randperm(n)) for n in (24, 9))
    x = torch.randn(24, 9).to(dtype)
    want = torch.zeros(24, 9, dtype=dtype).index_put((p[:, None], q), x)
    assert torch.equal(run("y[p[i],q[j]] = x[i,j]", sizes={0: 24, 1: 9}, p=p, q=q, x=x), want)
    some = insum.unchanging(p[:10].clone())
    want = torch.zeros(24, 9, dtype=dtype).index_put((some[:, None], q), x[:10])
    found = run("y[p[i],q[j]] = x[i,j]", sizes={0: 24, 1: 9}, p=some, q=q, x=x[:10])
    assert torch.equal(found, want)


def test_which_plans_have_runs() -> None:
    flat = plan_of("y[a,b,c] = x[a,c] * z[b,c]", x=torch.empty(90, 27), z=torch.empty(80, 27))
    assert flat.roles.flat and flat.roles.n == ("a", "b", "c") and not flat.roles.m
    sums = plan_of("y[c,a] = x[a,b,c] * z[a,b,c]", x=torch.empty(9, 7, 5), z=torch.empty(9, 7, 5))
    assert sums.roles.n == ("a", "c") and sums.roles.k == ("b",)
    long = plan_of("y[a,b] = x[a,b] * z[b]", x=torch.empty(90, 1435), z=torch.empty(1435))
    assert not long.roles.flat
    turned = plan_of("y[a,b] = x[b,a]", x=torch.empty(640, 96))
    assert turned.roles.n == ("b",)
