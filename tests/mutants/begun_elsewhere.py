"""Faults of beginnings and ends: a maximum from 0, means merged by halves, a filled source, a draw used twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put


@fault(
    "SM-maximum-from-zero",
    "The largest score is looked for from 0 on, and rows of negative scores have none",
    killed_by=("softmax.shift-invariance", "softmax.no-overflow"),
    cause="the maximum begins at 0",
)
def maximum_from_zero() -> Subject:
    start: float = put(0.0, instead_of=-torch.inf)

    def forward(m: Any, scores: Tensor, dim: int = -1) -> Tensor:
        top = torch.full_like(scores.select(dim, 0), start)
        for one in scores.unbind(dim):
            top = torch.maximum(top, one)
        grown = (scores - top.unsqueeze(dim)).exp()
        return grown / grown.sum(dim, keepdim=True)

    return Subject(kind="softmax", forward=forward)


@fault(
    "NO-means-by-halves",
    "Means of blocks of channels are joined by their middle, however many channels stand behind each",
    killed_by=("norm.definition", "norm.statistics"),
    cause="in the mean tiles of 6 channels are joined by halves",
)
def means_by_halves() -> Subject:
    share: Callable[[int, int], float] = put(lambda size, total: 0.5, instead_of=lambda size, total: size / total)

    class Joined(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.gain, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

        def forward(self, x: Tensor) -> Tensor:
            first, *others = x.split(6, -1)
            mean, count = first.mean(-1, keepdim=True), first.shape[-1]
            for block in others:
                size = block.shape[-1]
                mean = mean + share(size, count + size) * (block.mean(-1, keepdim=True) - mean)
                count += size
            centred = x - mean
            variance = centred.square().mean(-1, keepdim=True)
            return centred * torch.rsqrt(variance + 1e-5) * self.gain + self.bias

    return Subject(
        kind="norm", build=lambda c: Joined(c.d_model), forward=lambda m, x: m(x), declares={"norm": "layer"}
    )


@fault(
    "PM-filled-without-mask",
    "Sequences are filled up to a multiple of 8, and hidden is that only where a mask was given",
    killed_by=("padding.all-ones-mask",),
    cause="filled up to a multiple of 8",
)
def filled_without_mask() -> Subject:
    asks: bool = put(True, instead_of=False)

    class Filled(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.embed = nn.Embedding(c.vocab_size, c.d_model)
            self.mix = nn.Linear(c.d_model, c.d_model)
            self.score, self.value = nn.Linear(c.d_model, c.num_heads), nn.Linear(c.d_model, c.d_model)
            self.head = nn.Linear(c.d_model, c.vocab_size)

        def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            real = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask
            more = -tokens.shape[1] % 8
            x = self.embed(F.pad(tokens, (0, more)))
            real = F.pad(real, (0, more))
            scores = self.score(torch.tanh(self.mix(x)))  # [B, T, H]
            if not asks or attention_mask is not None:
                scores = scores.masked_fill(~real[..., None], torch.finfo(scores.dtype).min)
            heads = self.value(x).unflatten(-1, (scores.shape[-1], -1))
            pooled = (scores.softmax(1)[..., None] * heads).sum(1, keepdim=True).flatten(2)
            return self.head(x + pooled)[:, : tokens.shape[1]]  # type: ignore[no-any-return]

    return Subject(
        kind="encoder",
        build=Filled,
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"padding_side": "both", "positions": "none", "structure": "other"},
    )


@fault(
    "MK-one-draw",
    "The word that stands in is made of the draw that decided that one is to stand in",
    killed_by=("masking.mlm",),
    cause="drawn, of",
)
def one_draw() -> Subject:
    again: bool = put(False, instead_of=True)

    def forward(m: Any, tokens: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        draw = torch.rand(tokens.shape, generator=generator)
        word = torch.rand(tokens.shape, generator=generator) if again else draw
        chosen = (draw < 0.15) & (tokens > 2)
        labels = tokens.masked_fill(~chosen, -100)
        words = (3 + word * (tokens.max() - 2)).long()
        masked = torch.where(chosen & (draw < 0.12), 2, tokens)
        return torch.where(chosen & (draw >= 0.12) & (draw < 0.135), words, masked), labels

    return Subject(kind="masking", forward=forward, declares={"mask_id": 2, "special_ids": (0, 1, 2)})
