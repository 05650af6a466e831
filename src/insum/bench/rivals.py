"""Who we are compared with: what each rival needs, and why it is missing where it is."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from insum.bench import cusparse
from insum.bench.records import Missing
from insum.compat import sparse
from insum.host.library import has_library


@dataclass(frozen=True)
class Rival:
    """A library or a part of PyTorch: what is imported, whether it needs a GPU, and the lines of
    kernel code behind it (the paper's counts).
    """

    name: str
    modules: tuple[str, ...] = ()
    gpu: bool = False
    lines: int | None = None

    def absent(self, device: torch.device) -> str:
        """Empty where the rival can be measured on this device, else why not."""
        for module in self.modules:
            if reason := why_not(module):
                return reason
        if self.gpu and device.type != "cuda":
            return "needs a GPU"
        if self.name == "TorchBSR" and isinstance(found := sparse.bsr_kernels(), str):
            return found
        if self.name == "cuSPARSE" and isinstance(absent := cusparse.library(), str):
            return absent
        if self.name == "torch.sparse BSR" and device.type == "cpu" and not has_library():
            return "torch was built without MKL"
        return ""


TORCH_BSR = Rival("TorchBSR", gpu=True, lines=202)
SPARSE_BSR = Rival("torch.sparse BSR")
E3NN = Rival("e3nn", ("e3nn", "e3nn.o3"), lines=225)
CUEQUIVARIANCE = Rival("cuEquivariance", ("cuequivariance", "cuequivariance_torch"), gpu=True)
OPENEQUIVARIANCE = Rival("OpenEquivariance", ("openequivariance",), gpu=True)
SPCONV = Rival("spconv", ("spconv", "spconv.pytorch"), gpu=True)
TORCHSPARSE = Rival("TorchSparse", ("torchsparse", "torchsparse.nn"), gpu=True, lines=4491)
WARPCONVNET = Rival("WarpConvNet", ("warpconvnet", "warpconvnet.nn.modules.sparse_conv"), gpu=True)
FLEXGEMM = Rival("FlexGEMM", ("flex_gemm", "flex_gemm.ops.spconv"), gpu=True)
CUSPARSE = Rival("cuSPARSE", gpu=True)
PYG = Rival("PyG", ("torch_geometric", "torch_geometric.nn"))

#: The rivals of each benchmark that may be missing; Nearly all of PyTorch's own always are there.
RIVALS: dict[str, tuple[Rival, ...]] = {
    "block-spmm": (TORCH_BSR, SPARSE_BSR),
    "spmm": (PYG, CUSPARSE),
    "conv": (SPCONV, TORCHSPARSE, FLEXGEMM),
    "unet": (FLEXGEMM, SPCONV, WARPCONVNET),
    "tensor-product": (E3NN, CUEQUIVARIANCE, OPENEQUIVARIANCE),
    "ablation": (TORCH_BSR,),
    "compilers": (),
    "gallery": (),
    "survey": (),
    "equivariant": (E3NN, CUEQUIVARIANCE, OPENEQUIVARIANCE),
}


@functools.cache
def why_not(module: str) -> str:
    """Empty where a module can be imported, else the error's text."""
    try:
        importlib.import_module(module)
    except Exception as error:  # a package that is there but broken is missing too
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return ""


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


def missing(benchmark: str, device: torch.device) -> list[Missing]:
    """The rivals that are not measured, by name and reason."""
    return [
        Missing(rival.name, reason)
        for rival in RIVALS[benchmark]
        if (reason := rival.absent(device))
    ]


def present(rivals: Sequence[Rival], device: torch.device) -> list[Rival]:
    return [rival for rival in rivals if not rival.absent(device)]
