"""The stack of layers, where a layer's code stands outside of it: right code is not asked about, a lost layer is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from veriformer.properties.adapters.recognising import as_subject
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.judging.catalogue import catalogue
from veriformer.properties.judging.judge import Judge


class Block(nn.Module):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(d_model),
            nn.Linear(d_model, 3 * d_model),
            nn.Linear(d_model, d_model),
        )

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attend(x)


class Looped(nn.Module):
    def __init__(self, vocab_size: int, d_model: int, n_layer: int) -> None:
        super().__init__()
        self.wte, self.head = nn.Embedding(vocab_size, d_model), nn.Linear(d_model, vocab_size)
        self.blocks = nn.ModuleList([Block(d_model) for _ in range(n_layer)])

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx)
        for block in self.blocks[:-1]:
            x = block(x)
        return self.head(self.last(x))

    def last(self, x: Tensor) -> Tensor:
        return self.blocks[-1](x)


class Inlined(Looped):
    def last(self, x: Tensor) -> Tensor:
        return x + self.blocks[-1].attend(x)


class ByItsWeights(Looped):
    def last(self, x: Tensor) -> Tensor:
        block: Any = self.blocks[-1]
        normed = F.layer_norm(x, x.shape[-1:], block.norm.weight, block.norm.bias)
        q, k, v = F.linear(normed, block.qkv.weight, block.qkv.bias).chunk(3, -1)
        return x + F.linear(F.scaled_dot_product_attention(q, k, v, is_causal=True), block.out.weight, block.out.bias)


class Lost(Looped):
    def last(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("model", "outcome", "cause"),
    [
        (Looped, "PASS", ""),
        (Inlined, "NOT_APPLICABLE", ""),
        (ByItsWeights, "NOT_APPLICABLE", ""),
        (Lost, "OPEN", "never applied: layer 1 of the list"),
    ],
)
def test_a_layer_that_is_written_out_is_not_asked_about(model: type[nn.Module], outcome: str, cause: str) -> None:
    torch.manual_seed(0)
    found = Judge(as_subject(model), Settings(profile="quick")).judge(catalogue()["layer.composition"])
    assert found.outcome == outcome, found.reason
    assert (found.counterexample.cause if found.counterexample else "") == cause
