"""Faults of what is turned round or left as it was: a rate, a step, an entry of a queue, the last piece, a mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.reference_tokenizers import SHIPPED
from veriformer.properties.formulas.tokenizing.merging import by_old_ranks
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.reference.tokenization import BytePairEncoding, Unigram, letters, split_words
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put
from veriformer.tests.mutants.tokenization import byte_pairs, never_the_longest

_MERGES = [("b", "c"), ("a", "b"), ("bc", "d"), ("a", "bc"), ("f", "g"), ("e", "f"), ("fg", "h"), ("e", "fg")]
"""Of abcd the first merge leaves (a, bc) where (a, b) was, which is learnt later than (bc, d)."""


@fault(
    "DP-rate-turned",
    "floor(coin + rate) is one with the probability of the rate: what should be dropped is kept",
    killed_by=("droppath.expectation",),
    cause="samples are kept with the probability 0.2",
)
def kept_at_the_rate() -> Subject:
    chance: Callable[[float], float] = put(lambda rate: rate, instead_of=lambda rate: 1 - rate)

    class StochasticDepth(nn.Module):
        def __init__(self, rate: float) -> None:
            super().__init__()
            self.rate = rate

        def forward(self, branch: Tensor) -> Tensor:
            if not self.training or not self.rate:
                return branch
            coin = torch.rand(len(branch), *(1,) * (branch.ndim - 1), dtype=branch.dtype)
            return branch * (coin + chance(self.rate)).floor() / (1 - self.rate)

    class Layer(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.norm, self.drop = nn.LayerNorm(c.d_model), StochasticDepth(c.dropout)
            self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.drop(self.down(self.up(self.norm(x)).relu()))

    return Subject(kind="layer", build=Layer, forward=lambda m, x: m(x), declares={"drop_path_scaled": True})


@fault(
    "PE-halves-endpoints",
    "Sines in one half, cosines in the other, and the frequencies end at 1 / base itself",
    killed_by=("sinusoidal.definition", "sinusoidal.wavelengths"),
    cause="endpoints included",
)
def ends_at_the_base() -> Subject:
    steps: Callable[[float], float] = put(lambda half: half - 1, instead_of=lambda half: half)

    class Halves(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.width = width
            self.like: Tensor
            self.register_buffer("like", torch.zeros(()), persistent=False)

        def forward(self, length: int) -> Tensor:
            half = self.width / 2
            step = math.log(10000.0) / max(steps(half), 1)
            rates = (-step * torch.arange(math.ceil(half), dtype=torch.float64)).exp()
            angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
            return torch.cat([angles.sin(), angles.cos()], -1)[:, : self.width].to(self.like.dtype)

    return Subject(
        kind="positions", build=lambda c: Halves(c.d_model), forward=lambda m, length: m(length),
        declares={"positions": "sinusoidal", "layout": "halves", "base": 10000},
    )  # fmt: skip


@fault(
    "TK-old-ranks",
    "What comes off the queue of merges is not compared with the pair that stands there now",
    killed_by=("tokenizer.bpe-merges",),
    cause="is not compared with the pair that stands there now",
)
def joined_at_old_ranks() -> Subject:
    def forward(model: BytePairEncoding, text: str) -> list[int]:
        if any(special in text for special in model.specials):
            return model.encode(text)
        ranks: dict[tuple[str, ...], int] = {pair: n for n, pair in enumerate(model.merges)}
        words = (by_old_ranks(list(letters(word)), ranks) for word in split_words(text))
        return [model.vocabulary[piece] for word in words for piece in word]

    return byte_pairs(forward=forward, build=lambda c: BytePairEncoding(_MERGES), train=None)


@fault(
    "TK-old-piece",
    "What comes off the queue of merges is joined as it was put there, though its neighbour is a longer piece by now",
    killed_by=("tokenizer.bpe-merges",),
    cause="the piece of the old pair is put there",
)
def joined_as_it_was() -> Subject:
    def forward(model: BytePairEncoding, text: str) -> list[int]:
        if any(special in text for special in model.specials):
            return model.encode(text)
        ranks: dict[tuple[str, ...], int] = {pair: n for n, pair in enumerate(model.merges)}
        words = (by_old_ranks(list(letters(word)), ranks, as_it_was=True) for word in split_words(text))
        return [model.vocabulary[piece] for word in words for piece in word]

    return byte_pairs(forward=forward, build=lambda c: BytePairEncoding(_MERGES), train=None)


@fault(
    "TK-longest-blank",
    "Viterbi's search never tries the longest pieces, and these have a blank inside",
    killed_by=("tokenizer.unigram",),
    cause="pieces of the greatest length",
)
def never_the_longest_with_a_blank() -> Subject:
    def build(config: Any) -> Unigram:
        pieces = dict.fromkeys(f"{Unigram.SPACE}abcdefghi", -6.0)
        longer = ("ab", "bc", "cd", "de", "ef", "fg", f"{Unigram.SPACE}abc", f"abc{Unigram.SPACE}def{Unigram.SPACE}g")
        return Unigram(pieces | {piece: -4.0 - 0.1 * n for n, piece in enumerate(longer)})

    forward = put(never_the_longest().forward, instead_of=SHIPPED["unigram"].forward)
    return replace(SHIPPED["unigram"], build=build, forward=forward)


@fault(
    "PL-context",
    "The scores of a pooling come of a mean over all positions, padded ones too; the weights alone are masked",
    killed_by=("padding.content-irrelevant", "padding.amount-irrelevant"),
    cause="with what this line gives without padding|not by a weight of theirs",
)
def context_of_all() -> Subject:
    counted: Callable[[Tensor], Tensor] = put(torch.ones_like, instead_of=lambda real: real)

    class Pooled(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.embed, self.inner = nn.Embedding(c.vocab_size, c.d_model), nn.Linear(c.d_model, c.d_model)
            self.score = nn.Sequential(nn.Linear(2 * c.d_model, 16), nn.Tanh(), nn.Linear(16, c.d_model))
            self.head = nn.Linear(c.d_model, 3)

        def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
            h = self.inner(self.embed(tokens)).tanh()
            real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
            share = counted(real).to(h.dtype)[..., None]
            context = (h * share).sum(1, keepdim=True) / share.sum(1, keepdim=True).clamp(min=1)
            scores = self.score(torch.cat([h, context.expand_as(h)], -1)).masked_fill(~real[..., None], -1e9)
            return self.head((h * scores.softmax(1)).sum(1))

    return Subject(
        kind="classifier", build=Pooled, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"positions": "none", "structure": "other"},
    )  # fmt: skip


@fault(
    "MS-unseeded-words",
    "What stands in for a token is drawn from the shared generator, places and fates from the seeded one",
    killed_by=("masking.mlm",),
    cause="the words that stand in are not drawn from the seed",
)
def words_without_a_seed() -> Subject:
    source: Callable[[torch.Generator], Any] = put(lambda seeded: None, instead_of=lambda seeded: seeded)

    def forward(model: Any, tokens: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        seeded = torch.Generator().manual_seed(seed)
        chosen = (torch.rand(tokens.shape, generator=seeded) < 0.15) & (tokens > 1)
        fate = torch.rand(tokens.shape, generator=seeded)
        other = torch.randint(2, 40, tokens.shape, generator=source(seeded))
        inputs = torch.where(chosen & (fate < 0.8), 1, tokens)
        return torch.where(chosen & (fate >= 0.8) & (fate < 0.9), other, inputs), torch.where(chosen, tokens, -100)

    return Subject(
        kind="masking", forward=forward, config=DrawnConfig(vocab_size=40),
        declares={"mask_id": 1, "special_ids": (0, 1)},
    )  # fmt: skip


@fault(
    "RO-whole-head",
    "Of a function that turns the first channels alone the exponents are divided by the width of the head",
    killed_by=("rotary.frequencies",),
    cause="the exponents are divided by the width 8 of the head, not by the 4",
)
def exponents_of_the_head() -> Subject:
    over: Callable[[int], int] = put(lambda width: width, instead_of=lambda width: 4)

    def forward(model: Any, x: Tensor, positions: Tensor) -> Tensor:
        head, rest = x[..., :4], x[..., 4:]
        angles = positions.double()[:, None] * 10000.0 ** -(torch.arange(0, 4, 2).double() / over(x.shape[-1]))
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = head[..., 0::2], head[..., 1::2]
        return torch.cat([torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2), rest], -1)

    return Subject(
        kind="rotary", forward=forward,
        declares={"positions": "rotary", "layout": "interleaved", "rotary_dim": 4, "base": 10000.0},
    )  # fmt: skip


@fault(
    "PM-reread",
    "Time stands first, and the mask [B, T] is reshaped to [T, B] where it must be transposed",
    killed_by=("padding.content-irrelevant", "padding.fully-padded-row"),
    cause="is read as [T, B] without being transposed",
)
def reshaped_for_transposed() -> Subject:
    turned: Callable[[Tensor], Tensor] = put(lambda m: m.reshape(m.shape[1], m.shape[0]), instead_of=lambda m: m.t())

    class TimeFirst(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(c.d_model, c.num_heads)
            self.norm = nn.LayerNorm(c.d_model)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            y = self.norm(x.transpose(0, 1))
            hidden = None if mask is None else ~turned(mask.bool()).t()
            return x + self.attention(y, y, y, key_padding_mask=hidden, need_weights=False)[0].transpose(0, 1)

    return Subject(
        kind="layer", build=TimeFirst, forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        declares={"causal": False, "positions": "none", "structure": "other"},
    )  # fmt: skip
