"""Dropout that is on in eval mode makes many properties fail: that is one story, led by the property that names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.properties import Subject, check
from veriformer.reports.stories import stories

Drop = Callable[[nn.Module, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, rate: float, drop: Drop) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.rate, self.drop = rate, drop

    def forward(self, x: Tensor) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        y = self.before(x)
        x = x + self.drop(self, self.attention(y, y, y, attn_mask=later, need_weights=False)[0])
        return x + self.narrow(functional.gelu(self.wide(self.after(x))))


class GPT(nn.Module):
    def __init__(self, config: Any, drop: Drop) -> None:
        super().__init__()
        width = config.d_model
        self.tokens, self.places = nn.Embedding(config.vocab_size, width), nn.Embedding(config.max_len, width)
        self.blocks = nn.ModuleList(
            Block(width, config.num_heads, config.dropout, drop) for _ in range(config.num_layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, config.vocab_size)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return logits, loss


def gpt(drop: Drop) -> Subject:
    return Subject(
        kind="decoder",
        build=lambda c: GPT(c, drop),
        forward=lambda m, tokens: m(tokens),
        loss=lambda m, tokens, labels: m(tokens, labels)[1],
        declares={"causal": True},
    )


def always(block: nn.Module, x: Tensor) -> Tensor:
    return functional.dropout(x, block.rate)  # type: ignore[arg-type]


def in_training(block: nn.Module, x: Tensor) -> Tensor:
    return functional.dropout(x, block.rate, block.training)  # type: ignore[arg-type]


ASKED = ["batch", "causality.prefix-consistency", "dropout", "gradients.checkpointing", "loss.of-model",
         "numerics.stateless", "numerics.strided", "parameters.registered", "anatomy", "decoding"]  # fmt: skip


def test_all_that_fails_by_dropout_is_one_story() -> None:
    report = check(gpt(always), profile="quick", only=ASKED)
    found = stories(report.to_json()["subjects"][0])
    ids = [r["id"] for story in found for r in (story.told, *story.others)]
    assert {"dropout.eval-deterministic", "parameters.registered", "loss.of-model"} <= set(ids)
    assert [story.told["id"] for story in found] == ["dropout.eval-deterministic"], [
        (story.told["id"], story.case["cause"]) for story in found
    ]
    assert "OPEN" not in {r.outcome for r in report.results}


@pytest.mark.parametrize("name", ["parameters.registered", "loss.of-model"])
def test_a_right_one_passes(name: str) -> None:
    assert check(gpt(in_training), profile="quick", only=[name]).ok
