"""What ``triton.language`` makes of a call hangs on types and on the numbers in a kernel's text: it
is written for a compiler, which knows no data. So which of the interpreter's operations a call
comes down to is noted, and done again from the note where types and numbers are the same.

The operations stay the interpreter's own. A call that does ask for data is found, and not noted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

#: Operations on numbers one by one: NumPy needs no copies of what is broadcast to them.
_ONE_BY_ONE = """
fadd fsub fmul fdiv frem add sub mul sdiv udiv srem urem precise_divf shl lshr and or xor
minsi minui minimumf minnumf maxsi maxui maximumf maxnumf select fma addptr
icmpSLE icmpSLT icmpSGE icmpSGT icmpULE icmpULT icmpUGE icmpUGT icmpEQ icmpNE
fcmpOLT fcmpOGT fcmpOLE fcmpOGE fcmpOEQ fcmpONE fcmpULT fcmpUGT fcmpULE fcmpUGE fcmpUEQ fcmpUNE
"""
ELEMENTWISE = frozenset(f"create_{name}" for name in _ONE_BY_ONE.split())
#: What stands in a kernel's text, but for Triton's own constants and types.
PLAIN = frozenset((int, float, bool, str, type(None)))


class Memory:
    """The calls of ``triton.language`` that one interpreter has seen."""

    def __init__(self, interpreter: Any, tl: Any) -> None:
        self.semantic, self.builder = (
            interpreter.interpreter_semantic,
            interpreter.interpreter_builder,
        )
        self.tensor, self.handle = tl.tensor, interpreter.TensorHandle
        self.np_dtype = interpreter._get_np_dtype
        self.constants, self.types = tl.constexpr, tl.dtype
        self.groups = frozenset((tuple, list, tl.core.tuple))
        self.noting = False

    def remembered(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, from notes where there are any."""
        tensor, key_of, semantic, new = self.tensor, self.key_of, self.semantic, object()
        notes: dict[Any, Callable[..., Any] | None] = {}

        def call(*args: Any, **named: Any) -> Any:
            named.pop("_semantic", None)
            if self.noting:  # a part of what is noted
                return function(*args, **named, _semantic=semantic)
            key, handles = [*named], []
            for one in (*args, *named.values()) if named else args:
                kind = one.__class__
                if kind is tensor:
                    key.append(one.type.name)
                    handles.append(one.handle)
                else:
                    key.append((kind, one) if kind in PLAIN else key_of(one))
            at = tuple(key)
            try:
                known = notes.get(at, new)
            except TypeError:  # something that does not stand in a kernel's text
                known = None
            if known is new:
                result, notes[at] = self.noted(function, args, named)
                return result
            return known(*handles) if known else function(*args, **named, _semantic=semantic)

        return call

    def key_of(self, one: Any) -> Any:
        """What is no tensor: its type and its value, or itself."""
        kind = one.__class__
        if kind in PLAIN:
            return kind, one
        if kind is self.constants:
            return kind, self.key_of(one.value)
        if isinstance(one, self.types):
            return kind, one.name
        if kind in self.groups:
            return kind, *map(self.key_of, one)
        if kind is slice:
            return kind, self.key_of(one.start), self.key_of(one.stop), self.key_of(one.step)
        return kind, one

    def noted(
        self, function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[Any, Callable[..., Any] | None]:
        """What a call gives that is seen for the first time, and the note for the next."""
        args = tuple(map(self.apart, args))
        named = {name: self.apart(one) for name, one in named.items()}
        given = [one.handle for one in (*args, *named.values()) if one.__class__ is self.tensor]
        note = _Note(self, given)
        asked, self.noting, self.semantic.builder = self.asked(note), True, note
        try:
            result = function(*args, **named, _semantic=self.semantic)
        finally:
            self.noting, self.semantic.builder = False, self.builder
            for name, before in asked.items():
                setattr(self.tensor, name, before)
        return result, note.finished(self.tensor, result)

    def apart(self, one: Any) -> Any:
        """A tensor by a handle of its own, even where another argument is the same."""
        if one.__class__ is not self.tensor:
            return one
        return self.tensor(self.handle(one.handle.data, one.handle.dtype), one.type)

    def asked(self, note: _Note) -> dict[str, Any]:
        """From now on the note is told where data is asked for. What is exchanged for that."""
        found = {name: getattr(self.tensor, name) for name in ("__bool__", "__index__")}
        for name, before in found.items():

            def asking(one: Any, before: Callable[[Any], Any] = before) -> Any:
                note.ask(one.handle)
                return before(one)

            setattr(self.tensor, name, asking)
        return found


class _Note:
    """Stands for the interpreter's builder while one call is noted: a function of handles, in
    Python.
    """

    def __init__(self, memory: Memory, given: Sequence[Any]) -> None:
        self.builder, self.handle, self.np_dtype = memory.builder, memory.handle, memory.np_dtype
        self.fits = True
        #: Names in the text: of handles by their identity, and of everything else.
        self.names = {id(one): f"given{k}" for k, one in enumerate(given)}
        self.known: dict[str, Any] = {}
        self.parameters = ", ".join(self.names.values())
        self.kept = list(given)  # none of them makes way for another of the same identity
        self.constant: set[int] = set()
        #: What is broadcast, before it is: its name and its shape.
        self.narrow: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.steps: list[tuple[str, str, bool]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.builder, name)
        return partial(self.do, name, found) if name.startswith(("create_", "get_")) else found

    def do(self, name: str, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        result = function(*args, **named)
        self.fits &= not named
        self.kept.append(result)
        handles = [one for one in args if isinstance(one, self.handle)]
        constant = all(id(one) in self.constant for one in handles)
        if name.startswith("get_") or (name == "create_splat" and constant):
            self.constant.add(id(result))
            self.names[id(result)] = self.name(result)
        else:
            texts = self.texts(name, args, handles, result)
            self.step(f"{self.name(function)}({', '.join(texts)})", result, name)
        if name in ("create_splat", "create_broadcast"):
            self.note_narrow(name, *handles, result)
        return result

    def texts(self, name: str, args: Sequence[Any], handles: list[Any], result: Any) -> list[str]:
        """Arguments in the text; of elementwise operations as they were before broadcasting."""
        if name in ELEMENTWISE:
            slim = [self.narrow.get(id(one), ("", one.data.shape)) for one in handles]
            if np.broadcast_shapes(*[shape for _, shape in slim]) == result.data.shape:
                return [text or self.text(one) for (text, _), one in zip(slim, handles)]
        return [self.text(one) for one in args]

    def note_narrow(self, name: str, before: Any, result: Any) -> None:
        text, shape = self.narrow.get(id(before), (self.text(before), before.data.shape))
        if name == "create_splat" and id(before) not in self.constant:
            text = self.step(f"{self.name(self.as_splat)}({text})", None, name)
        self.narrow[id(result)] = text, shape

    def as_splat(self, one: Any) -> Any:
        """Splatting makes data as wide as its handle says: that of truth values says either."""
        dtype = self.np_dtype(one.dtype)
        return one if one.data.dtype == dtype else self.handle(one.data.astype(dtype), one.dtype)

    def step(self, text: str, result: Any, name: str) -> str:
        target = f"step{len(self.steps)}"
        self.steps.append((target, text, name in ("create_splat", "create_broadcast")))
        if isinstance(result, self.handle):
            self.names[id(result)] = target
        return target

    def name(self, what: Any) -> str:
        name = f"known{len(self.known)}"
        self.known[name] = what
        return name

    def text(self, one: Any) -> str:
        if isinstance(one, self.handle):
            self.fits &= id(one) in self.names
            return self.names.get(id(one), "")
        if isinstance(one, (list, tuple)):
            return f"[{', '.join(map(self.text, one))}]"
        return self.name(one)

    def ask(self, handle: Any) -> None:
        """Larger tensors than of one number are true whatever they hold."""
        self.fits &= handle.data.size != 1 or id(handle) in self.constant

    def finished(self, tensor: type, result: Any) -> Callable[..., Any] | None:
        """None where something was asked that another call may answer otherwise."""
        if result is None:
            ending = []
        elif result.__class__ is tensor:
            made = self.name(tensor.__new__), self.name(tensor)
            ending = [
                f"result = {made[0]}({made[1]})",
                f"result.handle = {self.text(result.handle)}",
            ]
            ending += [
                f"result.{name} = {self.name(getattr(result, name))}"
                for name in ("shape", "numel", "type", "dtype")
            ]
            ending.append("return result")
        else:
            return None
        lines = ending
        for target, text, is_copy in reversed(self.steps):
            if not is_copy or re.search(rf"\b{target}\b", "\n".join(lines)):
                lines = [f"{target} = {text}", *lines]
        if not self.fits:
            return None
        exec(
            f"def again({self.parameters}):\n"
            + "\n".join(f"    {one}" for one in lines or ["pass"]),
            self.known,
        )
        return self.known["again"]
