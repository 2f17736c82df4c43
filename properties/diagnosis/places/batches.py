"""A subject called on whole batches and on one sample at a time; which axis its operations run over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from veriformer.properties.adapters.shared.hooks import hooked
from veriformer.properties.bench.measured import judged_dtypes
from veriformer.properties.bench.pool import Built, duplicate
from veriformer.properties.definitions.differences import size_of
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.stream import PER_POSITION, SEQUENCES, Stream, sides

TOKENWISE = ("feed_forward", "norm")
"""Kinds whose every token is judged by itself."""

BATCH, LENGTH = 5, 7
"""Sizes that are primes of their own: what is one of them is no width and no number of heads."""


@dataclass
class Batches:
    """One subject on batches.

    Attributes:
        case: the failing one.
        built: the model.
        side: which of two sequences is varied.
        per_position: whether it has one output a position.
        tokenwise: whether a token by itself is what is right, not a sample by itself.
    """

    case: Case
    built: Built
    side: str
    per_position: bool
    tokenwise: bool

    def __post_init__(self) -> None:
        """Draw the other of two sequences once."""
        self.generator = torch.Generator().manual_seed(11)
        self._stream = None if self.tokenwise else Stream(self.case, self.built, side=self.side)

    @property
    def takes_mask(self) -> bool:
        """Whether a padding mask can be given."""
        case = self.case
        return (
            not self.tokenwise and self.side in sides(case.subject, masked=True) and case.subject.takes_mask("padding")
        )

    def with_built(self, built: Built) -> Batches:
        """Return the same on another model."""
        other = replace(self, built=built)
        if other._stream is not None and self._stream is not None:
            other._stream.kept = self._stream.kept
        return other

    def fresh(self) -> Batches | None:
        """Return the same on a copy of a model that nobody has called; None where none can be had."""
        if not isinstance(self.built.module, nn.Module):
            return None
        made = self.case.bench.pool.fresh(self.built.config, self.built.dtype)
        return self.with_built(replace(made, module=duplicate(made.module)))

    def draw(self, batch: int, length: int) -> Tensor:
        """Return inputs of a generator of its own, so that the failing case keeps its draws."""
        if not self.tokenwise and self.case.subject.takes_tokens:
            size = self.built.config.vocab_size
            return torch.randint(0, size, (batch, length), generator=self.generator).to(self.case.bench.device)
        shape = (batch, length, self.built.config.d_model)
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(
            self.case.bench.device, self.built.dtype
        )

    def together(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the outputs of a batch."""
        x, mask = x.clone(), None if mask is None else mask.clone()  # the subject may write to what it is given
        with torch.no_grad():
            found = self.case.call(self.built, x) if self._stream is None else self._stream(x, mask)
        return found.detach()

    def written_to(self) -> str | None:
        """Say which of its arguments a call changes in place."""
        x = self.draw(2, 3)
        mask = self.masks([3, 2], 3) if self.takes_mask else None
        was = x.clone(), None if mask is None else mask.clone()
        with torch.no_grad():
            self.case.call(self.built, x) if self._stream is None else self._stream(x, mask)
        if mask is not None and was[1] is not None and not torch.equal(mask, was[1]):
            how = "inverts" if torch.equal(mask, ~was[1]) else "changes"
            return f"a call {how} the mask that it is given, in place: whoever uses that mask next gets another one"
        return None if torch.equal(x, was[0]) else "a call changes the input that it is given, in place"

    def alone(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the outputs of each sample by itself (of each token, where tokens are to be by themselves)."""
        if self.tokenwise:
            flat = x.reshape(-1, 1, x.shape[-1])
            return torch.cat([self.together(row[None]) for row in flat]).reshape(*x.shape[:2], -1)
        masks = [None if mask is None else mask[b : b + 1] for b in range(len(x))]
        return torch.cat([self.together(x[b : b + 1], masks[b]) for b in range(len(x))])

    def limit(self, outputs: Tensor) -> float:
        """Return the largest difference that is rounding, with room."""
        return max(16 * self.case.tolerance(self.built), 1e-9) * size_of(outputs)

    def differs(self, one: Tensor, other: Tensor) -> bool:
        """Whether two outputs differ beyond rounding."""
        return one.shape != other.shape or bool(((one - other).abs() > self.limit(other)).any())

    def rows_differ(self, one: Tensor, other: Tensor) -> Tensor:
        """Return where the vectors along the last axis differ beyond rounding."""
        return (one - other).abs().amax(-1) > self.limit(other)

    def masks(self, lengths: list[int], length: int) -> Tensor:
        """Return a padding mask `[B, T]` that leaves so many tokens of each sample."""
        mask = torch.arange(length)[None] < torch.tensor(lengths)[:, None]
        side, fact = self.case.subject.fact("padding_side", "right"), self.case.subject.fact
        left = side == "left" or (
            side == "both" and self.per_position and bool(fact("causal"))
        )  # no query sees the right
        return (mask.flip(1) if left else mask).to(self.case.bench.device)

    def has_ends_alone(self) -> bool:
        """Whether only ends of a sequence may be hidden, no place within."""
        return self.case.subject.fact("padding_side", "both") != "both"


def batches_of(case: Case) -> Iterator[Batches]:
    """Go through the sequences of the failing case's subject, each in the widest dtype that it is judged in."""
    kind = case.subject.kind
    built = case.bench.pool.get(case.config(), judged_dtypes(case.bench)[-1])
    if kind in TOKENWISE:
        yield Batches(case, built, "target", True, True)
    elif kind in SEQUENCES:
        for side in sides(case.subject):
            yield Batches(case, built, side, side == "target" and kind in PER_POSITION, False)


def longest(case: Case) -> int:
    """Return the longest sequence that can be given."""
    return int(min(case.subject.fact("max_len", 64), case.config().max_len))


_OVER_AXES = {
    "softmax": "a softmax runs",
    "log_softmax": "a softmax runs",
    "cumsum": "a cumulative sum runs",
    "var": "a variance is taken",
    "std": "a standard deviation is taken",
    "var_mean": "a variance is taken",
    "std_mean": "a standard deviation is taken",
    "_softmax": "a softmax runs",
    "batch_norm": "the statistics of a batch norm run",
    "mean": "a mean is taken",
}


class _Axes(TorchFunctionMode):
    """Notes what runs over an axis of a given size."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.found, self.inside = size, list[tuple[str, int, int, str]](), [""]

    @contextmanager
    def watching(self, module: object) -> Iterator[None]:
        """Note in which part of a module each operation stands."""
        parts = module.named_modules() if isinstance(module, nn.Module) else ()
        hooks: list[Any] = []
        for name, part in parts:
            told = f" in {name} ({type(part).__name__})" if name else f" in the forward of {type(part).__name__} itself"
            hooks.append(part.register_forward_pre_hook(lambda *_, told=told: self.inside.append(told)))
            hooks.append(part.register_forward_hook(lambda *_: self.inside.pop() and None, always_call=True))
        with hooked(hooks), self:
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        output = func(*args, **given)
        name = getattr(func, "__name__", "")
        if name in _OVER_AXES and args and isinstance(args[0], Tensor) and args[0].ndim > 1:
            x = args[0]
            if name == "batch_norm":
                axes = [axis for axis in range(x.ndim) if axis != 1] if _argument(args, given, 5, "training") else []
            else:
                told = _argument(args, given, 1, "dim")
                axes = list(told) if isinstance(told, list | tuple) else [told] if isinstance(told, int) else []
            whole = [axis % x.ndim for axis in axes]
            # over several axes of one tensor at once, the batch among them, as over the batch alone
            self.found += [(name, axis, x.ndim, self.inside[-1]) for axis in whole if x.shape[axis] == self.size]
        return output


def _argument(args: Any, kwargs: dict[str, Any], place: int, name: str) -> Any:
    if name in kwargs:
        return kwargs[name]
    return args[place] if (len(args) > place and not isinstance(args[place], bool)) or name == "training" else None


def over_the_batch(module: object, run: Callable[[int], object], sizes: tuple[int, int]) -> str | None:
    """Say which operation runs over the batch axis: over an axis that has the batch's size, whichever that is.

    Args:
        module: of the subject.
        run: calls the subject on a batch of a size; no other size of it may be one of these two.
        sizes: of the batches.
    """
    seen = []
    for size in sizes:
        noted = _Axes(size)
        with noted.watching(module):
            run(size)
        seen.append(noted.found)
    both = [found for found in seen[0] if found in seen[1]]
    if not both:
        return None
    name, axis, ndim, where = next((found for found in both if found[0] != "mean"), both[0])
    meant = "" if name == "cumsum" else " (declare batch_coupled=True if that is meant)"
    return f"{_OVER_AXES[name]} over the batch, axis {axis} of a tensor with {ndim} axes{where}{meant}"


def kept_from_before(batches: Batches) -> str | None:
    """Say what an earlier call leaves behind: a call, after one of the same shape, gives other outputs than at once."""
    one, two = batches.fresh(), batches.fresh()
    if one is None or two is None:
        return None
    length = min(LENGTH, longest(batches.case))
    if length < LENGTH:
        return None
    x, other = batches.draw(3, length), batches.draw(3, length)
    if not batches.takes_mask:
        two.together(other)
        if batches.differs(two.together(x), one.together(x)):
            return "the same input gives other outputs after another call of the same shape: something is kept of it"
        return None
    now, before = batches.masks([5, 7, 3], length), batches.masks([3, 4, 7], length)
    right = one.together(x, now)
    two.together(other, before)
    got = two.together(x, now)
    if not batches.differs(*_real(batches, now, got, right)):
        return None
    told = "after a call with another padding mask of the same shape the same input gives other outputs"
    for mask, words in (
        (now & before, "those under both masks together: a kept mask is written to in place"),
        (before, "those under the earlier call's mask: the mask is kept and used again"),
    ):
        twin = batches.fresh()
        guess = right if twin is None else twin.together(x, mask)
        for rows in (now, now & before):  # a model may give zeros where its mask hides a token
            if batches.differs(*_real(batches, rows, got, right)) and not batches.differs(
                *_real(batches, rows, got, guess)
            ):
                return f"{told}, {words}"
    return f"{told}: something is kept of the earlier call"


def _real(batches: Batches, mask: Tensor, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    return (one[mask], other[mask]) if batches.per_position else (one, other)
