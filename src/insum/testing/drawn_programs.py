"""Drawn programs in plain PyTorch, full of traps, compiled with fusion and compared with eager:
values, gradients, what was written in place, and errors.

    python -m insum.testing.drawn_programs --count 2000 [--seed 0] [--gpu]

A program gathers, changes what it has gathered, and scatters it. Traps are what makes that subtle:
tensors that share memory, writes in place to values and to indices between reads, negative indices
and such that are out of range, unusual strides, narrow index dtypes, mixed dtypes, autocast, random
numbers drawn on the way, the same term twice. A program is decided by its seed alone.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

import insum.fusion
from insum.fusion import backend

NODES, EDGES, HEADS, WIDTH = 6, 11, 2, 3
#: Of a message, and of what a program is passed, another message.
DrawnChange: TypeAlias = Callable[[Tensor, "DrawnTensors"], Tensor]
DrawnGather: TypeAlias = Callable[[Tensor, Tensor], Tensor]
DrawnScatter: TypeAlias = Callable[[Tensor, "DrawnTensors"], Tensor]


@dataclass(frozen=True, eq=False)
class DrawnTensors:
    """Two tensors of nodes, weights per edge, per edge and head, matrices, a vector; edges."""

    x: Tensor
    y: Tensor
    w: Tensor
    a: Tensor
    m: Tensor
    b: Tensor
    src: Tensor
    dst: Tensor


SHAPES = (
    (NODES, HEADS, WIDTH),
    (NODES, HEADS, WIDTH),
    (EDGES,),
    (EDGES, HEADS),
    (HEADS, WIDTH, WIDTH),
    (WIDTH,),
)


def _spread(index: Tensor) -> Tensor:
    """For scatters with an index for each element, which take 64 bits: narrower ones are read
    wrongly by some versions of torch.
    """
    return index.long().view(-1, 1, 1).expand(EDGES, HEADS, WIDTH)


def _zeros(p: DrawnTensors, z: Tensor) -> Tensor:
    return z.new_zeros(NODES, HEADS, WIDTH)


def _rows(x: Tensor, z: Tensor) -> Tensor:
    """Of each node a row, in the dtype of messages."""
    return x.reshape(NODES, HEADS * WIDTH).to(z.dtype)


def _products(p: DrawnTensors, z: Tensor) -> Tensor:
    """A number for each pair of nodes."""
    return _rows(p.x, z) @ _rows(p.y, z).t()


def _matrix(p: DrawnTensors, z: Tensor, accumulate: bool = True) -> Tensor:
    """A matrix of all pairs of nodes, with a number at each edge; some edges are there twice."""
    value = z.sum((1, 2)) if accumulate else z.new_ones(())
    return z.new_zeros(NODES, NODES).index_put((p.dst, p.src), value, accumulate=accumulate)


def _mean(z: Tensor, p: DrawnTensors) -> Tensor:
    """As graph libraries write it: a sum, a count, a division."""
    total = _zeros(p, z).scatter_add(0, _spread(p.dst), z)
    count = z.new_zeros(NODES).scatter_add(0, p.dst.long(), z.new_ones(EDGES))
    return total / count.clamp(min=1)[:, None, None]


def _most(p: DrawnTensors, z: Tensor) -> Tensor:
    """Largest values, without a gradient."""
    zeros = _zeros(p, z).detach()
    return zeros.scatter_reduce(0, _spread(p.dst), z.detach(), "amax", include_self=False)


def _shares(z: Tensor, p: DrawnTensors) -> Tensor:
    """A softmax over edges."""
    shares = torch.exp(z - _most(p, z)[p.dst])
    return shares / (_zeros(p, z).index_add(0, p.dst, shares) + 1e-16)[p.dst]


def _taken_apart(z: Tensor, p: DrawnTensors) -> Tensor:
    """And put together in another order."""
    first, *rest = (z * p.y[p.dst]).tensor_split([1], -1)
    return torch.cat([*rest, first], -1)


# --- plain programs -------------------------------------------------------------------------------

GATHERS: tuple[DrawnGather, ...] = (
    lambda x, i: x[i],
    lambda x, i: x.index_select(0, i),
    lambda x, i: x.gather(0, _spread(i)),
    lambda x, i: x.transpose(0, 1)[:, i].transpose(0, 1),
    lambda x, i: x.view(NODES, -1)[i].view(EDGES, HEADS, WIDTH),
    lambda x, i: x[i - NODES],
    lambda x, i: functional.embedding(i, x.reshape(NODES, -1)).view(EDGES, HEADS, WIDTH),
)
CHANGES: tuple[DrawnChange, ...] = (
    lambda z, p: z * p.w[:, None, None],
    lambda z, p: p.a.unsqueeze(-1) * z,
    lambda z, p: z * p.y[p.dst],
    lambda z, p: torch.einsum("ehc,hcd->ehd", z, p.m.to(z.dtype)),
    lambda z, p: z @ p.m[0].to(z.dtype),
    lambda z, p: z * (p.x[p.src] * p.y[p.dst]).sum(-1, keepdim=True),
    lambda z, p: -z * p.b,
    lambda z, p: z[:, :1] * p.a[:, :, None],
    lambda z, p: z + p.b,
    lambda z, p: (z * 0.5).sigmoid(),
    lambda z, p: functional.leaky_relu(z + p.y[p.dst], 0.2),
    lambda z, p: functional.gelu(z) * p.a[:, :, None] + 1,
    lambda z, p: torch.where(z > p.y[p.dst], z, 2 * p.x[p.src]),
    lambda z, p: torch.maximum(z.clamp(-1, 0.5), -p.y[p.dst]),
    lambda z, p: z / (1 + p.y[p.dst] ** 2) - p.w[:, None, None],
    lambda z, p: functional.softplus(z - p.x[p.dst]).log1p(),
    lambda z, p: z.masked_fill((z < 0) | (p.y[p.src] > 1), 0.5),
    lambda z, p: (1 - z) * torch.exp(-((z - p.b) ** 2)),
    lambda z, p: functional.elu(functional.silu(z) * p.y[p.dst]),
    lambda z, p: torch.sin(z) * torch.rsqrt(1 + p.x[p.dst].abs()),
    lambda z, p: z * (z != p.y[p.dst]) * (p.a[:, :, None] >= 0),
    lambda z, p: z * _products(p, z)[p.src, p.dst][:, None, None],
    lambda z, p: z * torch.tanh(0.3 * _products(p, z))[p.src, p.dst][:, None, None],
    lambda z, p: (p.x[p.src].to(z.dtype) @ p.m[1].to(z.dtype)) + z,
    lambda z, p: (
        torch.cat([p.y[p.dst].to(z.dtype), z], 2) @ torch.cat([p.m[0], p.m[1]]).to(z.dtype)
    ),
    _shares,
    lambda z, p: z * (z.detach() >= _most(p, z)[p.dst]),
    lambda z, p: torch.cat([*z.chunk(2, -1)][::-1], -1),
    _taken_apart,
    lambda z, p: functional.glu(torch.cat([p.x, p.y], -1)[p.src].to(z.dtype) + z.sum(), -1) + z,
)
SCATTERS: tuple[DrawnScatter, ...] = (
    lambda z, p: _zeros(p, z).index_add(0, p.dst, z),
    lambda z, p: _zeros(p, z).scatter_add_(0, _spread(p.dst), z),
    lambda z, p: _zeros(p, z).index_put_((p.dst,), z, accumulate=True),
    lambda z, p: p.x.to(z.dtype).index_add(0, p.dst, z),
    lambda z, p: z.sum(-1),
    lambda z, p: z.sum((0, 2)),
    lambda z, p: z.new_zeros(NODES, HEADS * WIDTH).index_add(0, p.dst, z.reshape(EDGES, -1)),
    lambda z, p: _zeros(p, z).index_add(0, p.dst, z) + z.sum(0),
    lambda z, p: z.new_zeros(NODES, NODES, HEADS).index_put(
        (p.dst, p.src), z.sum(-1), accumulate=True
    ),
    lambda z, p: _zeros(p, z).scatter_reduce(0, _spread(p.dst), z, "amax", include_self=False),
    lambda z, p: _zeros(p, z).scatter_reduce(0, _spread(p.dst), z, "amin"),
    lambda z, p: _zeros(p, z).scatter_reduce(0, _spread(p.dst), z, "mean", include_self=False),
    _mean,
    lambda z, p: _matrix(p, z) @ _rows(p.x, z),
    lambda z, p: _rows(p.y, z).t() @ (_matrix(p, z) * _products(p, z)),
    lambda z, p: _matrix(p, z).t() @ _rows(p.x, z) + _matrix(p, z).sum(0, keepdim=True).t(),
)

# --- traps ----------------------------------------------------------------------------------------


def _written_after(z: Tensor, p: DrawnTensors) -> Tensor:
    """Gathered from a copy that is written to afterwards."""
    y = p.y.clone()
    found = z * y[p.dst]
    y[0].mul_(2)
    return found + y[p.src]


def _written_through(z: Tensor, p: DrawnTensors) -> Tensor:
    """Messages written to through a view of them."""
    z = z.clone()
    z.view(-1)[::2].add_(1)
    z[:, 0].mul_(p.a[:, :1])
    return z * p.x[p.src]


def _moved_index(z: Tensor, p: DrawnTensors) -> Tensor:
    """An index that is another by the time of the backward pass."""
    at = p.src.clone()
    z = z * p.x[at]
    at.copy_(p.dst)
    return z - p.y[at]


def _filled(z: Tensor, p: DrawnTensors) -> Tensor:
    """A buffer that is added to, read, and added to again."""
    held = _zeros(p, z).index_add_(0, p.src, z)
    first = held[p.dst]
    held.index_add_(0, p.dst, first)
    return first * held[p.src]


def _aliased(z: Tensor, p: DrawnTensors) -> Tensor:
    """Both sides of a product lie in one tensor, at other places of it."""
    both = torch.stack([p.x, p.y], 1).reshape(2 * NODES, HEADS, WIDTH)
    return z * both[::2][p.src] * both[1::2][p.dst]


def _drawn_between(z: Tensor, p: DrawnTensors) -> Tensor:
    return z * torch.rand_like(z) + p.y[p.dst] * torch.rand(EDGES, 1, 1, device=z.device).to(z)


def _autocast(z: Tensor, p: DrawnTensors) -> Tensor:
    with torch.autocast(z.device.type, torch.bfloat16):
        return (z.float() @ p.m[0].float()).float() * p.x[p.src].float()


CHANGES_WITH_TRAPS: tuple[DrawnChange, ...] = (
    _written_after,
    _written_through,
    _moved_index,
    _filled,
    _aliased,
    _drawn_between,
    _autocast,
    lambda z, p: z * z,
    lambda z, p: z * p.x[p.src] * p.x[p.src] + z,
    lambda z, p: (z.half() * 0.5).to(z.dtype) * p.y[p.src],
    lambda z, p: z.float() * p.x[p.src],
    lambda z, p: z * p.w.expand(WIDTH, EDGES).t()[:, None],
    lambda z, p: z.flip(0).transpose(1, 2).contiguous().transpose(1, 2) * p.y[p.src.flip(0)],
    lambda z, p: z * p.x[p.src.to(torch.int16).long()],
    lambda z, p: z * p.x[-1 - p.dst],
    lambda z, p: z.detach() * p.x[p.src],
    lambda z, p: z * p.x.detach()[p.src].requires_grad_(),
    lambda z, p: z[:, :, :1].expand_as(z) * p.y[p.dst],
    lambda z, p: z * p.x.roll(1, 0)[p.src] * 0,
    lambda z, p: z * torch.where(p.w > 0, p.w, float("inf"))[:, None, None].reciprocal(),
    # matrices at places, which something else needs, too
    lambda z, p: z * (q := _products(p, z))[p.src, p.dst][:, None, None] + q[0, 1],
    lambda z, p: z + (_matrix(p, z) * _matrix(p, z)).matmul(_rows(p.x, z))[p.src, :1, None],
    lambda z, p: z * (_matrix(p, z, False) @ _rows(p.y, z))[p.dst, :1, None],
    lambda z, p: z + (_matrix(p, z) + _products(p, z)).matmul(_rows(p.y, z))[p.src, :1, None],
)
#: What a program does with its edges before it reads them.
EDGES_WITH_TRAPS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda e: e,
    lambda e: e.to(torch.int32),
    lambda e: e.flip(0),
    lambda e: e.t().contiguous().t(),
    lambda e: e - NODES * (e % 2),  # some of them from the end
    lambda e: torch.stack([e, e], 2)[:, :, 0],
)
#: Edges that are no edges: both ways have to say so.
BEYOND = NODES + 3


@dataclass(frozen=True)
class DrawnProgram:
    """A program by what it is made of."""

    gather: int
    changes: tuple[tuple[bool, int], ...]
    scatters: tuple[int, ...]
    edges: int
    of_y: bool
    by_target: bool
    beyond: bool

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        x, y, w, a, m, b, ends = tensors
        ends = EDGES_WITH_TRAPS[self.edges](ends)
        p = DrawnTensors(x, y, w, a, m, b, ends[0], ends[1])
        z = GATHERS[self.gather](p.y if self.of_y else p.x, p.dst if self.by_target else p.src)
        for trap, number in self.changes:
            z = (CHANGES_WITH_TRAPS if trap else CHANGES)[number](z, p)
        return tuple(SCATTERS[number](z, p) for number in self.scatters)


def drawn(seed: int, *, traps: bool = True) -> DrawnProgram:
    choose = random.Random(seed)
    changes = []
    for _ in range(choose.randrange(4)):
        trap = traps and choose.random() < 0.5
        changes.append((trap, choose.randrange(len(CHANGES_WITH_TRAPS if trap else CHANGES))))
    count = choose.choice((1, 1, 2)) if traps else 1
    return DrawnProgram(
        choose.randrange(len(GATHERS)),
        tuple(changes),
        tuple(choose.randrange(len(SCATTERS)) for _ in range(count)),
        choose.randrange(len(EDGES_WITH_TRAPS)) if traps else 0,
        bool(choose.randrange(2)),
        bool(choose.randrange(2)),
        traps and choose.random() < 0.05,
    )


def tensors_of(program: DrawnProgram, seed: int, device: torch.device) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(*s, generator=generator, dtype=torch.float64) for s in SHAPES]
    ends = torch.randint(0, NODES, (2, EDGES), generator=generator)
    if program.beyond:
        ends[seed % 2, seed % EDGES] = BEYOND
    return tuple(t.to(device).requires_grad_(t.is_floating_point()) for t in (*made, ends))


@dataclass(frozen=True, eq=False)
class DrawnOutcome:
    """What running a program gave: results and gradients, or the kind of an error."""

    tensors: tuple[Tensor, ...]
    failed: bool = False


def outcome(run: Callable[..., Any], tensors: Sequence[Tensor]) -> DrawnOutcome:
    torch.manual_seed(7)
    try:
        found = run(*tensors)
        wanted = [t for t in found if t.requires_grad]
        upstream = [
            torch.linspace(-1, 1, t.numel(), dtype=t.dtype, device=t.device).reshape(t.shape)
            for t in wanted
        ]
        leaves = [t for t in tensors if t.requires_grad]
        slopes = torch.autograd.grad(wanted, leaves, upstream, allow_unused=True) if wanted else ()
        insum.synchronize()
    except (IndexError, RuntimeError, insum.InsumError):
        return DrawnOutcome((), failed=True)
    absent = torch.zeros(())
    return DrawnOutcome(
        (*(t.detach() for t in found), *(absent if s is None else s for s in slopes))
    )


def compare(got: DrawnOutcome, want: DrawnOutcome) -> None:
    assert got.failed == want.failed, f"eager failed: {want.failed}, fused failed: {got.failed}"
    assert len(got.tensors) == len(want.tensors)
    for a, b in zip(got.tensors, want.tensors, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, b.shape, a.dtype, b.dtype)
        coarse = b.dtype != torch.float64
        scale = float(b.double().nan_to_num().abs().max()) if b.numel() else 0.0
        # in float64 too: some programs are narrower on the way
        limit = 2e-2 if b.dtype in (torch.float16, torch.bfloat16) else 1e-4 if coarse else 2e-6
        torch.testing.assert_close(
            a.double(), b.double(), rtol=limit, atol=limit * (1 + scale), equal_nan=True
        )


def compiled(program: DrawnProgram, wish: str, seed: int) -> Callable[..., Any]:
    """The program compiled with fusion and nothing else, or with torch's tracing alone."""
    torch._dynamo.reset()
    keep: dict[str, Any] = {"insum.fuse": wish, "insum.rest": "eager"}
    call = lambda *tensors: program(*tensors)
    found: Callable[..., Any] = torch.compile(
        call, backend=backend, options=keep, dynamic=[None, True][seed % 2]
    )
    return found


def run_drawn(seed: int, *, traps: bool = True, device: str = "cpu") -> int:
    """Compare one program, called twice; how many statements were made of it. -1 where torch's own
    tracing gives something else than eager, and fusion the same.
    """
    insum.fusion.clear()
    program = drawn(seed, traps=traps)
    every = [tensors_of(program, seed + 1000 * more, torch.device(device)) for more in range(2)]
    run = compiled(program, "always", seed)
    got = [outcome(run, tensors) for tensors in every]
    fused = len(insum.fusion.report().fused)
    try:
        for one, tensors in zip(got, every, strict=True):
            compare(one, outcome(program, tensors))
    except AssertionError:
        plain = compiled(program, "never", seed)
        for one, tensors in zip(got, every, strict=True):
            compare(one, outcome(plain, tensors))
        return -1
    return fused


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpu", action="store_true")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    counts, start = Counter[str](), time.monotonic()
    for seed in range(asked.seed, asked.seed + asked.count):
        try:
            fused = run_drawn(seed, device="cuda" if asked.gpu else "cpu")
            counts["fused something"] += fused > 0
            counts["statements"] += max(0, fused)
            counts["other in torch.compile alone, too"] += fused < 0
        except Exception:
            counts["failed"] += 1
            print(f"seed {seed}: {drawn(seed)}\n{traceback.format_exc(limit=-3)}", flush=True)
        counts["programs"] += 1
    told = ", ".join(f"{name} {count}" for name, count in counts.items())
    print(f"{told}, {time.monotonic() - start:.0f} s")
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
