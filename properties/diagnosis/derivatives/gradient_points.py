"""A backward written by hand against the derivative of its own forward: taken at another point, or wrong in a place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from veriformer.properties.diagnosis.derivatives.own_backwards import Applied, cotangents

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "SiLU": F.silu,
    "GELU": F.gelu,
    "GELU (tanh)": lambda x: F.gelu(x, approximate="tanh"),
    "quick GELU": lambda x: x * torch.sigmoid(1.702 * x),
    "ReLU": F.relu,
    "squared ReLU": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "mish": F.mish,
    "ELU": F.elu,
    "the exponential": torch.exp,
}

_POINTS: dict[str, Callable[[Tensor], Tensor]] = {
    **ACTIVATIONS,
    "the negative": torch.neg,
    "the square": torch.square,
    "a softmax": lambda x: x.softmax(-1),
    "the sum over the last axis": lambda x: x.sum(-1, keepdim=True).expand_as(x),
    "a copy in float32": lambda x: x.float().to(x.dtype),
    "a copy in bfloat16": lambda x: x.bfloat16().to(x.dtype),
    "a copy in float16": lambda x: x.half().to(x.dtype),
}


class _Context:
    """Stands for the context of a Function whose forward is called by itself."""

    def __init__(self, count: int) -> None:
        self.needs_input_grad = (True,) * count

    def save_for_backward(self, *_: object) -> None:
        """Keep nothing: autograd differentiates the forward."""

    save_for_forward = mark_dirty = mark_non_differentiable = set_materialize_grads = save_for_backward


class Forward:
    """The forward of a Function, differentiated by autograd itself.

    Attributes:
        applied: the call.
        leaves: places of the arguments that are differentiated by.
        given: the gradients that its backward gives.
        right: those that autograd gives for its forward; None where its forward has none.
    """

    def __init__(self, applied: Applied) -> None:
        self.applied = applied
        self.leaves = [p for p, x in enumerate(applied.args) if isinstance(x, Tensor) and x.requires_grad]
        self.given = self._gradients(applied.made.apply, {})
        self.right = self.at({})

    def at(self, changed: dict[int, Tensor]) -> dict[int, Tensor] | None:
        """Return the gradients of the forward, with some arguments replaced by others."""
        if "setup_context" in vars(self.applied.made):
            return self._gradients(self.applied.made.forward, changed)
        context = _Context(len(self.applied.args))

        def forward(*args: Any) -> Any:
            return self.applied.made.forward(context, *args)

        return self._gradients(forward, changed)

    def _gradients(self, function: Callable[..., Any], changed: dict[int, Tensor]) -> dict[int, Tensor] | None:
        args: list[Any] = [x.detach().clone() if isinstance(x, Tensor) else x for x in self.applied.args]
        args = [changed[p].detach().clone() if p in changed else x for p, x in enumerate(args)]
        leaves = {p: args[p].requires_grad_() for p in self.leaves}
        with torch.enable_grad():
            given = function(*(x.clone() if isinstance(x, Tensor) else x for x in args))  # it may write to them
            total = cotangents(given)
            if not total.requires_grad:
                return None
            found = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
        return dict(zip(leaves, found, strict=True))


def overwritten(applied: Applied) -> dict[int, str | None]:
    """Return which arguments a forward writes to, and which function of what they were they then are, if known."""
    args = [x.detach().clone() if isinstance(x, Tensor) else x for x in applied.args]
    with torch.no_grad():
        applied.made.apply(*args)
    found: dict[int, str | None] = {}
    for place, (was, now) in enumerate(zip(applied.args, args, strict=True)):
        if isinstance(was, Tensor) and was.is_floating_point() and not torch.equal(was, now):
            found[place] = next((name for name, f in _POINTS.items() if _same(now, f(was.detach()))), None)
    return found


def told_by_point(applied: Applied, wrong: list[int], names: dict[int, str]) -> str | None:
    """Say at which other point the derivative is taken, or where it is wrong; None where neither is simple.

    Args:
        applied: the function.
        wrong: places of the arguments whose gradient is wrong.
        names: of its arguments.
    """
    written = overwritten(applied)
    try:
        forward = Forward(applied)
    except Exception:  # its forward cannot be called by itself
        return None
    if forward.given is None or forward.right is None:
        return None
    bad = [p for p in wrong if not _same(forward.given[p], forward.right[p])]
    if not bad or bad != wrong:
        return None  # autograd differentiates something else there
    for place in forward.leaves:
        x = applied.args[place].detach()
        for name, f in _POINTS.items():
            moved = f(x)
            other = None if _same(moved, x) else forward.at({place: moved})
            if other is None or not all(_same(forward.given[p], other[p]) for p in bad):
                continue
            of = f"{name} of {names[place]}" if name.startswith(("a ", "the ")) else f"{name}({names[place]})"
            told = f"it is the derivative with {of} in place of {names[place]}"
            if place in written:
                return f"{told}: the forward overwrites {names[place]} in place before it is kept for the backward"
            return f"{told}: what is kept for the backward is not what the forward was given"
    for place, function in written.items():
        by = f" by {function} of itself" if function else ""
        return f"the forward overwrites {names[place]} in place{by}, which the backward reads"
    if len(bad) == 1:
        place = bad[0]
        return _where(applied.args[place].detach(), forward.given[place], forward.right[place])
    return None


def _where(x: Tensor, given: Tensor, right: Tensor) -> str | None:
    """Say for which inputs an elementwise gradient is wrong, and what it is there."""
    shows = right.abs() > 1e-3 * right.abs().amax()  # where it is small it may pass for another
    x, given, right = x[shows], given[shows], right[shows]
    off = (given - right).abs() > 1e-4 * right.abs()
    if not 4 <= int(off.sum()) <= off.numel() - 4:
        return None
    what = next((words for words, guess in _instead(right) if _same(given[off], guess[off])), "wrong")
    for values, name in ((x, "the input"), (x.abs(), "the absolute value of the input")):
        low, high = values[off], values[~off]
        if float(low.max()) < float(high.min()):
            return f"it is {what} where {name} is below {_between(low.max(), high.min())}, else right"
        if float(low.min()) > float(high.max()):
            return f"it is {what} where {name} is above {_between(high.max(), low.min())}, else right"
    return None


def _between(one: Tensor, other: Tensor) -> str:
    """Return the roundest number between two."""
    low, high = float(one), float(other)
    for digits in range(6):
        number = round((low + high) / 2, digits)
        if low <= number <= high:
            return f"{number:g}"
    return f"{(low + high) / 2:.4g}"


def _instead(right: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "0", torch.zeros_like(right)
    yield "of the wrong sign", -right
    yield "twice the derivative", 2 * right
    yield "half the derivative", right / 2


def _same(one: Tensor, two: Tensor) -> bool:
    if one.shape != two.shape or not bool(two.isfinite().all()):
        return False
    return float((one - two).abs().max()) <= 1e-6 * max(float(two.abs().max()), 1e-12)
