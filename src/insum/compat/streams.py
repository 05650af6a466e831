"""Devices and streams of GPUs, and whether a CUDA graph is recorded on one."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current_stream(device: torch.device) -> int:
    """The stream that work for a GPU is put on now, as a number; quicker than the object."""
    index = torch.cuda.current_device() if device.index is None else device.index
    if _raw_stream is None:
        return int(torch.cuda.current_stream(index).cuda_stream)
    return _raw_stream(index)


def stream_getter(device: torch.device) -> Callable[[], int]:
    """`current_stream` of a device as a function without arguments, and without a call of Python's
    where this torch has one; of a CPU always 0.
    """
    if device.type != "cuda":
        return int
    if _raw_stream is None or device.index is None:
        return functools.partial(current_stream, device)
    return functools.partial(_raw_stream, device.index)


def current_device() -> int:
    """The GPU that is current, -1 where there is none."""
    return torch.cuda.current_device() if torch.cuda.is_available() else -1


#: The GPU that is current, where there is one; without the calls of Python's in between.
device_now: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def stream_object(number: int, device: torch.device) -> Any:
    """The stream that `current_stream` gave as a number."""
    if not number:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(number, device)  # type: ignore[no-untyped-call]


#: Whether a CUDA graph is captured on the current stream; without the call of Python's in between.
is_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)

#: Loaded where a function may be recorded for ``mode="reduce-overhead"``.
CUDAGRAPH_TREES = "torch._inductor.cudagraph_trees"


def cudagraph_state(device: torch.device) -> str:
    """``warmup`` or ``recording`` while torch.compile(mode="reduce-overhead") runs a function so on
    this device; '' otherwise, or where torch does not tell.
    """
    trees = sys.modules.get(CUDAGRAPH_TREES)  # not loaded: nothing is recorded
    if trees is None:
        return ""
    try:
        # Functions are warmed up and recorded on a stream that is current at no other time, and
        # that is never the default one: which is told without looking for who records.
        if not current_stream(device):
            return ""
        index = torch.cuda.current_device() if device.index is None else device.index
        manager = _tree_manager(trees, index)
        if manager is None or torch.cuda.current_stream(device) != manager.stream:
            return ""
        return "recording" if torch.cuda.is_current_stream_capturing() else "warmup"
    except (AttributeError, TypeError, RuntimeError, AssertionError):
        return ""


def _tree_manager(trees: Any, index: int) -> Any:
    """What records graphs on a device, for this thread; None where nobody has."""
    containers = getattr(getattr(trees, "local", None), "tree_manager_containers", None)
    if containers is None:  # a thread of autograd's, or another version of torch
        return trees.get_manager(index, create_if_none_exists=False)
    found = containers.get(index)  # as torch's own does, without a lock and making nothing
    return None if found is None else found.tree_manager


def is_recorded(device: torch.device) -> bool:
    """Whether what is launched now becomes part of a CUDA graph, or lies in the memory of one."""
    if device.type != "cuda":
        return False
    if is_capturing():
        return True
    return CUDAGRAPH_TREES in sys.modules and bool(cudagraph_state(device))


def elsewhere(device: torch.device, function: Callable[[], T]) -> T:
    """Call a function in a thread and on a stream of its own, so that what it allocates does not
    lie in the memory of a CUDA graph that is being warmed up.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with torch.cuda.device(device), torch.cuda.stream(stream):
                results.append(function())
            stream.synchronize()
        except BaseException as error:
            errors.append(error)

    torch.cuda.current_stream(device).synchronize()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
