"""A subject under padding masks, on a model that nothing ran on before each call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from veriformer.properties.bench.measured import judged_dtypes, tolerance_of
from veriformer.properties.bench.pool import Built
from veriformer.properties.definitions.differences import size_of
from veriformer.properties.diagnosis.attentions import Attended, attentions
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.stream import Stream

LENGTH = 12
REAL = 5


class Masked:
    """One side of a subject under masks.

    Attributes:
        case: of the failure.
        stream: the subject on one new model.
        side: on which padding may stand: "right", "left" or "both".
        per_position: whether it has an output a position of this side.
        length: of its sequences.
        real: how many of them are real where some are padding.
    """

    def __init__(self, case: Case, stream: Stream) -> None:
        built = stream.built
        if case.subject.module is None:
            built = case.bench.pool.get(built.config, judged_dtypes(case.bench)[-1], raw=built.is_raw)
        self.case, self.built, self.which = case, built, stream.side
        self.stream = self.on(self.clean())
        self.kept = self.stream.kept
        self.side = case.subject.fact("padding_side", "both")
        self.per_position = stream.per_position
        longest = int(min(case.subject.fact("max_len", 64), built.config.max_len))
        self.length, self.real = min(longest, LENGTH), min(REAL, longest - 2)

    def clean(self) -> Built:
        """Return a model that nothing ran on."""
        return self.case.bench.pool.fresh(self.built.config, self.built.dtype, raw=self.built.is_raw)

    def on(self, built: Built) -> Stream:
        """Return the subject on a model; the other of two sequences stays what it is."""
        stream = Stream(self.case, built, side=self.which, other_length=7)
        if hasattr(self, "kept"):
            stream.kept = self.kept
        return stream

    def draw(self, batch: int, length: int | None = None) -> Tensor:
        """Return sequences."""
        return self.stream.draw(batch, length or self.length)

    def distinct(self, batch: int, length: int) -> Tensor:
        """Return sequences without repetition, where there are as many tokens."""
        x, size = self.draw(batch, length), self.built.config.vocab_size
        if x.is_floating_point() or size < length:
            return x
        steps = torch.arange(length, device=x.device)
        return (x[:, :1] + steps) % size

    def __call__(self, x: Tensor, mask: Tensor | None = None, on: Built | None = None) -> Tensor:
        """Return the outputs, without a gradient."""
        with torch.no_grad():
            return self.on(on or self.clean())(x, None if mask is None else mask.clone())

    def attended(self, x: Tensor, mask: Tensor | None = None) -> list[Attended]:
        """Return the attentions of a call that run over this side."""
        return [a for a in attentions(lambda: self(x, mask)) if a.weights.shape[-1] == x.shape[1]]

    def padded(self, x: Tensor, real: Sequence[int], side: str) -> Tensor:
        """Return the mask that leaves as many positions of each sample real."""
        place = torch.arange(x.shape[1], device=x.device)
        count = torch.tensor(list(real), device=x.device)[:, None]
        return place[None] < count if side == "right" else place[None] >= x.shape[1] - count

    def limit(self, output: Tensor) -> float:
        """Return the largest difference that is rounding."""
        return 4 * tolerance_of(self.case.bench, self.built) * size_of(output)

    def moved(self, after: Tensor, before: Tensor) -> Tensor:
        """Return `[B, T]`, or `[B]` where outputs are pooled or belong to another sequence: which outputs moved."""
        far = (after - before).abs().amax(dim=-1)
        far = far if self.per_position or far.ndim == 1 else far.amax(dim=1)
        return far > self.limit(before)

    def at_real(self, moved: Tensor, real: Tensor) -> Tensor:
        """Return what moved among the outputs that count."""
        return moved[real] if self.per_position else moved

    def sees(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return `[T, T]` bool: entry (s, t): whether output t (or any) moves with the content of position s.

        Args:
            x: one sequence.
            mask: `[1, T]`.
        """
        length = x.shape[1]
        every = torch.arange(length)
        many = x.repeat(length + 1, *(1,) * (x.ndim - 1))
        other = torch.stack([self.stream.other(many[:-1]) for _ in range(2)])
        all_masks = mask.expand(length + 1, -1).contiguous()
        before = self(many, all_masks)  # of the same batch: a place in it may matter
        found = torch.zeros(length, length, dtype=torch.bool)
        for content in other:
            changed = many.clone()
            changed[every, every] = content[every, every]
            moved = self.moved(self(changed, all_masks), before)[:-1].cpu()
            found |= moved if self.per_position else moved[:, None].expand(length, length)
        return found

    def is_seen(self, x: Tensor, mask: Tensor) -> list[bool]:
        """Return for each position whether its content moves an output elsewhere at a position that is not hidden."""
        seen, length = self.sees(x, mask), x.shape[1]
        if not self.per_position:
            return [bool(row.any()) for row in seen]
        real = mask[0].cpu()
        return [bool((seen[s] & real & (torch.arange(length) != s)).any()) for s in range(length)]
