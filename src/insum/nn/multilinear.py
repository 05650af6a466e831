"""A statement that is linear in each of several tensors, with its second derivatives put together:
what gradients of gradients send to one tensor is one statement, a sum of products, instead of one
statement for each product and additions of large results.

Derivatives of every order are those of the statement itself; above the second they are
left to statements.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from insum.api import insum
from insum.bounded import keep
from insum.call import prepared
from insum.compat.autograd import plain_apply, wanted_gradients
from insum.compat.calls import is_plain_call
from insum.compat.many import any_batched, is_batched, over_items
from insum.together import AskedResult, results_of

#: Derivatives of one product that are kept: of a few leaves, along some of them.
MOST_DERIVED = 64


@dataclass(frozen=True)
class Derivative:
    """A statement, and which of the leaves, of the tensors along which they are differentiated and
    of the result's gradient it reads.
    """

    statement: str
    reads: tuple[str, ...]


@dataclass(frozen=True)
class Multilinear:
    """``out[at[out]] = `` the product of all factors, each at its indices.

    Attributes:
        out: The name of the result.
        at: The indices of the result and of every factor, as text.
        leaves: Factors that it is differentiated by; every other is fixed.

    Examples:
        >>> product = Multilinear("Z", {"V": "p", "X": "p,u", "Y": "p", "Z": "u"}, ("X", "Y"))
        >>> product.statement()
        'Z[u] = V[p] * X[p,u] * Y[p]'
        >>> product.gradient("X")
        'D[p,u] = V[p] * Z[u] * Y[p]'
        >>> product.second("X")
        'D[p,u] = V[p] * Z[u] * Y_[p]'
        >>> product.second("Z")
        'D[u] = V[p] * X_[p,u] * Y[p] + V[p] * X[p,u] * Y_[p]'
    """

    out: str
    at: Mapping[str, str]
    leaves: tuple[str, ...]
    #: The statement, written once.
    text: str = field(init=False, compare=False, repr=False)
    #: By what they are by and along which leaves, derivatives that were asked for.
    derived: dict[tuple[str, tuple[str, ...]], Derivative] = field(
        default_factory=dict, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        text = f"{self.out}[{self.at[self.out]}] = {self._product(self.out)}"
        object.__setattr__(self, "text", text)

    def statement(self) -> str:
        return self.text

    def gradient(self, leaf: str) -> str:
        """By a leaf; the gradient of the result goes by the result's name."""
        return f"D[{self.at[leaf]}] = {self._product(leaf)}"

    def second(self, name: str, live: tuple[str, ...] = ()) -> str:
        """What all gradients together, along tensors that are called ``X_`` and so on, send to a
        leaf, or to the gradient of the result; ``live``: of these leaves, where not of all.
        """
        terms = [self._product(name, along=one) for one in live or self.leaves if one != name]
        return f"D[{self.at[name]}] = {' + '.join(terms)}"

    def derivative(self, name: str, live: tuple[str, ...] = ()) -> Derivative:
        """The gradient by a leaf, or what comes of gradients along ``live`` leaves."""
        found = self.derived.get((name, live))
        if found is None:
            statement = self.second(name, live) if live else self.gradient(name)
            right = statement.partition("=")[2]
            names = [n for n in self.at if n == self.out or n in self.leaves]
            reads = [n for one in names for n in (one, f"{one}_") if f"{n}[" in right]
            found = Derivative(statement, tuple(reads))
            keep(self.derived, (name, live), found, MOST_DERIVED)
        return found

    def _product(self, without: str, along: str = "") -> str:
        """All factors but one, in whose place the result's gradient stands."""
        names = [n for n in self.at if n != self.out]
        if without != self.out:
            names[names.index(without)] = self.out
        return " * ".join(f"{n}{'_' if n == along else ''}[{self.at[n]}]" for n in names)

    def __call__(self, tensors: Mapping[str, Any], shape: Sequence[int]) -> Tensor:
        """The result, of this shape; ``tensors``: every factor and index tensor."""
        leaves, recorded = [], False
        for name in self.leaves:
            leaves.append(leaf := tensors[name])
            recorded = recorded or leaf.requires_grad
        recorded = recorded and torch.is_grad_enabled()
        looks = recorded and prepared.kernels_look_on(leaves[0].device)
        if not looks or not is_plain_call(leaves):
            return insum(self.text, out_shape=shape, **tensors)
        fixed = {n: t for n, t in tensors.items() if n not in self.leaves}
        found: Tensor = _record(self, fixed, tuple(shape), *leaves)
        return found


class _MultilinearOutput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, product: Multilinear, fixed: dict[str, Any], shape: Any, *leaves: Tensor
    ) -> Tensor:
        ctx.product, ctx.fixed = product, fixed
        ctx.save_for_backward(*leaves)
        given: dict[str, Any] = dict(zip(product.leaves, leaves))
        return insum(product.text, out_shape=shape, **fixed, **given)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if is_batched(gradient):
            each = functools.partial(_MultilinearOutput.backward, ctx)
            return over_items(each, (gradient,))
        wanted = wanted_gradients(ctx)[3:]
        given = ctx.product, ctx.fixed, wanted, gradient, *ctx.saved_tensors
        recorded = torch.is_grad_enabled() and is_plain_call((gradient,))
        found = _MultilinearGradients.apply(*given) if recorded else _gradients(*given)  # type: ignore[no-untyped-call]
        return (None, None, None, *found)


_record = plain_apply(_MultilinearOutput)


def _gradients(
    product: Multilinear,
    fixed: dict[str, Any],
    wanted: Sequence[bool],
    gradient: Tensor,
    *leaves: Tensor,
) -> tuple[Tensor | None, ...]:
    given = {product.out: gradient, **dict(zip(product.leaves, leaves))}
    named = [n for n, wants in zip(product.leaves, wanted) if wants]
    found = _computed({name: product.derivative(name) for name in named}, given, fixed)
    return tuple([found.get(name) for name in product.leaves])


class _MultilinearGradients(torch.autograd.Function):
    """The gradients of a result by all leaves that want one."""

    @staticmethod
    def forward(
        ctx: Any,
        product: Multilinear,
        fixed: dict[str, Any],
        wanted: tuple[bool, ...],
        gradient: Tensor,
        *leaves: Tensor,
    ) -> tuple[Tensor | None, ...]:
        ctx.product, ctx.fixed, ctx.wanted = product, fixed, wanted
        ctx.save_for_backward(gradient, *leaves)
        ctx.set_materialize_grads(False)
        return _gradients(product, fixed, wanted, gradient, *leaves)

    @staticmethod
    def backward(ctx: Any, *along: Tensor | None) -> tuple[Any, ...]:
        if any_batched(along):
            return over_items(functools.partial(_MultilinearGradients.backward, ctx), along)
        product, fixed = ctx.product, ctx.fixed
        gradient, *leaves = ctx.saved_tensors
        # those that nothing comes back from are not among the leaves of this one
        live = tuple(n for n, a in zip(product.leaves, along) if a is not None)
        given = {product.out: gradient, **dict(zip(product.leaves, leaves))}
        given |= {f"{n}_": a for n, a in zip(product.leaves, along) if a is not None}
        names = (product.out, *product.leaves)
        wanted = wanted_gradients(ctx)[3:]
        named = [n for n, wants in zip(names, wanted) if wants and {*live} - {n}]
        found = _computed({name: product.derivative(name, live) for name in named}, given, fixed)
        return (None, None, None, *[found.get(name) for name in names])


def _computed(
    wanted: Mapping[str, Derivative], given: Mapping[str, Tensor], fixed: Mapping[str, Any]
) -> dict[str, Tensor]:
    """By what they are gradients of, the results of statements that read much of the same."""
    asked = []
    for name, one in wanted.items():
        used = dict(fixed)
        for read in one.reads:
            used[read] = given[read]
        asked.append(AskedResult(one.statement, tuple(given[name].shape), used))
    return dict(zip(wanted, results_of(asked)))
