"""Causes that decoding and padding masks are given: one sentence a fault, and none of them for a right model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from veriformer.properties import Subject, check
from veriformer.properties.subject.sizes import DrawnConfig


class Small(nn.Module):
    """A decoder of two layers with learned positions and a cache; `fault` names what is wrong."""

    def __init__(self, config: DrawnConfig, fault: str = "") -> None:
        super().__init__()
        self.fault, width = fault, config.d_model
        self.tokens, self.places = nn.Embedding(config.vocab_size, width), nn.Embedding(config.max_len, width)
        self.mixes = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, config.vocab_size)

    def forward(self, tokens: Tensor, past: list[Any] | None = None, mask: Tensor | None = None) -> Tensor:
        past = [None, None] if past is None else past
        many, size = 0 if past[0] is None else past[0][0].shape[1], tokens.shape[1]
        start = 0 if self.fault == "restart" else 2 if many and self.fault == "two" else many
        x = self.tokens(tokens) + self.places(torch.arange(start, start + size))
        for layer, mix in enumerate(self.mixes):
            query, key, value = mix(x).chunk(3, dim=-1)
            if past[layer] is not None:
                old = past[layer]
                key, value = torch.cat([old[0], key], dim=1), torch.cat([old[1], value], dim=1)
            past[layer] = (key, key if self.fault == "values" else value)
            if self.fault == "grown":
                past[layer] = (key * 1.1, value)
            seen = key.shape[1]
            allow = torch.ones(size, seen, dtype=torch.bool).tril(seen - size)
            if self.fault == "top left":
                allow = torch.ones(size, seen, dtype=torch.bool).tril()
            if self.fault == "open" and many:
                allow = torch.ones(size, seen, dtype=torch.bool)
            scores = query @ key.transpose(-2, -1) / key.shape[-1] ** 0.5
            x = x + scores.masked_fill(~allow, -torch.inf).softmax(-1) @ value
        return self.head(x if self.fault == "norm" and many else self.norm(x))

    def cached(self, chunks: list[Tensor]) -> Tensor:
        if self.fault == "stale":
            self.kept = getattr(self, "kept", [None, None])
        past: list[Any] = self.kept if self.fault == "stale" else [None, None]
        return torch.cat([self(chunk, past) for chunk in chunks], dim=1)


def decoder(fault: str) -> Subject:
    return Subject(
        kind="decoder",
        build=lambda c: Small(c, fault),
        forward=lambda m, tokens: m(tokens),
        cache=lambda m, chunks: m.cached(chunks),
        declares={"causal": True, "positions": "learned"},
    )


def cause_of(subject: Subject, name: str) -> str:
    (result,) = check(subject, only=[name], profile="quick").results
    return result.counterexample.cause if result.counterexample else ""


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("", ""),
        ("restart", "positions start again at 0 with each chunk"),
        ("two", "positions of every later chunk start at 2"),
        ("values", "keys are stored for values"),
        ("grown", "changed again"),
        ("top left", "aligned to the top left"),
        ("open", "the causal mask is missing inside such a chunk"),
        ("norm", "norm (LayerNorm), which the whole run calls, is called in the first chunk alone"),
        ("stale", "the cache is not cleared between runs"),
    ],
)
def test_a_cached_run_is_explained(fault: str, words: str) -> None:
    told = cause_of(decoder(fault), "decoding.cache")
    assert words in told
    assert bool(told) == bool(words)


class Masked(nn.Module):
    """Attention of one head under a padding mask; `fault` names what is wrong."""

    def __init__(self, config: DrawnConfig, fault: str = "") -> None:
        super().__init__()
        self.fault, self.mix = fault, nn.Linear(config.d_model, 3 * config.d_model)
        self.near = nn.Conv1d(config.d_model, config.d_model, 3, padding=1)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = torch.ones(x.shape[:2], dtype=torch.bool) if attention_mask is None else attention_mask
        if self.fault == "stale":
            self.kept = mask = getattr(self, "kept", {}).get(x.shape, mask)  # type: ignore[assignment]
            self.kept = {x.shape: mask}
        if self.fault == "convolution":
            x = x + self.near(x.transpose(1, 2)).transpose(1, 2)
        mask = {
            "shifted": mask.roll(1, 1),
            "reversed": mask.flip(1),
            "inverted": ~mask,
            "first": mask[:1].expand_as(mask),
        }.get(self.fault, mask)
        query, key, value = self.mix(x).chunk(3, dim=-1)
        if self.fault == "norm":
            key = nn.functional.normalize(key, dim=1)
        scores = query @ key.transpose(-2, -1) / key.shape[-1] ** 0.5
        hidden = ~mask[:, :, None] if self.fault == "rows" else ~mask[:, None]
        fill = {"zero": 0.0, "rows": -1e9}.get(self.fault, -torch.inf)
        scores = scores - 10.0 * hidden if self.fault == "weak" else scores.masked_fill(hidden, fill)
        return scores.softmax(-1).nan_to_num() @ value


def masked(fault: str) -> Subject:
    return Subject(
        kind="self_attention",
        build=lambda c: Masked(c, fault),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        declares={"causal": False, "structure": "other", "empty_row": "zeros", "padding_side": "both"},
    )


@pytest.mark.parametrize(
    ("fault", "name", "words"),
    [
        ("", "padding.content-irrelevant", ""),
        ("shifted", "padding.every-position-hides", "shifted by one"),
        ("reversed", "padding.every-position-hides", "reversed order"),
        ("inverted", "padding.content-irrelevant", "inverted"),
        ("rows", "padding.content-irrelevant", "laid over the queries"),
        ("zero", "padding.content-irrelevant", "a score of 0 instead of -inf"),
        ("weak", "padding.content-irrelevant", "the mask adds -10 to their scores"),
        ("norm", "padding.content-irrelevant", "keys of real positions change with hidden content"),
        ("convolution", "padding.content-irrelevant", "as through a convolution"),
        ("first", "padding.amount-irrelevant", "the padding mask of the first sample is used for all"),
        ("stale", "batch.permutation", "an earlier call of that shape"),
    ],
)
def test_a_mask_that_does_not_hide_is_explained(fault: str, name: str, words: str) -> None:
    told = cause_of(masked(fault), name)
    assert words in told
    assert bool(told) == bool(words)


class Pooled(nn.Module):
    """A pooling of embeddings under a mask."""

    def __init__(self, config: DrawnConfig, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.tokens, self.head = nn.Embedding(config.vocab_size, config.d_model), nn.Linear(config.d_model, 3)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens)
        mask = torch.ones_like(tokens) if attention_mask is None else attention_mask.long()
        count = mask.sum(1, keepdim=True).clamp(min=1)
        if self.fault == "divides":
            count = torch.full_like(count, tokens.shape[1])
        if self.fault == "all":
            return self.head(x.mean(1))
        if self.fault in ("maximum", "zeros"):
            fill = 0.0 if self.fault == "zeros" else -1e9
            return self.head(x.masked_fill(mask[..., None] == 0, fill).amax(1))
        if self.fault == "looked up":
            return self.head(x[torch.arange(len(x)), count[:, 0] - 1])
        return self.head((x * mask[..., None]).sum(1) / count)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("", ""),
        ("maximum", ""),
        ("divides", "the padded length, instead of by their number"),
        ("all", "the mean over all 6 positions"),
        ("zeros", "padded states are set to 0 instead of -inf"),
        ("looked up", "looked up at the number of real ones - 1"),
    ],
)
def test_pooling_is_explained(fault: str, words: str) -> None:
    subject = Subject(
        kind="classifier",
        build=lambda c: Pooled(c, fault),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"padding_side": "both", "positions": "none"},
    )
    told = cause_of(subject, "padding.pooling")
    assert words in told
    assert bool(told) == bool(words)
