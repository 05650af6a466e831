from __future__ import annotations
from insum.codegen.emit import Kernel
from insum.plan.config import Config
from insum.plan.plan import Plan
from collections.abc import Mapping

def emit_unrolled(plan: Plan, config: Config, extents: Mapping[str, int]) -> tuple[Kernel, int]:
    raise NotImplementedError
