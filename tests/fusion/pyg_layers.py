"""Every layer of torch_geometric.nn.conv, compiled with fusion, against eager: values, gradients.

    python tests/fusion/pyg_layers.py [--only NAME,NAME] [--gpu]

Counted: layers that run in eager mode, that agree, that fuse something, that warn.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import insum.fusion

N, E, C = 12, 40, 8


@dataclass(frozen=True, eq=False)
class Given:
    """What layers are called with."""

    device: torch.device

    def at_nodes(self, *shape: int) -> Tensor:
        return torch.randn(N, *shape, dtype=torch.float64, device=self.device)

    def at_edges(self, *shape: int) -> Tensor:
        return torch.rand(E, *shape, dtype=torch.float64, device=self.device)

    def ends(self) -> Tensor:
        draw = torch.Generator().manual_seed(3)
        found = torch.randint(0, N, (2, E), generator=draw)
        found[1, :N] = torch.arange(N)  # an edge into each node
        return found.to(self.device)

    def kinds(self, count: int, among: int = 3) -> Tensor:
        draw = torch.Generator().manual_seed(4)
        return torch.randint(0, among, (count,), generator=draw).to(self.device)


def _mlp(*widths: int) -> nn.Module:
    return nn.Sequential(nn.Linear(*widths), nn.Tanh())


#: Layer by name: of PyG, itself; of what is given, what it is called with beside the features.
Layer = tuple[Callable[[Any], nn.Module], Callable[[Given], tuple[Any, ...]]]
_EDGES = lambda g: (g.ends(),)
_POSITIONS = lambda g: (g.at_nodes(3), g.ends())
_VALUES = lambda g: (g.ends(), g.at_edges(C))
_WEIGHTS = lambda g: (g.ends(), g.at_edges())

LAYERS: dict[str, Layer] = {
    "SimpleConv": (lambda n: n.SimpleConv(), _EDGES),
    "GCNConv": (lambda n: n.GCNConv(C, C), _EDGES),
    "GCNConv, weights": (lambda n: n.GCNConv(C, C), _WEIGHTS),
    "ChebConv": (lambda n: n.ChebConv(C, C, 3), _EDGES),
    "SAGEConv": (lambda n: n.SAGEConv(C, C), _EDGES),
    "SAGEConv, max": (lambda n: n.SAGEConv(C, C, aggr="max"), _EDGES),
    "SAGEConv, lstm": (lambda n: n.SAGEConv(C, C, aggr="lstm"), lambda g: (_sorted(g.ends()),)),
    "GraphConv": (lambda n: n.GraphConv(C, C), _WEIGHTS),
    "GatedGraphConv": (lambda n: n.GatedGraphConv(C, 2), _EDGES),
    "ResGatedGraphConv": (lambda n: n.ResGatedGraphConv(C, C), _EDGES),
    "GATConv": (lambda n: n.GATConv(C, 4, heads=2), _EDGES),
    "GATConv, edges": (lambda n: n.GATConv(C, 4, heads=2, edge_dim=C), _VALUES),
    "GATv2Conv": (lambda n: n.GATv2Conv(C, 4, heads=2), _EDGES),
    "TransformerConv": (lambda n: n.TransformerConv(C, 4, heads=2), _EDGES),
    "TransformerConv, edges": (lambda n: n.TransformerConv(C, 4, 2, edge_dim=C), _VALUES),
    "AGNNConv": (lambda n: n.AGNNConv(), _EDGES),
    "TAGConv": (lambda n: n.TAGConv(C, C), _EDGES),
    "GINConv": (lambda n: n.GINConv(_mlp(C, C)), _EDGES),
    "GINEConv": (lambda n: n.GINEConv(_mlp(C, C)), _VALUES),
    "ARMAConv": (lambda n: n.ARMAConv(C, C, 2, 2), _EDGES),
    "SGConv": (lambda n: n.SGConv(C, C, 2), _EDGES),
    "SSGConv": (lambda n: n.SSGConv(C, C, 0.1, 2), _EDGES),
    "APPNP": (lambda n: n.APPNP(3, 0.1), _EDGES),
    "MFConv": (lambda n: n.MFConv(C, C, 4), _EDGES),
    "RGCNConv": (lambda n: n.RGCNConv(C, C, 3), lambda g: (g.ends(), g.kinds(E))),
    "FastRGCNConv": (lambda n: n.FastRGCNConv(C, C, 3), lambda g: (g.ends(), g.kinds(E))),
    "RGATConv": (lambda n: n.RGATConv(C, C, 3), lambda g: (g.ends(), g.kinds(E))),
    "SignedConv": (lambda n: n.SignedConv(C, C, True), lambda g: (g.ends(), g.ends().flip(0))),
    "DNAConv": (lambda n: _Stacked(n.DNAConv(C)), _EDGES),
    "PointNetConv": (lambda n: n.PointNetConv(_mlp(C + 3, C)), _POSITIONS),
    "GMMConv": (lambda n: n.GMMConv(C, C, 2, 3), lambda g: (g.ends(), g.at_edges(2))),
    "SplineConv": (lambda n: n.SplineConv(C, C, 2, 3), lambda g: (g.ends(), g.at_edges(2))),
    "NNConv": (lambda n: n.NNConv(C, C, _mlp(4, C * C)), lambda g: (g.ends(), g.at_edges(4))),
    "CGConv": (lambda n: n.CGConv(C), _EDGES),
    "EdgeConv": (lambda n: n.EdgeConv(_mlp(2 * C, C)), _EDGES),
    "DynamicEdgeConv": (lambda n: n.DynamicEdgeConv(_mlp(2 * C, C), 3), lambda g: ()),
    "XConv": (lambda n: n.XConv(C, C, 3, 3), lambda g: (g.at_nodes(3),)),
    "GravNetConv": (lambda n: n.GravNetConv(C, C, 3, 3, 3), lambda g: ()),
    "PPFConv": (
        lambda n: n.PPFConv(_mlp(C + 4, C)),
        lambda g: (g.at_nodes(3), g.at_nodes(3), g.ends()),
    ),
    "FeaStConv": (lambda n: n.FeaStConv(C, C, 2), _EDGES),
    "PointTransformerConv": (lambda n: n.PointTransformerConv(C, C), _POSITIONS),
    "HypergraphConv": (lambda n: n.HypergraphConv(C, C), _EDGES),
    "LEConv": (lambda n: n.LEConv(C, C), _EDGES),
    "PNAConv": (
        lambda n: n.PNAConv(
            C, C, ["mean", "min", "max", "std"], ["identity", "attenuation"], torch.arange(1, 9)
        ),
        _EDGES,
    ),
    "ClusterGCNConv": (lambda n: n.ClusterGCNConv(C, C), _EDGES),
    "GENConv": (lambda n: n.GENConv(C, C), _EDGES),
    "GENConv, powermean": (lambda n: n.GENConv(C, C, aggr="powermean", learn_p=True), _EDGES),
    "GCN2Conv": (lambda n: n.GCN2Conv(C, 0.1), lambda g: (g.at_nodes(C), g.ends())),
    "PANConv": (lambda n: n.PANConv(C, C, 2), _EDGES),
    "WLConvContinuous": (lambda n: n.WLConvContinuous(), _WEIGHTS),
    "FiLMConv": (lambda n: n.FiLMConv(C, C), _EDGES),
    "SuperGATConv": (lambda n: n.SuperGATConv(C, 4, 2), _EDGES),
    "FAConv": (lambda n: n.FAConv(C), lambda g: (g.at_nodes(C), g.ends())),
    "EGConv": (lambda n: n.EGConv(C, C), _EDGES),
    "PDNConv": (lambda n: n.PDNConv(C, C, 4, 4), lambda g: (g.ends(), g.at_edges(4))),
    "GeneralConv": (lambda n: n.GeneralConv(C, C), _EDGES),
    "HEATConv": (
        lambda n: n.HEATConv(C, C, 2, 3, 4, 4, 4),
        lambda g: (g.ends(), g.kinds(N, 2), g.kinds(E), g.at_edges(4)),
    ),
    "LGConv": (lambda n: n.LGConv(), _EDGES),
    "PointGNNConv": (
        lambda n: n.PointGNNConv(_mlp(C, 3), _mlp(C + 3, C), _mlp(C, C)),
        _POSITIONS,
    ),
    "GPSConv": (lambda n: n.GPSConv(C, n.GINConv(_mlp(C, C)), heads=2, norm=None), _EDGES),
    "AntiSymmetricConv": (lambda n: n.AntiSymmetricConv(C), _EDGES),
    "DirGNNConv": (lambda n: n.DirGNNConv(n.SAGEConv(C, C)), _EDGES),
    "MixHopConv": (lambda n: n.MixHopConv(C, C), _EDGES),
    "HGTConv": (lambda n: _Hetero(n.HGTConv(C, C, (["n"], [("n", "to", "n")]), 2)), _EDGES),
    "HANConv": (lambda n: _Hetero(n.HANConv(C, C, (["n"], [("n", "to", "n")]), 2)), _EDGES),
    "HeteroConv": (
        lambda n: _Hetero(
            n.HeteroConv({("n", "to", "n"): n.SAGEConv(C, C), ("n", "of", "n"): n.GATConv(C, C)}),
            both=True,
        ),
        _EDGES,
    ),
}
#: Layers without a gradient, for other libraries or other devices.
LEFT_OUT = (
    *("MessagePassing", "WLConv", "MeshCNNConv"),
    *("CuGraphSAGEConv", "CuGraphGATConv", "CuGraphRGCNConv", "FusedGATConv"),
)


def _sorted(ends: Tensor) -> Tensor:
    return ends[:, ends[1].argsort()]


class _Stacked(nn.Module):
    """A layer over several earlier results."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        found: Tensor = self.layer(torch.stack([x, 2 * x], 1), ends)
        return found


class _Hetero(nn.Module):
    """A layer over kinds of nodes and edges, of which there is one."""

    def __init__(self, layer: nn.Module, both: bool = False) -> None:
        super().__init__()
        self.layer, self.both = layer, both

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        pairs = {("n", "to", "n"): ends}
        if self.both:
            pairs["n", "of", "n"] = ends.flip(0)
        found: Tensor = self.layer({"n": x}, pairs)["n"]
        return found


def step(layer: nn.Module, run: Callable[..., Any], arguments: Sequence[Any]) -> list[Tensor]:
    """Results and gradients of features and parameters."""
    torch.manual_seed(5)
    x = arguments[0].detach().requires_grad_()
    out = run(x, *arguments[1:])
    out = out[0] if isinstance(out, tuple) else out
    leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
    slopes = torch.autograd.grad(out.sin().sum(), leaves, allow_unused=True)
    return [out.detach(), *(torch.zeros(()) if s is None else s for s in slopes)]


@dataclass(frozen=True)
class Found:
    """What became of a layer."""

    eager: bool
    agrees: bool = False
    fused: int = 0
    warned: tuple[str, ...] = ()
    why: str = ""


def checked(name: str, pyg: Any, device: str = "cpu") -> Found:
    make, more = LAYERS[name]
    torch._dynamo.reset()
    insum.fusion.clear()
    torch.manual_seed(0)
    given = Given(torch.device(device))
    try:
        layer = make(pyg).to(device, torch.float64).eval()
        arguments = (given.at_nodes(C), *more(given))
        want = step(layer, layer, arguments)
    except Exception as error:  # packages that are not there, for one
        return Found(False, why=f"{type(error).__name__}: {error}".splitlines()[0])
    options = {"insum.fuse": "always", "insum.rest": "eager"}
    run = torch.compile(layer, backend="insum", options=options)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            got = step(layer, run, arguments)
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)
        except Exception as error:
            return Found(True, why=f"{type(error).__name__}: {error}"[:300])
    ours = tuple(str(w.message) for w in seen if "insum" in str(w.message))
    return Found(True, True, len(insum.fusion.report().fused), ours)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--gpu", action="store_true")
    asked = parser.parse_args()
    import torch_geometric.nn as pyg

    counts, bad = Counter[str](), 0
    for name in asked.only.split(",") if asked.only else LAYERS:
        found = checked(name, pyg, "cuda" if asked.gpu else "cpu")
        counts["layers"] += 1
        counts["run in eager mode"] += found.eager
        counts["agree"] += found.agrees
        counts["fuse something"] += found.fused > 0
        counts["warn"] += bool(found.warned)
        bad += found.eager and (not found.agrees or bool(found.warned))
        if not found.agrees or found.warned:
            print(f"{name}: {found.why} {'; '.join(found.warned)}", flush=True)
    print(", ".join(f"{name} {count}" for name, count in counts.items()))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
