"""`insum`, `compile`, `explain`: what users call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from insum.compat.calls import is_plain_call, is_quiet
from insum.errors import DtypeError, UnsupportedError
from insum.explain import Explanation, explained, roles_line
from insum.inplace import add_in_place
from insum.lang.bind import Problem, Size, Value
from insum.ops import contract, differentiable
from insum.plan.config import Config
from insum.request import (
    MOST_SITES,
    Prepared,
    Request,
    SizesArgument,
    head,
    kind_key,
    prepare,
    request_of,
)
from insum.settings import settings
from insum.traced import traced

if TYPE_CHECKING:
    from insum.formats.explained import EinsumExplanation
    from insum.runtime.site import Site
    from insum.runtime.tune import Tuned


def insum(
    statement: str,
    *,
    out_shape: Sequence[Size] | None = None,
    sizes: SizesArgument = None,
    padded: Sequence[str] = (),
    config: Config | Sequence[Config] | None = None,
    **tensors: Value,
) -> Tensor:
    """Compute one indirect einsum.

    ``C[...] = ...`` returns a new tensor; a ``C`` that is passed gives only its shape and dtype.
    ``+=``, ``max=`` and ``min=`` accumulate into the ``C`` that is passed, in place, and return it;
    without one they start from zero, or from minus or plus infinity.

    - ``out_shape``: the shape of the output, where the statement does not tell it (an output
      dimension that is indexed through a tensor).
    - ``sizes``: single sizes, by index variable, by output dimension, or by a left-side index as it
      is written: ``{"i": 8, 0: 100}``.
    - ``padded``: names of index tensors in which -1 marks an absent entry; such an entry
      contributes nothing.
    - ``config``: tile sizes and launch options of the generated kernel, as `insum.tune` prints
      them; a path without one takes no notice.
    - ``tensors``: every tensor that the statement names; a scalar may be a Python number.

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
        return traced(statement, out_shape, sizes, padded, config, tensors)
    for given, site in _sites.get(statement, ()) if isinstance(statement, str) else ():
        if _same(given, (out_shape, sizes, padded, config)):
            result = site(tensors)
            if result is not None:
                return result
    try:
        key: object = (
            statement,
            torch.get_default_dtype(),
            *[(n, type(t), t.dtype, t.shape, t.device, t.layout) for n, t in tensors.items()],  # type: ignore[union-attr]
        )
        if out_shape is not None or sizes or padded or config is not None:
            key = key, _options_key(out_shape, sizes, padded, config)
        call = _calls.get(key)
    except (AttributeError, TypeError):  # a Python number, or a mistake that binding explains
        key, call = None, None
    if call is not None and call.settings is settings.values and is_quiet():
        result = _run(call, tensors)
        if call.is_frequent():
            _note(statement, (out_shape, sizes, padded, config), call, tensors)
        return result
    return _insum(key, request_of(statement, out_shape, sizes, padded, config), tensors)


Insum = insum

_MAX_CALLS = 4096
_calls: dict[object, Prepared] = {}


#: By statement, what its fused calls looked like: their options, and what to compare their tensors
#: with.
_sites: dict[str, tuple[tuple[tuple[object, ...], Site], ...]] = {}


def _same(given: tuple[object, ...], options: tuple[object, ...]) -> bool:
    for a, b in zip(given, options):  # a loop, on the path of every call
        if a is not b and (a.__class__ is not b.__class__ or a != b):
            return False
    return True


def _note(
    statement: str, options: tuple[object, ...], call: Prepared, tensors: dict[str, Value]
) -> None:
    """Let the next call like this one take the short way, unless an option is a list, which may
    change behind our back.
    """
    fixed = [dict(o) if isinstance(o, dict) else o for o in options]
    inner = [v for o in fixed if isinstance(o, dict) for v in o.values()]
    site = None if any(isinstance(o, list) for o in (*fixed, *inner)) else call.site(tensors)
    if site is not None:
        if len(_sites) >= _MAX_CALLS:
            _sites.clear()
        _sites[statement] = ((tuple(fixed), site), *_sites.get(statement, ())[: MOST_SITES - 1])


def _options_key(
    out_shape: Sequence[Size] | None, sizes: SizesArgument, padded: Sequence[str], config: object
) -> tuple[object, ...]:
    given = (
        tuple((k, tuple(v) if isinstance(v, Sequence) else v) for k, v in sizes.items())
        if sizes
        else ()
    )
    chosen = tuple(config) if isinstance(config, list) else config
    return (
        None if out_shape is None else tuple(out_shape),
        given,
        (padded,) if isinstance(padded, str) else tuple(padded),
        chosen,
    )


def _slow_key(request: Request, tensors: dict[str, Value]) -> object:
    """A key for calls with Python numbers among the arguments."""
    return (
        request,
        torch.get_default_dtype(),
        *((name, type(v), kind_key(v)) for name, v in tensors.items()),
    )


def _run(call: Prepared, tensors: dict[str, Value]) -> Tensor:
    """A call that has been prepared, in plain eager mode."""
    if call.target:
        return add_in_place(call.request, call, tensors)
    call.verify(tensors)
    if torch.is_grad_enabled() and call.needs_gradient(tensors):
        return differentiable(call, None, tensors)
    return call.run("new", tensors, None)


def _insum(key: object, request: Request, tensors: dict[str, Value]) -> Tensor:
    left = head(request.statement)
    plain = is_plain_call(tensors.values())
    if key is None and plain:  # under a tracer sizes may be symbols, which are no keys
        key = _slow_key(request, tensors)
        call = _calls.get(key)
        if call is not None and call.settings is settings.values:
            return _run(call, tensors)
    in_place = left.operator != "=" and left.target in tensors
    if in_place and not isinstance(tensors[left.target], Tensor):
        problem = request.bind(tensors)
        fact, remedy = (
            f"{left.target} is a number, but {left.operator} writes into it",
            f"pass {left.target}=torch.tensor({tensors[left.target]})",
        )
        raise problem.complain(
            DtypeError, fact, span=problem.statement.target.span, expected="a tensor", remedy=remedy
        )
    if not plain:
        return add_in_place(request, None, tensors) if in_place else contract(request, tensors)
    call = prepare(request, tensors)
    # without a tensor the default device decides
    if any(isinstance(v, Tensor) for v in tensors.values()):
        if len(_calls) >= _MAX_CALLS:
            _calls.clear()
        _calls[key] = call
    return add_in_place(request, call, tensors) if in_place else contract(request, tensors)


# --- a statement that is called often -------------------------------------------------------------


class Compiled:
    """A statement with its options, ready to be called with tensors; see `compile`.

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
    ) -> None:
        # what cannot be read fails here rather than at the first call
        request = request_of(statement, out_shape, sizes, padded, config)
        head(statement)
        self.statement = request.statement
        self.out_shape = None if out_shape is None else tuple(out_shape)
        self.sizes = dict(sizes) if sizes else None
        self.padded = request.padded
        self.config = request.config
        self._request = request
        self._last: Problem | None = None
        self._sites: tuple[Site, ...] = ()

    def __call__(self, **tensors: Value) -> Tensor:
        for site in self._sites if not torch.compiler.is_compiling() else ():
            found = site(tensors)
            if found is not None:
                return found
        result = insum(
            self.statement,
            out_shape=self.out_shape,
            sizes=self.sizes,
            padded=self.padded,
            config=self.config,
            **tensors,
        )
        if torch.compiler.is_compiling():
            return result
        if self._last is None and is_plain_call(tensors.values()):
            self._last = prepare(self._request, tensors).problem
        for _, site in _sites.get(self.statement, ()):  # what the call has noted for itself
            if site not in self._sites and site.request == self._request:
                self._sites = (site, *self._sites[: MOST_SITES - 1])
        return result

    def tune(self, *, effort: str = "full", **tensors: Value) -> Tuned:
        """Search for the config that is fastest for tensors of these sizes; later calls use what
        was found. See `insum.tune`.
        """
        return tuned(self._request, tensors, effort)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None, "_sites": ()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Compiled) and self._options() == other._options()

    def __hash__(self) -> int:
        return hash(self.statement)

    def _options(self) -> tuple[object, ...]:
        return self.statement, self.out_shape, self.sizes, self.padded, self.config

    def __repr__(self) -> str:
        options = [
            f"{n}={v!r}"
            for n, v in (
                ("out_shape", self.out_shape),
                ("sizes", self.sizes),
                ("padded", self.padded),
                ("config", self.config),
            )
            if v
        ]
        text = f"insum.compile({', '.join([repr(self.statement), *options])})"
        return text if self._last is None else f"{text}\n  {roles_line(self._last)}"


def compile(
    statement: str,
    *,
    out_shape: Sequence[Size] | None = None,
    sizes: SizesArgument = None,
    padded: Sequence[str] = (),
    config: Config | Sequence[Config] | None = None,
) -> Compiled:
    """A reusable callable for one statement; the options are those of `insum`. It can be pickled
    and copied, and it prints itself.

    >>> import torch, insum
    >>> matvec = insum.compile("y[i] = A[i,j] * x[j]")
    >>> matvec(A=torch.ones(2, 3), x=torch.arange(3.))
    tensor([3., 3.])
    >>> matvec
    insum.compile('y[i] = A[i,j] * x[j]')
      i: free, 2; j: reduced, 3
    """
    return Compiled(statement, out_shape, sizes, padded, config)


def explain(
    statement: str,
    *,
    out_shape: Sequence[Size] | None = None,
    sizes: SizesArgument = None,
    padded: Sequence[str] = (),
    config: Config | Sequence[Config] | None = None,
    **tensors: Value,
) -> Explanation | EinsumExplanation:
    """What a call would do: extents, roles of the indices, the graph as Python, FLOPs and bytes.
    Nothing is computed.

    >>> import torch, insum
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
    if any(hasattr(value, "index_arrays") for value in tensors.values()):  # a sparse format
        from insum.formats.explained import explain_einsum

        return explain_einsum(statement, out_shape=out_shape, sizes=sizes, **cast(Any, tensors))
    return explain_dense(
        statement, tensors, out_shape=out_shape, sizes=sizes, padded=padded, config=config
    )


def explain_dense(
    statement: str,
    tensors: Mapping[str, Value],
    *,
    out_shape: Sequence[Size] | None = None,
    sizes: SizesArgument = None,
    padded: Sequence[str] = (),
    config: Config | Sequence[Config] | None = None,
) -> Explanation:
    """`explain` of a statement over tensors and numbers alone."""
    return explained(request_of(statement, out_shape, sizes, padded, config), tensors)


# --- tuning ---------------------------------------------------------------------------------------


def tune(
    statement: str,
    *,
    effort: str = "full",
    out_shape: Sequence[Size] | None = None,
    sizes: SizesArgument = None,
    padded: Sequence[str] = (),
    **tensors: Value,
) -> Tuned:
    """Search for the config that is fastest for a statement on tensors of these sizes; later calls,
    in later processes too, use it.

    ``effort``: ``quick`` tries a handful of configs, ``full`` some dozens. Nothing that is passed
    is changed. Where there is no GPU to time on, the first guess stands and the result says so.

    >>> import torch, insum
    >>> tuned = insum.tune("y[i] = A[i,j] * x[j]", A=torch.ones(2, 3), x=torch.ones(3))
    >>> tuned.trials
    ()
    """
    return tuned(request_of(statement, out_shape, sizes, padded), tensors, effort)


def tuned(request: Request, tensors: dict[str, Value], effort: str) -> Tuned:
    from insum.runtime import tune as search

    if not is_plain_call(tensors.values()):
        raise UnsupportedError(
            "a statement is tuned on plain tensors, outside of traces, transforms and autocast"
        )
    call = prepare(request, tensors)
    call.verify(tensors)
    target = tensors[call.target] if call.target else None
    assert target is None or isinstance(target, Tensor)
    return search.tune(call.problem, tensors, target, effort)
