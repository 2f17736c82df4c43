"""Causes that the amount of padding, filled prompts and expanded heads are given; none of them for a right model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties import Subject, check
from veriformer.properties.subject.sizes import DrawnConfig


def cause_of(subject: Subject, name: str) -> str:
    (result,) = check(subject, only=[name], profile="quick").results
    return result.counterexample.cause if result.counterexample else ""


class Pooled(nn.Module):
    """An encoder of one layer that may pool; `fault` names what counts padding."""

    def __init__(self, config: DrawnConfig, fault: str, *, pools: bool) -> None:
        super().__init__()
        self.fault, self.pools, width = fault, pools, config.d_model
        self.tokens, self.places = nn.Embedding(config.vocab_size, width), nn.Embedding(64, width)
        self.bias = nn.Parameter(torch.randn(64))
        self.mix, self.head = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        length = tokens.shape[1]
        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
        first = length if self.fault == "places" else 0
        x = self.tokens(tokens) + self.places(torch.arange(first, first + length))
        query, key, value = self.mix(F.layer_norm(x, x.shape[-1:])).chunk(3, dim=-1)
        if self.fault == "zeroed":
            key, value = key * mask[..., None], value * mask[..., None]
        scores = query @ key.transpose(-2, -1) / key.shape[-1] ** 0.5
        if self.fault == "temperature":
            scores = scores * length**0.5
        if self.fault == "ahead":
            places = torch.arange(length)
            scores = scores + self.bias[(places[:, None] - places) % length]
        if self.fault != "zeroed":
            scores = scores.masked_fill(~mask[:, None], -torch.inf)
        x = self.head(x + scores.softmax(-1) @ value)
        if not self.pools:
            return x
        many = torch.full_like(mask.sum(1), length) if self.fault == "mean" else mask.sum(1)
        return (x * mask[..., None]).sum(1) / many[:, None]


def pooled(fault: str) -> Subject:
    pools = fault in ("mean", "")
    return Subject(
        kind="classifier" if pools else "encoder",
        build=lambda c: Pooled(c, fault, pools=pools),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"causal": False, "padding_side": "right", "positions": "learned"},
    )


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("", ""),
        ("mean", "the number of all positions, padded ones included"),
        ("places", "positions"),
        ("temperature", "the square root of the number of positions: what multiplies them"),
        ("ahead", "indices of keys behind the query, and of no others"),
        ("zeroed", "the same key whatever stands there"),
    ],
)
def test_the_amount_of_padding_is_explained(fault: str, words: str) -> None:
    told = cause_of(pooled(fault), "padding.amount-irrelevant")
    assert words in told
    assert bool(told) == bool(words)


class Pair(nn.Module):
    """Source and target; `fault` names what one length does to the other sequence."""

    def __init__(self, config: DrawnConfig, fault: str) -> None:
        super().__init__()
        self.fault, width = fault, config.d_model
        self.tokens, self.places = nn.Embedding(config.vocab_size, width), nn.Embedding(128, width)
        self.own, self.cross = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)

    def attend(self, mix: nn.Linear, x: Tensor, memory: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
        width = x.shape[-1]
        query = F.linear(x, mix.weight[:width])
        key, value = F.linear(memory, mix.weight[width:]).chunk(2, dim=-1)
        scores = query @ key.transpose(-2, -1) / width**0.5
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], -torch.inf)
        return x + scores.softmax(-1) @ value

    def forward(
        self, source: Tensor, target: Tensor, source_mask: Tensor | None = None, target_mask: Tensor | None = None
    ) -> Tensor:
        start = source.shape[1] if self.fault == "goes on" else 0
        memory = self.tokens(source) + self.places(torch.arange(source.shape[1]))
        x = self.tokens(target) + self.places(torch.arange(start, start + target.shape[1]))
        x = self.attend(self.own, x, x, target_mask, causal=True)
        causal = self.fault == "equal" and source.shape[1] == target.shape[1]
        return self.attend(self.cross, x, memory, source_mask, causal=causal)


def pair(fault: str) -> Subject:
    return Subject(
        kind="encoder_decoder",
        build=lambda c: Pair(c, fault),
        forward=lambda m, source, target, source_mask=None, target_mask=None: m(
            source, target, source_mask, target_mask
        ),
        declares={"causal": True, "padding_side": "right", "positions": "learned"},
    )


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("", ""),
        ("goes on", "positions of the other sequence"),
        ("equal", "taken for self-attention by its shape"),
    ],
)
def test_what_one_length_does_to_the_other_sequence_is_explained(fault: str, words: str) -> None:
    told = cause_of(pair(fault), "padding.amount-irrelevant")
    assert words in told
    assert bool(told) == bool(words)
    assert "shifted" not in told


class Grouped(nn.Module):
    """A decoder with fewer key-value heads, a cache and generation."""

    def __init__(self, config: DrawnConfig, fault: str) -> None:
        super().__init__()
        self.fault, self.heads, self.groups = fault, config.num_heads, config.num_key_value_heads
        width = config.d_model
        self.size = width // self.heads
        self.tokens, self.head = nn.Embedding(config.vocab_size, width), nn.Linear(width, config.vocab_size)
        self.places = nn.Embedding(128, width)
        self.query, self.pair = nn.Linear(width, width), nn.Linear(width, 2 * self.groups * self.size)

    def forward(self, tokens: Tensor, past: list[Any] | None = None, start: int | None = None) -> Tensor:
        batch, length = tokens.shape
        past = [] if past is None else past
        many = past[0].shape[2] if past else 0
        start = many if start is None else start
        x = self.tokens(tokens) + self.places(torch.arange(start, start + length))
        query = self.query(x).view(batch, length, self.heads, -1).transpose(1, 2)
        key, value = self.pair(x).view(batch, length, 2 * self.groups, -1).transpose(1, 2).chunk(2, dim=1)
        if past:
            key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        past[:] = [key, value]
        times = self.heads // self.groups
        if many and self.fault == "repeat":
            key, value = key.repeat(1, times, 1, 1), value.repeat(1, times, 1, 1)
        else:
            key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        scores = query @ key.transpose(-2, -1) / self.size**0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + many)
        x = x + (scores.masked_fill(later, -torch.inf).softmax(-1) @ value).transpose(1, 2).flatten(2)
        return self.head(x)

    @torch.no_grad()
    def generate(self, tokens: Tensor, steps: int, use_cache: bool) -> Tensor:
        past: list[Any] = []
        size = tokens.shape[1]
        for step in range(steps):
            if not use_cache:
                logits = self(tokens)[:, -1]
            elif step:
                logits = self(tokens[:, -1:], past, tokens.shape[1] - 1)[:, -1]
            else:
                logits = self(F.pad(tokens, (0, -size % 3)), past)[:, size - 1]
                past[:] = past if self.fault == "filled" else [kept[:, :, :size] for kept in past]
            tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
        return tokens


def grouped(fault: str) -> Subject:
    return Subject(
        kind="decoder",
        build=lambda c: Grouped(c, fault),
        forward=lambda m, tokens: m(tokens),
        cache=lambda m, chunks: torch.cat([m(c, past) for past in [[]] for c in chunks], dim=1),
        generate=lambda m, tokens, steps, use_cache: m.generate(tokens, steps, use_cache),
        declares={"causal": True, "positions": "learned", "grouped_queries": True},
        domain={"d_model": [32], "num_heads": [4, 8], "num_key_value_heads": [2]},
    )


@pytest.mark.parametrize(
    ("fault", "name", "words"),
    [
        ("", "decoding.cache", ""),
        ("", "decoding.generate", ""),
        ("repeat", "decoding.cache", "repeated as a whole (repeat) instead of each in place"),
        ("filled", "decoding.generate", "prompts are filled up to multiples of 3"),
    ],
)
def test_heads_and_filled_prompts_are_explained(fault: str, name: str, words: str) -> None:
    told = cause_of(grouped(fault), name)
    assert words in told
    assert bool(told) == bool(words)


class Blocks(nn.Module):
    """Attention within blocks of four; the filling of the last is hidden only where a mask is given."""

    def __init__(self, config: DrawnConfig, *, lazy: bool) -> None:
        super().__init__()
        self.lazy, self.mix = lazy, nn.Linear(config.d_model, 3 * config.d_model)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        fill = -length % 4
        if mask is None and not self.lazy:
            mask = torch.ones(batch, length, dtype=torch.bool)
        query, key, value = F.pad(self.mix(x), (0, 0, 0, fill)).view(batch, -1, 4, 3 * width).chunk(3, dim=-1)
        scores = query @ key.transpose(-2, -1) / width**0.5
        if mask is not None:
            scores = scores.masked_fill(~F.pad(mask.bool(), (0, fill)).view(batch, -1, 1, 4), -1e30)
        return x + (scores.softmax(-1) @ value).reshape(batch, length + fill, width)[:, :length]


@pytest.mark.parametrize("lazy", [False, True])
def test_filling_that_is_seen_without_a_mask_is_explained(lazy: bool) -> None:
    subject = Subject(
        kind="self_attention",
        build=lambda c: Blocks(c, lazy=lazy),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        declares={"causal": False, "sparse": True, "padding_side": "right", "positions": "none"},
    )
    told = cause_of(subject, "padding.all-ones-mask")
    assert ("without a mask, filling is attended" in told) == lazy
    assert bool(told) == lazy
