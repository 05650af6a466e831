"""Statements, formats and layers over several processes, on torch.distributed."""

from insum.distributed import dispatch as dispatch
