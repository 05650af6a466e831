"""Triton's interpreter with less work around each operation, for these tests alone. What a kernel
computes stays the interpreter's own: each function here returns what the one it stands for returns,
and where Triton does not have that one, nothing is exchanged.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import linecache
import math
from typing import Any

from remembered_operations import Memory

#: What is exchanged or used here, of ``triton.runtime.interpreter``.
NEEDED = (
    "_LangPatchScope",
    "_patch_lang",
    "_patch_attr",
    "TensorHandle",
    "_get_np_dtype",
    "interpreter_semantic",
    "interpreter_builder",
    "InterpreterBuilder",
    "FunctionRewriter",
    "ReduceOps",
)


def quicken() -> bool:
    """Exchanges what costs most; says whether this Triton is one where that can be done."""
    import triton.language as tl
    from triton.runtime import interpreter

    if not all(hasattr(interpreter, name) for name in NEEDED):
        return False
    _patch_for_good(interpreter, tl)
    _look_up_dtypes(interpreter)
    _look_up_widths(interpreter.TensorHandle)
    _leave_out_checks_that_nobody_reads(interpreter.interpreter_builder)
    _broadcast_only_what_differs(interpreter.interpreter_semantic)
    _share_shapes(tl)
    _remember(interpreter, tl)
    interpreter.FunctionRewriter.rewrite_ast = _rewrite_in_its_file
    interpreter.InterpreterBuilder.create_expand_dims = _expand_dims
    interpreter.ReduceOps.generic_reduce = _reduce_by_slices
    return True


def _patch_for_good(interpreter: Any, tl: Any) -> None:
    """The interpreter patches ``triton.language`` for each launch and for each function that a
    kernel calls, and takes some of it back. Here it stays patched: nothing is compiled beside it.
    """
    patch, kept = interpreter._patch_lang, interpreter._LangPatchScope()
    functions, done = set(), set()

    def patch_lang(fn: Any) -> Any:
        if fn not in functions:
            functions.add(fn)
            names = fn.__globals__.values()
            seen = frozenset(id(one) for one in names if one is tl or one is tl.core)
            if seen not in done:
                patch(fn)
                done.add(seen)
        return kept

    interpreter._patch_lang = patch_lang


def _remember(interpreter: Any, tl: Any) -> None:
    """What a function of the language comes down to is noted for the types it was called with."""
    memory = Memory(interpreter, tl)

    def patch(of: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        scope.set_attr(of, name, memory.remembered(member))

    interpreter._patch_attr = patch


def _look_up_dtypes(interpreter: Any) -> None:
    """By the name of a type; the interpreter writes the table of all of them down each time."""
    look_up, found = interpreter._get_np_dtype, {}

    def get_np_dtype(dtype: Any) -> Any:
        known = found.get(dtype.name)
        if known is None:
            known = found[dtype.name] = look_up(dtype)
        return known

    interpreter._get_np_dtype = get_np_dtype


def _look_up_widths(handles: Any) -> None:
    """Each number of the interpreter is checked to be no wider than its type says."""
    widths: dict[str, float] = {}

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if (width := widths.get(dtype.name)) is None:
            bits = math.inf if dtype.is_ptr() else max(8, dtype.primitive_bitwidth)
            width = widths[dtype.name] = bits / 8
        if data.itemsize > width:
            self.__post_init__()  # which says so

    handles.__init__ = init


def _leave_out_checks_that_nobody_reads(builder: Any) -> None:
    """Each sum and product of integers is computed a second time to see whether it overflows, for
    an assertion that is made only where ``debug`` is set.
    """
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _broadcast_only_what_differs(semantic: Any) -> None:
    """Tiles of one shape need no broadcasting to it."""
    broadcast = semantic.broadcast_impl_value

    def broadcast_impl_value(lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape.values == right.shape.values:
            return lhs, rhs
        return broadcast(lhs, rhs)

    semantic.broadcast_impl_value = broadcast_impl_value


def _share_shapes(tl: Any) -> None:
    """Each value and each type of a kernel says its shape in compile-time constants; those of one
    shape are the same ones.
    """

    @functools.cache
    def constants(*shape: int) -> tuple[Any, Any]:
        numel = 1
        for size in shape:
            numel *= size
        return tl.core.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(numel)

    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle = handle
        self.shape, self.numel = constants(*(type.shape.values if type.is_block() else ()))
        self.type = type
        self.dtype = type.scalar

    tl.tensor.__init__ = init
    written_out, known = tl.block_type.__init__, {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *shape
        if key in known:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = known[key]
        else:
            written_out(self, element_ty, shape)
            known[key] = self.shape, self.numel, self.name

    tl.block_type.__init__ = init_type


def _rewrite_in_its_file(self: Any) -> Any:
    """The interpreter looks for the end of a function twice, token by token; a tree of its file
    knows it, and the lines.
    """
    file = self.fn.__code__.co_filename
    linecache.checkcache(file)
    lines = linecache.getlines(file, self.fn.__globals__)
    first = self.fn.__code__.co_firstlineno
    for node in ast.walk(ast.parse("".join(lines))):
        if isinstance(node, ast.FunctionDef) and node.name == self.fn.__name__:
            if first in (node.lineno, *(one.lineno for one in node.decorator_list)):
                node.decorator_list, self.filename = [], file
                tree = self.ast_transformer.visit(ast.Module([node], []))
                return self._compile_and_exec(ast.fix_missing_locations(tree))
    return self.fn  # as the interpreter: a function without a text stays as it is


def _expand_dims(self: Any, one: Any, axis: int) -> Any:
    """By an index, without NumPy's checks of the axis."""
    index = (*[slice(None)] * axis, None)
    return one.__class__(one.data[index], one.dtype.scalar)


def _reduce_by_slices(self: Any, input: tuple[Any, ...]) -> list[Any]:
    """One axis by an elementwise function, slice after slice instead of number after number."""
    import numpy as np

    parts, axis = self.unravel(input, self.axis)
    stacks = [np.moveaxis(part.handle.data, axis, 0) for part in parts]
    dtypes = [part.dtype for part in parts]
    total = tuple(self.to_tensor(stack[0], dtype) for stack, dtype in zip(stacks, dtypes))
    for k in range(1, len(stacks[0])):
        further = [self.to_tensor(stack[k], dtype) for stack, dtype in zip(stacks, dtypes)]
        merged = self.combine_fn.fn(*total, *further)
        total = merged if isinstance(merged, tuple) else (merged,)
    found = []
    for one, stack, dtype in zip(total, stacks, dtypes):
        data = one.handle.data.astype(stack.dtype).reshape(stack.shape[1:])
        if self.keep_dims:
            every = tuple(range(input[0].handle.data.ndim))
            data = np.expand_dims(data, every if self.axis is None else axis)
        found.append(self.to_tensor(data, dtype))
    return found
