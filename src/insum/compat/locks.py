"""Locks that a forked process can take."""

from __future__ import annotations

import os
from typing import Any


def renew_in_children(lock: Any) -> None:
    """Let a forked process begin with a lock that is free: a thread that held it is not there to
    let go of it.
    """
    if hasattr(os, "register_at_fork") and hasattr(lock, "_at_fork_reinit"):
        os.register_at_fork(after_in_child=lock._at_fork_reinit)
