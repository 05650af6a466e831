"""The folder in which kernels and tuned choices are kept, and how files come to stand in it."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import stat
import tempfile
import time
from pathlib import Path

log = logging.getLogger("insum")


def cache_folder() -> Path:
    """Where kernels and tuned choices are kept: ``INSUM_CACHE_DIR``, else ``~/.cache/insum``, else
    a temporary folder.
    """
    wanted = os.environ.get("INSUM_CACHE_DIR")
    return _usable(wanted or os.path.join(os.path.expanduser("~"), ".cache", "insum"))


@functools.cache
def _usable(wanted: str) -> Path:
    """The folder that is wanted; one of our own among the temporary files where that cannot be
    written, or where other users can write to it: what is kept there is run.
    """
    why = _unusable(Path(wanted))
    if not why:
        return _tidied(Path(wanted))
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    try:
        other = Path(tempfile.gettempdir()) / f"insum-{user}"
        if _unusable(other):  # somebody else's, say, who was here first
            other = Path(tempfile.mkdtemp(prefix="insum-"))
    except OSError:  # nothing can be written anywhere
        log.warning("insum: the cache folder %s %s; nothing is kept on disk", wanted, why)
        return Path(wanted)
    log.warning("insum: the cache folder %s %s; %s is used instead", wanted, why, other)
    return _tidied(other)


#: Seconds after which a file that is being written has no writer any more.
ABANDONED = 3600.0

_HALF_WRITTEN = ".writing-"


def _tidied(folder: Path) -> Path:
    """A folder without what writers have left that were killed."""
    for part in (folder / "kernels", folder / "tuned"):
        with contextlib.suppress(OSError):
            for path in (*part.glob(f"{_HALF_WRITTEN}*"), *part.glob("[kb]*.tmp")):
                if time.time() - path.stat().st_mtime > ABANDONED:
                    path.unlink(missing_ok=True)
    return folder


def write_whole(path: Path, text: str) -> None:
    """All or nothing: written under another name, then renamed, so that nobody ever reads half a
    file; nothing is left where that fails.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_HALF_WRITTEN)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@functools.lru_cache(maxsize=256)
def warn_unwritten(folder: Path, why: str) -> None:
    """Say once that what is made is not kept on disk, and why."""
    log.warning("insum: nothing is kept in %s (%s); all else works as before", folder, why)


def _unusable(folder: Path) -> str:
    if folder.parts[:1] == ("~",):
        return "cannot be found: there is no home folder"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        parts = [
            folder,
            *(part for name in ("kernels", "tuned") if (part := folder / name).exists()),
        ]
        return "can be written by other users" if any(map(_is_shared, parts)) else ""
    except OSError as error:
        return f"cannot be written ({error.strerror})"


def _is_shared(folder: Path) -> bool:
    """Whether a folder belongs to somebody else, or others may write to it; a group of the user's
    own name is no other.
    """
    if not hasattr(os, "getuid"):
        return False
    about, me = folder.stat(), os.getuid()
    if about.st_uid not in (me, 0) or about.st_mode & stat.S_IWOTH:
        return True
    return bool(about.st_mode & stat.S_IWGRP) and not _is_own_group(about.st_gid, me)


def _is_own_group(group: int, user: int) -> bool:
    import grp
    import pwd

    try:
        name, found = pwd.getpwuid(user).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return found.gr_name == name and set(found.gr_mem) <= {name}
