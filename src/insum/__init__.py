"""insum: one line of indirect einsum, one fast sparse GPU kernel."""

from insum.api import Insum, insum
from insum.errors import InsumError
from insum.settings import settings

__all__ = ["Insum", "InsumError", "insum", "settings"]
