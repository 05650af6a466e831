"""How the pass comes into ``torch.compile``: as the backend "insum", or as a pass of the default
backend.
"""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch.fx import Graph, GraphModule

from insum.bounded import is_first
from insum.compat import compiler
from insum.errors import SettingsError
from insum.fusion.rewrite import fuse
from insum.settings import settings

_FUSE, _REST = "insum.fuse", "insum.rest"
_RESTS = ("inductor", "eager")


def backend(
    module: GraphModule,
    inputs: Any,
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend that ``torch.compile(model, backend="insum")`` names.

    ``mode`` and ``options`` are Inductor's. Two options are ours: ``insum.fuse`` (as
    `settings.fuse`, for this model alone) and ``insum.rest``, what compiles the graph after fusion:
    ``"inductor"``, ``"eager"`` (nothing: quick to compile), or a function of a graph module and its
    inputs.

    Args:
        module: The graph that was captured.
        inputs: What it is compiled for.
        mode: Inductor's.
        options: Inductor's, and our own.

    Returns:
        What runs the graph.

    Raises:
        SettingsError: There is no such option, or no such value of one of ours.

    Examples:
        >>> import torch
        >>> quick = {"insum.rest": "eager"}
        >>> double = torch.compile(lambda x: x + x, backend="insum", options=quick)
        >>> double(torch.ones(2))
        tensor([2., 2.])
    """
    more = dict(options or {})
    wish, rest = str(more.pop(_FUSE, "")), more.pop(_REST, "inductor")
    unknown = [name for name in more if name.startswith("insum.")]
    if unknown:
        raise SettingsError(
            f"there is no option {unknown[0]!r}",
            expected=f"{_FUSE!r} or {_REST!r}; options without 'insum.' are Inductor's",
        )
    stray = next((name for name in more if not compiler.inductor_knows(name)), None)
    if stray is not None:
        near = get_close_matches(stray.rpartition(".")[2], ["fuse", "rest"], 1, 0.6)
        raise SettingsError(
            f"there is no option {stray!r}, neither of insum nor of Inductor",
            expected=f"{_FUSE!r}, {_REST!r}, or an option of torch._inductor.list_options()",
            remedy=f"'insum.{near[0]}'" if near else "",
        )
    if wish not in ("", "auto", "always", "never"):
        raise SettingsError(
            f"options['insum.fuse'] is {wish!r}", expected="'auto', 'always' or 'never'"
        )
    if not callable(rest) and rest not in _RESTS:
        raise SettingsError(
            f"options['insum.rest'] is {rest!r}",
            expected="'inductor', 'eager' or a function of a graph module and its inputs",
        )
    if rest != "inductor":
        compiled: Callable[..., Any] = compiler.aot(
            module,
            inputs,
            rest if callable(rest) else _as_it_is,
            functools.partial(_fuse, wish=wish),
        )
        return compiled
    patches = {**compiler.mode_options(mode), **more}
    found = _pass(wish)
    if found is None:
        _warn_once()
    else:
        patches["joint_custom_pre_pass"] = found
    compiled = compiler.inductor(module, inputs, patches)
    return compiled


def _as_it_is(module: GraphModule, inputs: Any) -> Callable[..., Any]:
    return compiler.boxed(module)


def _fuse(graph: Graph, wish: str = "") -> None:
    fuse(graph, wish)


def _fuse_for_inductor(graph: Graph, wish: str = "") -> None:
    fuse(graph, wish, captured=compiler.uses_cuda_graphs())


def _pass(wish: str = "") -> Any:
    return compiler.joint_pass(
        functools.partial(_fuse_for_inductor, wish=wish), (_identity(), wish or settings.fuse)
    )


@functools.cache
def _identity() -> str:
    """Tells this version of the pass from others, for caches of compiled graphs."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()


def _warn_once() -> None:
    if is_first("no pass over graphs"):
        warnings.warn(
            "insum: this version of torch takes no pass over its graphs; models are compiled "
            "by the default backend, nothing is fused",
            stacklevel=3,
        )


# --- the default backend --------------------------------------------------------------------------

_before: list[Any] = []


def enable() -> bool:
    """Fuse in everything that ``torch.compile`` compiles with its default backend from now on.
    False where this torch has no place for a pass.

    Returns:
        Whether there is one.

    Examples:
        >>> import insum.fusion
        >>> insum.fusion.enable()
        True
        >>> insum.fusion.disable()
    """
    if _before:
        return True
    found = _pass()
    if found is None:
        _warn_once()
        return False
    _before.append(compiler.exchange_joint_pass(found))
    return True


def disable() -> None:
    """End what `enable` began. Models that are compiled stay as they are.

    Examples:
        >>> enable()
        True
        >>> disable()
    """
    if _before:
        compiler.exchange_joint_pass(_before.pop())


@contextmanager
def enabled() -> Iterator[None]:
    """`enable` for the length of a ``with`` block: models that are compiled, that is, first called,
    within it.

    Yields:
        Nothing.

    Examples:
        >>> import insum.fusion
        >>> with insum.fusion.enabled():
        ...     pass
    """
    was = bool(_before)
    enable()
    try:
        yield
    finally:
        if not was:
            disable()


def register() -> None:
    """Make the name "insum" known to ``torch.compile``; where the package is installed, its entry
    point does.
    """
    compiler.register_backend("insum", backend)
