"""Whether the C++ compiler gives shared libraries a C++ runtime of their own, and how to keep it
from doing so.

A compiled package is loaded into a process in which torch already uses ``libstdc++.so.6``. Some
compilers are set up to link that library statically; the package then brings a second copy whose
streams, locales and exceptions are not those of torch, and the process dies while it loads the
package. It is enough to name the shared library before the compiler names its own.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from pathlib import Path

from insum.compat import compiler

#: As a linker's option -l takes it: this very file, wherever libraries are looked for.
SHARED = ":libstdc++.so.6"
#: Needs the runtime, so that a linker which drops unused libraries keeps it.
PROBE = (
    "#include <stdexcept>\n"
    'extern "C" void probe(const char* text) { throw std::runtime_error(text); }\n'
)


def libraries() -> list[str]:
    """What a package must be linked with so that it uses torch's C++ runtime: nothing, where the
    compiler sees to it.

    >>> libraries() in ([], [":libstdc++.so.6"])
    True
    """
    found = compiler.cxx_compiler()
    return list(_needed(found)) if sys.platform == "linux" and found is not None else []


@functools.cache
def _needed(command: str) -> tuple[str, ...]:
    if _linked(command) != "statically":
        return ()
    return (SHARED,) if _linked(command, f"-l{SHARED}") == "dynamically" else ()


def _linked(command: str, *options: str) -> str:
    """How this compiler links the C++ runtime into a shared library: "dynamically", "statically",
    or "" where it cannot be told.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "probe.cpp", Path(folder) / "probe.so"
        source.write_text(PROBE)
        arguments = ["-shared", "-fPIC", str(source), "-o", str(library), *options]
        try:
            done = subprocess.run(
                [command, *arguments], capture_output=True, timeout=60, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        if done.returncode or not library.exists():
            return ""
        names = library.read_bytes()
    return "dynamically" if b"\0libstdc++.so" in names or b"\0libc++.so" in names else "statically"
