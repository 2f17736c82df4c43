"""A sum that adds to an older stream than its sublayer takes is asked about, and no right model is."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from veriformer.properties import DrawnConfig, Subject, check
from veriformer.properties.results.records import Result


class Layer(nn.Module):
    """One layer; `is_older`: the second sum adds to what the first one added to."""

    def __init__(self, c: DrawnConfig, is_pre: bool, is_older: bool) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(c.d_model, c.num_heads, batch_first=True)
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.is_pre, self.is_older = is_pre, is_older

    def forward(self, x: Tensor) -> Tensor:
        if self.is_pre:
            taken = self.norm1(x)
            y = x + self.attn(taken, taken, taken, need_weights=False)[0]
            return (x if self.is_older else y) + self.down(torch.relu(self.up(self.norm2(y))))
        y = self.norm1(x + self.attn(x, x, x, need_weights=False)[0])
        out: Tensor = self.norm2((x if self.is_older else y) + self.down(torch.relu(self.up(y))))
        return out


class Parallel(Layer):
    """Both halves take the one norm, and are added to one stream, one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        taken = self.norm1(x)
        out: Tensor = x + self.attn(taken, taken, taken, need_weights=False)[0]
        return out + self.down(torch.relu(self.up(taken)))


class Encoder(nn.Module):
    """Layers behind an embedding; `skips`: the norm of the embedding is the first layer's, as in ModernBERT."""

    def __init__(self, c: DrawnConfig, layer: type[Layer], skips: str = "", **how: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.norm = nn.LayerNorm(c.d_model) if skips == "first" else nn.Identity()
        self.layers = nn.ModuleList(layer(c, **how) for _ in range(c.num_layers))
        if skips:
            self.layers[0 if skips == "first" else -1].norm1 = nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.norm(self.embedding(tokens))
        for layer in self.layers:
            x = layer(x)
        return x


def judged(layer: type[Layer] = Layer, **how: Any) -> Result:
    build = partial(Encoder, layer=layer, **how)
    (result,) = check(
        Subject(kind="encoder", name="e", build=build), only=["anatomy.residual"], profile="quick"
    ).results
    return result


@pytest.mark.parametrize("is_pre", [False, True], ids=["post-LN", "pre-LN"])
def test_a_sum_that_adds_to_an_older_stream_is_asked_about(is_pre: bool) -> None:
    result = judged(is_pre=is_pre, is_older=True)
    assert (result.outcome, result.declare) == ("OPEN", "structure='other'")
    assert "layers.0.down gives is added to the stream as it was before layers.0.attn" in result.reason
    assert judged(is_pre=is_pre, is_older=False).outcome == "PASS"


def test_a_first_layer_behind_a_norm_of_the_embedding_needs_none_and_another_one_does() -> None:
    assert judged(is_pre=True, is_older=False, skips="first").outcome == "PASS"
    assert judged(is_pre=True, is_older=False, skips="last").outcome == "OPEN"


def test_halves_side_by_side_are_added_to_one_stream() -> None:
    assert judged(Parallel, is_pre=True, is_older=False).outcome == "PASS"
