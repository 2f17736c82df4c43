"""Backwards that are written by hand: each is called by itself, on what it got in a run, and its gradient judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import function

from veriformer.properties.bench.isolation import reseed

_HOLDER: Any = function._SingleLevelFunction
_MOST = 12
_OTHERS = "drops others than the forward did"


@dataclass
class Applied:
    """One call of an `autograd.Function`.

    Attributes:
        made: the class.
        args: it was called on.
    """

    made: Any
    args: tuple[Any, ...]

    @property
    def name(self) -> str:
        """Name of the class."""
        return str(self.made.__name__)

    def wrong(self) -> list[int]:
        """Return the arguments whose gradient is not the derivative of what the function gives."""
        leaves = {
            place: x.detach().clone().requires_grad_()
            for place, x in enumerate(self.args)
            if isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad
        }
        output = self._value(leaves)
        if not leaves or not output.requires_grad:
            return []
        found = torch.autograd.grad(output, list(leaves.values()), allow_unused=True)
        return [
            place for (place, leaf), g in zip(leaves.items(), found, strict=True) if not self._agrees(leaves, leaf, g)
        ]

    def writes_to_its_gradient(self) -> bool:
        """Whether its backward changes the gradient that it is given, which other parts of a graph may be given too."""
        args = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in self.args]
        output = self.made.apply(*args)
        leaves = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
        if not isinstance(output, Tensor) or not output.requires_grad or not leaves:
            return False
        given = torch.ones_like(output).contiguous()
        kept = given.clone()
        torch.autograd.grad(output, leaves, given, allow_unused=True)
        return not torch.equal(given, kept)

    def how_it_drops(self, rate: float) -> str:
        """Return what its backward does with the entries that its forward drops, or keeps, where that is seen.

        Args:
            rate: with which it drops.
        """
        place = next(n for n, x in enumerate(self.args) if isinstance(x, Tensor) and x.requires_grad)
        x = self.args[place].detach().clone().requires_grad_()
        once, twice = self._called(place, x), self._called(place, (2 * x).detach())
        if not isinstance(once, Tensor) or once.shape != x.shape:
            return _OTHERS
        (back,) = torch.autograd.grad(once.sum(), x)
        forward = ((twice - once) / x).detach()
        kept, given = forward.abs() > 1e-9, back.abs() > 1e-9
        if bool(given.all()) and not bool(kept.all()):
            return "forgets the mask of dropout: it gives a gradient to what was dropped"
        if not torch.equal(kept, given) or not bool(kept.any()):
            return _OTHERS
        share = (back / forward)[kept]
        if float((share - share.mean()).abs().max()) > 1e-6 or abs(float(share.mean()) - 1) < 1e-6:
            return _OTHERS
        if abs(float(share.mean()) - (1 - rate)) < 1e-6:
            return "does not divide what is kept by 1 - p, as the forward does: its gradient is 1 - p of the derivative"
        return f"drops what the forward does, and gives {float(share.mean()):.3g} times the derivative of what is kept"

    def _called(self, place: int, x: Tensor) -> Any:
        args = [x.clone() if n == place else _kept(a) for n, a in enumerate(self.args)]
        with torch.random.fork_rng(devices=[]):
            reseed(5)
            return self.made.apply(*args)

    def _value(self, leaves: dict[int, Tensor]) -> Tensor:
        args = [leaves.get(place, x) for place, x in enumerate(self.args)]
        args = [x.clone() if isinstance(x, Tensor) else x for x in args]  # its forward may write to them
        with torch.random.fork_rng(devices=[]):
            reseed(5)
            given = self.made.apply(*args)
        return cotangents(given)

    def _agrees(self, leaves: dict[int, Tensor], leaf: Tensor, gradient: Tensor | None) -> bool:
        for seed, step in enumerate((1e-6, 1e-7)):
            generator = torch.Generator().manual_seed(seed)
            direction = torch.randn(leaf.shape, generator=generator, dtype=torch.float64).to(leaf.device)
            ends, kept = [], leaf.detach().clone()
            for sign in (1.0, -1.0):
                with torch.no_grad():
                    leaf.copy_(kept + sign * step * direction)
                ends.append(float(self._value(leaves).detach()))
            with torch.no_grad():
                leaf.copy_(kept)
            if ends[0] == ends[1]:  # it reads a module's own parameter, of which this is a copy
                return True
            wanted = (ends[0] - ends[1]) / (2 * step)
            claimed = 0.0 if gradient is None else float((gradient * direction).sum())
            if abs(claimed - wanted) <= 1e-5 * max(abs(wanted), 1e-3):
                return True
        return False


def cotangents(given: Any) -> Tensor:
    """Return the sum of what a function gives times a gradient that comes in, the same for all calls."""
    outputs = [x for x in (given if isinstance(given, tuple) else (given,)) if isinstance(x, Tensor)]
    total = torch.zeros((), dtype=torch.float64, device=outputs[0].device if outputs else None)
    for number, x in enumerate(outputs):
        if x.is_floating_point():
            generator = torch.Generator().manual_seed(number)
            weight = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)
            total = total + (x * weight).sum()
    return total


def _kept(x: Any) -> Any:
    """Return an argument as it is now: the function may write to it."""
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


@contextmanager
def applied_functions() -> Iterator[list[Applied]]:
    """Note every `autograd.Function` of the subject's own that is applied."""
    noted: list[Applied] = []

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not str(cls.__module__).startswith("torch.") and not kwargs and len(noted) < _MOST:
            noted.append(Applied(cls, tuple(map(_kept, args))))
        return super(_HOLDER, cls).apply(*args, **kwargs)

    _HOLDER.apply = classmethod(apply)
    try:
        yield noted
    finally:
        del _HOLDER.apply


def wrong_backward(run: Callable[[], object]) -> tuple[Applied, list[int]] | None:
    """Return the one `autograd.Function` whose backward is wrong, and for which of its arguments."""
    with applied_functions() as noted:
        run()
    found: dict[str, tuple[Applied, list[int]]] = {}
    for applied in noted:
        if wrong := applied.wrong():
            found.setdefault(applied.name, (applied, wrong))
    return next(iter(found.values())) if len(found) == 1 else None


def overwritten_gradient(run: Callable[[], object]) -> str | None:
    """Name a backward that writes to the gradient that it is given."""
    with applied_functions() as noted:
        run()
    found = {applied.name for applied in noted if applied.writes_to_its_gradient()}
    if not found:
        return None
    return (
        f"the backward of {' and '.join(sorted(found))}, written by hand, changes the gradient that it is given, in "
        "place: what else is added there (a residual connection, say) is given the same tensor, and gets it changed"
    )


def applies_one(run: Callable[[], object]) -> str | None:
    """Name the `autograd.Function` that a run applies, if it is one alone."""
    with applied_functions() as noted:
        run()
    names = {applied.name for applied in noted}
    return names.pop() if len(names) == 1 else None
