"""`insum`, `compile`, `explain`: what users call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from insum.accepted import is_fake, odd_tensor, shown
from insum.call.lookup import kinds_with
from insum.call.prepared import Kinds, prepare
from insum.call.request import Request, SizesArgument, head, head_of_text, request_of
from insum.compat.calls import (
    PLAIN,
    autocasts,
    is_eager_call,
    is_intercepted,
    is_plain_call,
    is_undisturbed,
)
from insum.compat.contexts import without_autocast
from insum.compat.many import any_batched
from insum.compat.placed import is_placed, is_recordable
from insum.errors import BindingError, DeviceError, SettingsError, UnsupportedError
from insum.lang.bind import Problem, Size, Value
from insum.lang.expr import tensors_of
from insum.lang.parser import parse
from insum.ops.autocast import lowered
from insum.ops.eager import contract, run, run_lowered
from insum.ops.inplace import add_in_place
from insum.ops.mean import (
    as_sum,
    is_mean,
    known_sum,
    mean_of,
    mean_to_explain,
    multiplies_results,
    sum_of,
)
from insum.ops.traced import traced
from insum.plan.config import Config
from insum.plan.path import Optimize

if TYPE_CHECKING:
    from insum.distributed.explained import PlacedExplanation
    from insum.explanation import Explanation
    from insum.formats.explained import EinsumExplanation
    from insum.runtime.search import Tuned


def insum(
    statement: str,
    /,
    *,
    out_shape: Sequence[Size] | None = None,
    sizes: SizesArgument = None,
    padded: Sequence[str] = (),
    config: Config | Sequence[Config] | None = None,
    optimize: Optimize = True,
    **tensors: Value,
) -> Tensor:
    """Compute one indirect einsum.

    ``C[...] = ...`` returns a new tensor; a ``C`` that is passed gives only its shape and dtype.
    ``+=``, ``max=`` and ``min=`` accumulate into the ``C`` that is passed, in place, and return it;
    without one they start from zero, or from minus or plus infinity. ``mean=`` makes a new tensor,
    with 0 where there is nothing to take the mean of.

    Args:
        statement: One statement of the language.
        out_shape: The shape of the output, where the statement does not tell it (an output
            dimension that is indexed through a tensor).
        sizes: Single sizes, by index variable, by output dimension, or by a left-side index as it
            is written: ``{"i": 8, 0: 100}``.
        padded: Names of index tensors in which -1 marks an absent entry; such an entry contributes
            nothing.
        config: Tile sizes and launch options of the generated kernel, as `insum.tune` prints them;
            a path without one takes no notice.
        optimize: The order in which factors are multiplied, as in opt_einsum:
            ``True`` or ``"auto"`` (several statements where that is clearly better than one),
            ``False`` or ``"never"`` (one statement), ``"optimal"``, ``"greedy"`` (wherever several
            are cheaper), or a path such as ``[(1, 2), (0, 1)]``. `explain` prints the path.
        tensors: Every tensor that the statement names; a scalar may be a Python number. Arrays of
            NumPy are taken too (``+=`` writes into them), and formats, tensors of `torch.sparse`
            and arrays of SciPy as in `einsum`. DTensors give a DTensor, whose placement follows
            from theirs; one that is passed as the output of ``=`` gives its placement.

    Returns:
        The output: a new tensor, or the one that was passed and accumulated into.

    Raises:
        StatementError: The text is no statement.
        BindingError: Tensors and statement do not fit.
        DtypeError: A tensor has a dtype that cannot stand in its place.
        DeviceError: Tensors are on different devices.
        IndexRangeError: An index points outside of its dimension.

    Examples:
        >>> import torch, insum
        >>> rows, columns = torch.tensor([0, 0, 2]), torch.tensor([1, 3, 0])
        >>> values, x = torch.tensor([1.0, 2.0, 3.0]), torch.arange(4.0)
        >>> insum.insum(
        ...     "y[rows[p]] = values[p] * x[columns[p]]",
        ...     rows=rows, columns=columns, values=values, x=x, out_shape=(3,),
        ... )
        tensor([7., 0., 0.])
        >>> C = torch.ones(2, 2)
        >>> insum.insum("C[i,j] += A[i,k] * B[k,j]", C=C, A=torch.eye(2), B=torch.eye(2)) is C
        True
        >>> C
        tensor([[2., 1.],
                [1., 2.]])
    """
    if torch.compiler.is_compiling():
        if any(is_stranger(v) and hasattr(v, "index_arrays") for v in tensors.values()):
            from insum.formats.run import run_formats

            return cast(Tensor, run_formats(statement, tensors, False, out_shape, sizes, optimize))
        return traced(statement, out_shape, sizes, padded, config, optimize, tensors)
    kinds, given = kinds_with(statement, out_shape, sizes, padded, config, optimize)
    if kinds.means and is_undisturbed():
        kinds, given, tensors = known_sum(kinds, given, tensors) or (kinds, given, tensors)
    if autocasts() and _is_lowered(tensors):
        left = head_of_text(kinds.form.statement)
        if left.operator != "mean=" and (left.operator == "=" or left.target not in tensors):
            return run_lowered(kinds, left.target, given, tensors)
        tensors = lowered(left.target, tensors)
        with without_autocast():
            return _insum(kinds, given, tensors)
    quiet, call = is_undisturbed(), kinds.known(tensors, given)
    if call is None and any(map(is_stranger, tensors.values())):
        return _of_strangers(kinds, given, out_shape, sizes, optimize, tensors)
    if call is None and is_placed(tensors.values()):
        return _of_placed(kinds, given, tensors)
    if call is None or not quiet:
        return _insum(kinds, given, tensors)
    if call.prepared.target:
        return add_in_place(kinds.form.request(given), call, tensors)
    return run(call, tensors)


def sum_onto(
    base: Tensor,
    statement: str,
    /,
    *,
    out_shape: tuple[Size, ...],
    padded: tuple[str, ...] = (),
    **tensors: Any,
) -> Tensor:
    """A sum or a mean, plus a ``base`` that broadcasts to it, for layers: ``insum(...) + base``.

    In plain eager mode, and where all dtypes are the base's, that is one statement: the base is
    read where its sums are stored, and is rounded with them. Else it is two operations, of which
    compilers make what they can.
    """
    alike, dtype = not torch.compiler.is_compiling(), base.dtype
    for value in tensors.values():  # here: every function that is called is one more on the path
        inexact = value.is_floating_point() or value.is_complex()
        alike = alike and value.layout is torch.strided and (value.dtype is dtype or not inexact)
    if alike and is_plain_call((base, *tensors.values())):
        kinds, given = kinds_with(statement, out_shape, None, padded)
        total: Any = kinds, given, tensors
        if head_of_text(statement).operator == "mean=":
            if multiplies_results(base.device):
                return insum(statement, out_shape=out_shape, padded=padded, **tensors) + base
            total = as_sum(kinds, given, tensors)
        kinds, given, values = total
        kinds = kinds.accumulating or kinds.accumulate()
        call = kinds.known(values, given, base)
        if call is None and not any_batched((base, *values.values())):
            call = kinds.find(values, given, base)
        if call is not None:
            return run(call, values, None, base)
    return insum(statement, out_shape=out_shape, padded=padded, **tensors) + base


def _is_lowered(tensors: dict[str, Value]) -> bool:
    """Whether what autocast does to a call can be done here, past the dispatcher."""
    if not is_eager_call(tensors.values()):
        return False
    for value in tensors.values():
        common = type(value) in PLAIN and value.layout is torch.strided  # type: ignore[union-attr]
        if not common and is_stranger(value):
            return False
    return True


Insum = insum
"""The same function under the name that the paper gives it."""


def _insum(kinds: Kinds, sizes: tuple[Any, ...], tensors: dict[str, Value]) -> Tensor:
    left = head(kinds.form.statement)
    if left.operator == "mean=":
        return mean_of(kinds, sizes, tensors, _insum)
    in_place = left.operator != "=" and left.target in tensors
    request = kinds.form.request(sizes)
    if in_place and not isinstance(tensors[left.target], Tensor):
        request.bind(tensors)  # which says that a number cannot be written into
    if not is_plain_call(tensors.values()) or any_batched(tensors.values()):
        _refuse_strangers(request, tensors)
        return add_in_place(request, None, tensors) if in_place else contract(request, tensors)
    call = kinds.find(tensors, sizes)
    return add_in_place(request, call, tensors) if in_place else run(call, tensors)


def is_stranger(value: object) -> bool:
    """Whether an operand was made by another library, or is sparse."""
    if isinstance(value, Tensor):
        return value.layout is not torch.strided and not value.is_nested
    return not isinstance(value, bool | int | float | complex)


def _of_strangers(
    kinds: Kinds,
    given_sizes: tuple[Any, ...],
    out_shape: Sequence[Size] | None,
    sizes: SizesArgument,
    optimize: Optimize,
    tensors: dict[str, Any],
) -> Tensor:
    """A call with operands of NumPy, SciPy or torch.sparse, or with formats."""
    from insum.formats.operands import has_format, taken
    from insum.formats.run import run_formats

    form = kinds.form
    given = taken(form.statement, tensors)
    if not has_format(given):
        return _insum(kinds, given_sizes, given)
    if form.padded or form.config:
        raise BindingError(
            "an operand is sparse, and padded or config was given",
            statement=form.statement,
            expected="statements over sparse operands without them: they say it themselves",
        )
    return cast(Tensor, run_formats(form.statement, given, False, out_shape, sizes, optimize))


def _of_placed(kinds: Kinds, sizes: tuple[Any, ...], tensors: dict[str, Value]) -> Tensor:
    """A call over DTensors."""
    from insum.distributed import dispatch

    left = head(kinds.form.statement)
    in_place = left.target in tensors and left.operator != "="
    if in_place or left.operator == "mean=" or not is_recordable():
        return _insum(kinds, sizes, tensors)
    return dispatch.contract(kinds, tensors, sizes)


def _refuse_strangers(request: Request, tensors: dict[str, Value]) -> None:
    """What torch's dispatcher would stumble over: tensors without shape or strides, and a tracer's
    tensors beside others where nothing is traced.
    """
    given = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
    if any(map(odd_tensor, given.values())):
        request.bind(tensors)  # which says what is wrong
    fake = [name for name, value in given.items() if is_fake(value)]
    modes = {id(given[name].fake_mode): name for name in fake}  # type: ignore[attr-defined]
    if len(modes) > 1:
        first, second, *_ = modes.values()
        raise DeviceError(
            f"{first} and {second} are fake tensors of two modes",
            statement=request.statement,
            expected="all tensors of one FakeTensorMode, or none",
        )
    if fake and len(fake) < len(given) and not is_intercepted():
        other = next(name for name in given if name not in fake)
        raise DeviceError(
            f"{fake[0]} is a fake tensor, but {other} is none",
            statement=request.statement,
            expected="all tensors of one FakeTensorMode, or none",
        )


# --- a statement that is called often -------------------------------------------------------------


class Compiled:
    """A statement with its options, ready to be called with tensors; see `compile`.

    Args:
        statement: One statement of the language.
        out_shape: As in `insum`, like all other options.
        sizes: Single sizes.
        padded: Index tensors in which -1 marks an absent entry.
        config: Tile sizes and launch options.
        optimize: The order of contraction.

    Examples:
        >>> import insum, torch
        >>> isinstance(insum.compile("y[i] = A[i,j] * x[j]"), insum.Compiled)
        True
    """

    def __init__(
        self,
        statement: str,
        out_shape: Sequence[Size] | None,
        sizes: SizesArgument,
        padded: Sequence[str],
        config: Config | Sequence[Config] | None = None,
        optimize: Optimize = True,
    ) -> None:
        # what cannot be read fails here rather than at the first call
        request = request_of(statement, out_shape, sizes, padded, config, optimize)
        head(statement)
        self.statement = request.statement
        self.out_shape = None if out_shape is None else tuple(out_shape)
        self.sizes = dict(sizes) if sizes else None
        self.padded = request.padded
        self.config = request.config
        self.optimize = optimize
        self._request = request
        self._last: Problem | None = None

    def __call__(self, /, **tensors: Value) -> Tensor:
        options: dict[str, Any] = {
            "out_shape": self.out_shape,
            "sizes": self.sizes,
            "padded": self.padded,
            "config": self.config,
            "optimize": self.optimize,
        }
        for name in tensors:
            if name in options:
                raise BindingError(
                    f"{name} is an option, not a tensor",
                    statement=self.statement,
                    expected="the tensors of the statement: it was compiled with its options",
                    remedy=f"insum.compile(..., {name}=...)",
                )
        result = insum(self.statement, **options, **tensors)  # type: ignore[arg-type]
        if torch.compiler.is_compiling():
            return result
        plain = is_plain_call(tensors.values()) and not any(map(is_stranger, tensors.values()))
        if self._last is None and plain:
            self._last = self._request.bind(tensors)
        return result

    def tune(self, /, *, effort: str = "full", **tensors: Value) -> Tuned:
        """Search for the config that is fastest for tensors of these sizes; later calls use what
        was found. See `insum.tune`.
        """
        no_option(self.statement, "effort")
        return tuned(self._request, tensors, effort)

    def __reduce__(self) -> tuple[object, ...]:
        # options alone, so that a pickle holds no names that are not public
        options = self.out_shape, self.sizes, self.padded, self.config, self.optimize
        return Compiled, (self.statement, *options)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Compiled) and self._options() == other._options()

    def __hash__(self) -> int:
        return hash(self.statement)

    def _options(self) -> tuple[object, ...]:
        rest = self.padded, self.config, self._request.optimize
        return self.statement, self.out_shape, self.sizes, *rest

    def __repr__(self) -> str:
        options = [
            f"{n}={v!r}"
            for n, v in (
                ("out_shape", self.out_shape),
                ("sizes", self.sizes),
                ("padded", self.padded),
                ("config", self.config),
                ("optimize", "" if self.optimize is True else self.optimize),
            )
            if v or v is False
        ]
        text = f"insum.compile({', '.join([repr(self.statement), *options])})"
        if self._last is None:
            return text
        from insum.explanation import roles_line  # takes a while to import

        return f"{text}\n  {roles_line(self._last)}"


def compile(
    statement: str,
    *,
    out_shape: Sequence[Size] | None = None,
    sizes: SizesArgument = None,
    padded: Sequence[str] = (),
    config: Config | Sequence[Config] | None = None,
    optimize: Optimize = True,
) -> Compiled:
    """A reusable callable for one statement. It can be pickled and copied, and it prints itself.

    Args:
        statement: One statement of the language.
        out_shape: As in `insum`, like all other options.

    Returns:
        An object that is called with the tensors of the statement.

    Raises:
        StatementError: The text is no statement.

    Examples:
        >>> import torch, insum
        >>> matvec = insum.compile("y[i] = A[i,j] * x[j]")
        >>> matvec(A=torch.ones(2, 3), x=torch.arange(3.))
        tensor([3., 3.])
        >>> matvec
        insum.compile('y[i] = A[i,j] * x[j]')
          i: free, 2; j: reduced, 3
    """
    return Compiled(statement, out_shape, sizes, padded, config, optimize)


def explain(
    statement: str,
    /,
    *,
    out_shape: Sequence[Size] | None = None,
    sizes: SizesArgument = None,
    padded: Sequence[str] = (),
    config: Config | Sequence[Config] | None = None,
    optimize: Optimize = True,
    gpu: str = "",
    **tensors: Value,
) -> Explanation | EinsumExplanation | PlacedExplanation:
    """What a call would do: extents, roles of the indices, the graph as Python, FLOPs and bytes,
    and on a GPU the generated kernel with the time that the cost model predicts. Nothing is
    computed.

    Args:
        statement: One statement of the language.
        out_shape: As in `insum`, like all options that are not listed here.
        gpu: Show the kernel as a GPU of this architecture would get it, ``"sm_90"`` for an H100 or
            H200, ``"sm_80"`` for an A100; neither a GPU nor Triton has to be there.
        tensors: Every tensor that the statement names; of DTensors, how ranks share the work and
            what travels is told as well.

    Returns:
        An object that prints as a page of text, in notebooks too.

    Examples:
        >>> import torch, insum
        >>> page = insum.explain("y[i] = A[i,j]", A=torch.ones(2, 3), gpu="sm_90")
        >>> "@triton.jit" in page.fused
        True
        >>> print(insum.explain("y[i] = A[i,j] * x[j]", A=torch.ones(2, 3), x=torch.ones(3)))
        y[i] = A[i,j] * x[j]
        <BLANKLINE>
        index  extent  role
        i           2  free
        j           3  reduced
        <BLANKLINE>
        tensor  dtype    shape   device
        A       float32  (2, 3)  cpu
        x       float32  (3,)    cpu
        y       float32  (2,)    cpu (result)
        <BLANKLINE>
        def forward(A, x):
            contracted = torch.einsum('ij,j->i', A, x)
            contiguous = contracted.contiguous()
            return contiguous
        <BLANKLINE>
        12 FLOPs, 44 bytes at least, 0.3 FLOPs per byte
    """
    _check_gpu(statement, gpu)
    if any(map(is_stranger, tensors.values())):
        from insum.formats.explained import explain_einsum
        from insum.formats.operands import has_format, taken

        tensors = taken(statement, tensors)
        if has_format(tensors):
            told: dict[str, Any] = {"out_shape": out_shape, "sizes": sizes, "optimize": optimize}
            return explain_einsum(statement, **told, gpu=gpu, **cast(Any, tensors))
    if is_placed(tensors.values()):
        from insum.distributed.explained import explain_placed

        asked = request_of(statement, out_shape, sizes, padded, config, optimize)
        if is_mean(statement):
            asked, tensors = sum_of(asked, tensors)
        return explain_placed(asked, tensors, gpu)
    return explain_dense(
        statement,
        tensors,
        out_shape=out_shape,
        sizes=sizes,
        padded=padded,
        config=config,
        optimize=optimize,
        gpu=gpu,
    )


#: What Triton has compiled for, from Volta and CDNA on.
_ARCHITECTURES = re.compile(r"sm_([7-9]|1[0-2])\d[af]?|gfx(9|1[0-2])[0-9a-f]{2}")


def _check_gpu(statement: str, gpu: object) -> None:
    if isinstance(gpu, str) and (not gpu or _ARCHITECTURES.fullmatch(gpu)):
        return
    no_option(statement, "gpu")
    raise SettingsError(
        f"gpu is {shown(gpu)}",
        expected='an architecture, such as "sm_90" (H100, H200), "sm_80" (A100) or "gfx942"',
    )


def explain_dense(
    statement: str,
    tensors: Mapping[str, Value],
    *,
    out_shape: Sequence[Size] | None = None,
    sizes: SizesArgument = None,
    padded: Sequence[str] = (),
    config: Config | Sequence[Config] | None = None,
    optimize: Optimize = True,
    gpu: str = "",
) -> Explanation:
    """`explain` of a statement over tensors and numbers alone."""
    from insum.explanation import explained  # takes a while to import

    request = request_of(statement, out_shape, sizes, padded, config, optimize)
    if not is_mean(statement):
        return explained(request, tensors, gpu)
    total, given, words = mean_to_explain(request, tensors, on_gpu=bool(gpu))
    return replace(explained(total, given, gpu), statement=words)


# --- tuning ---------------------------------------------------------------------------------------


def tune(
    statement: str,
    /,
    *,
    effort: str = "full",
    out_shape: Sequence[Size] | None = None,
    sizes: SizesArgument = None,
    padded: Sequence[str] = (),
    **tensors: Value,
) -> Tuned:
    """Search for the config that is fastest for a statement on tensors of these sizes; later calls,
    in later processes too, use it.

    Nothing that is passed is changed. Where there is no GPU to time on, the first guess stands and
    the result says so.

    Args:
        statement: One statement of the language.
        effort: ``"quick"`` tries a handful of configs, ``"full"`` some dozens.
        tensors: Every tensor that the statement names, and the options of `insum`.

    Returns:
        What was tried and what was found.

    Examples:
        >>> import torch, insum
        >>> tuned = insum.tune("y[i] = A[i,j] * x[j]", A=torch.ones(2, 3), x=torch.ones(3))
        >>> tuned.trials
        ()
    """
    no_option(statement, "effort")
    return tuned(request_of(statement, out_shape, sizes, padded), tensors, effort)


def no_option(statement: str, *options: str) -> None:
    """No tensor of a statement has the name of an option of the function that it is passed to."""
    parsed = parse(statement)
    taken = next((o for o in options if o in (parsed.target.tensor, *tensors_of(parsed))), None)
    if taken is not None:
        raise BindingError(
            f"the statement names a tensor {taken!r}, which is an option here",
            statement=statement,
            remedy=f"call it {taken}_ instead",
        )


def tuned(request: Request, tensors: dict[str, Value], effort: str) -> Tuned:
    from insum.call.tuning import tuned_call  # takes a while to import

    if any(map(is_stranger, tensors.values())):
        from insum.formats.operands import has_format, taken

        tensors = taken(request.statement, tensors)
        if has_format(tensors):
            raise UnsupportedError(
                "an operand is sparse",
                statement=request.statement,
                remedy="insum.formats.tune(A, statement, ...), or the statement that "
                "insum.explain prints, with the arrays of the format",
            )
    if not is_plain_call(tensors.values()):
        raise UnsupportedError(
            "a statement is tuned on plain tensors, outside of traces, transforms and autocast"
        )
    if is_mean(request.statement):
        request, tensors = sum_of(request, tensors)
    return tuned_call(prepare(request, tensors), tensors, effort)
