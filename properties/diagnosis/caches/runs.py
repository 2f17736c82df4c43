"""Cached and whole runs of one subject, each on a model that nothing ran on before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from veriformer.properties.bench.measured import judged_dtypes, tolerance_of
from veriformer.properties.bench.pool import Built
from veriformer.properties.definitions.differences import size_of
from veriformer.properties.diagnosis.attentions import Attended, attentions
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.chunked import cached_outputs

BATCH = 5  # no other size of the small models


class CachedRuns:
    """Cached and whole runs of one subject, each on a model that nothing ran on before.

    Attributes:
        case: of the failure.
        built: the model that is copied.
        length: of the sequences that are looked at.
        source: `[1, S]`, what an encoder-decoder translates in all of them, of a length that nothing else has; or None.
    """

    def __init__(self, case: Case, built: Built) -> None:
        if case.subject.module is None:
            built = case.bench.pool.get(built.config, judged_dtypes(case.bench)[-1], raw=built.is_raw)
        self.case, self.built = case, built
        self.generator = torch.Generator().manual_seed(11)
        longest = int(min(case.subject.fact("max_len", 64), built.config.max_len))
        self.window = case.subject.fact("window")
        self.length = min(longest, 16, max(9, 2 * (self.window or 0) + 5))
        self.source = self.tokens(1, min(longest, 11)) if case.subject.kind == "encoder_decoder" else None

    def clean(self) -> Built:
        """Return a model that nothing ran on."""
        return self.case.bench.pool.fresh(self.built.config, self.built.dtype, raw=self.built.is_raw)

    def tokens(self, batch: int, length: int) -> Tensor:
        """Return tokens that differ from one another within a sequence, where there are as many."""
        size = self.built.config.vocab_size
        rows = [
            torch.randperm(size, generator=self.generator).repeat(length // size + 1)[:length] for _ in range(batch)
        ]
        return torch.stack(rows).to(self.case.bench.device)

    def cached(
        self,
        x: Tensor,
        sizes: Sequence[int],
        mask: Tensor | None = None,
        *,
        on: Built | None = None,
        **given: Any,
    ) -> Tensor:
        """Return the outputs of a cached run of these chunks."""
        if mask is not None:
            given["attention_mask"] = mask
        model = (on or self.clean()).module
        with torch.no_grad():
            chunks = list(x.split(list(sizes), dim=1))
            return cached_outputs(self.case.bench, model, *self._sources(x), chunks, **given)

    def whole(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the outputs of the whole sequence at once."""
        with torch.no_grad():
            return self.call(self.clean(), x, mask)

    def call(self, built: Built, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the outputs of a model for whole sequences."""
        return self.case.call(built, *self._sources(x), x, attention_mask=mask)

    def _sources(self, x: Tensor) -> tuple[Tensor, ...]:
        return () if self.source is None else (self.source.expand(len(x), -1),)

    def attended(self, run: Callable[[], object]) -> list[Attended]:
        """Return the attentions of a run; of an encoder-decoder those of the target to itself."""
        seen = attentions(run)
        if self.source is None:
            return seen
        return [a for a in seen if self.source.shape[1] not in a.weights.shape[-2:]]

    def limit(self, output: Tensor) -> float:
        """Return the largest difference that is rounding."""
        return 4 * tolerance_of(self.case.bench, self.built) * size_of(output)

    def wrong(self, got: Tensor, expected: Tensor) -> list[int]:
        """Return the positions whose outputs differ in any sample."""
        far = (got - expected).abs().amax(dim=(0, 2)) > self.limit(expected)
        return [int(t) for t in far.nonzero().flatten()]

    def seen(self, sizes: Sequence[int] | None, x: Tensor) -> Tensor:
        """Return `[T, T]` bool: whether output t moves when input s is replaced, in some of a few samples.

        Args:
            sizes: of the chunks; None: the whole run.
            x: `[B, T]`.
        """
        batch, length = x.shape
        changed = x.repeat(length + 1, 1, 1)
        for s in range(length):
            step = torch.randint(1, self.built.config.vocab_size, (batch,), generator=self.generator).to(x.device)
            changed[s, :, s] = (x[:, s] + step) % self.built.config.vocab_size
        unchanged = x.repeat(length + 1, 1)  # the same batch: a place in it may matter
        before, after = (
            (self.whole(flat) if sizes is None else self.cached(flat, sizes)).unflatten(0, (length + 1, batch))
            for flat in (unchanged, changed.flatten(0, 1))
        )
        moved = (after - before)[:-1].abs().amax(dim=(1, 3))  # [S, T]
        return (moved > self.limit(before)).T.cpu()
