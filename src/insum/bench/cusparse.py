"""cuSPARSE's products of a CSR matrix and a dense one, called directly: each of its three
algorithms, prepared ahead.

What PyTorch calls is the second of them, without preparation.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: The numbers of ``cusparseSpMMAlg_t``.
ALGORITHMS = {"CSR_ALG1": 4, "CSR_ALG2": 6, "CSR_ALG3": 12}
#: The numbers of ``cudaDataType``.
_DTYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_INT32, _FROM_ZERO, _ROW_MAJOR = c_int(2), c_int(0), c_int(2)


@functools.cache
def library() -> ctypes.CDLL | str:
    """The library that PyTorch has loaded, or why there is none."""
    names = ["libcusparse.so.12", *map(str, _beside_torch())]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return "the library libcusparse.so.12 was not found"


def _beside_torch() -> list[Path]:
    """Where packages of CUDA put it: next to the package of PyTorch."""
    return sorted(Path(torch.__file__).parents[1].glob("nvidia/**/libcusparse.so.12"))


class CusparseProduct:
    """``C = A @ B`` with everything but the product done ahead: descriptors, workspace, and the
    library's own preparation.
    """

    def __init__(self, csr: Tensor, b: Tensor, algorithm: str) -> None:
        found = library()
        if isinstance(found, str):
            raise RuntimeError(found)
        self.library, rows = found, csr.shape[0]
        # the library keeps addresses: what lies there stays
        self.held = (csr.crow_indices().int(), csr.col_indices().int(), csr.values(), b)
        self.result = b.new_empty(rows, b.shape[1])
        self.handle = c_void_p()
        self._call("cusparseCreate", byref(self.handle))
        self._on_this_stream()
        scales = c_float(1), c_float(0)
        self.arguments = (
            self.handle,
            c_int(0),
            c_int(0),
            byref(scales[0]),
            self._sparse(csr),
            self._dense(b),
            byref(scales[1]),
            self._dense(self.result),
            c_int(_DTYPES[torch.float32]),
            c_int(ALGORITHMS[algorithm]),
        )
        size = c_size_t(0)
        self._call("cusparseSpMM_bufferSize", *self.arguments, byref(size))
        self.workspace = torch.empty(max(size.value, 16), dtype=torch.uint8, device=b.device)
        self._call("cusparseSpMM_preprocess", *self.arguments, _address(self.workspace))

    def __call__(self) -> Tensor:
        self._on_this_stream()
        self._call("cusparseSpMM", *self.arguments, _address(self.workspace))
        return self.result

    def _on_this_stream(self) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self._call("cusparseSetStream", self.handle, c_void_p(stream))

    def _sparse(self, csr: Tensor) -> c_void_p:
        made, (starts, columns, values, _) = c_void_p(), self.held
        sizes = (c_int64(n) for n in (*csr.shape, values.numel()))
        kinds = (_INT32, _INT32, _FROM_ZERO, c_int(_DTYPES[values.dtype]))
        addresses = map(_address, (starts, columns, values))
        self._call("cusparseCreateCsr", byref(made), *sizes, *addresses, *kinds)
        return made

    def _dense(self, matrix: Tensor) -> c_void_p:
        made, (rows, columns) = c_void_p(), matrix.shape
        sizes = (c_int64(rows), c_int64(columns), c_int64(columns))
        kind = c_int(_DTYPES[matrix.dtype])
        self._call("cusparseCreateDnMat", byref(made), *sizes, _address(matrix), kind, _ROW_MAJOR)
        return made

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} failed with status {status}")


def _address(tensor: Tensor) -> c_void_p:
    return c_void_p(tensor.data_ptr())
