"""Faults of what is shared that is to be each one's own: words of a row, masks of all steps, keys, norms."""

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
from veriformer.tests.mutants.objectives import masking


@fault(
    "MS-word-of-a-row",
    "One random word is drawn for each row, and stands in at all of its places",
    killed_by=("masking.mlm",),
    cause="one random word is drawn for a row",
)
def one_word_a_row() -> Subject:
    shape: Callable[[Tensor], Any] = put(lambda tokens: (len(tokens), 1), instead_of=lambda tokens: tokens.shape)

    def forward(m: Any, tokens: Tensor, seed: int) -> Any:
        own = torch.Generator().manual_seed(seed)
        chosen = (torch.rand(tokens.shape, generator=own) < 0.15) & (tokens > 4)
        fate = torch.rand(tokens.shape, generator=own)
        words = torch.randint(5, int(tokens.max()) + 1, shape(tokens), generator=own).expand(tokens.shape)
        inputs = torch.where(chosen & (fate < 0.8), 4, tokens)
        inputs = torch.where(chosen & (fate >= 0.8) & (fate < 0.9), words, inputs)
        return inputs, torch.where(chosen, tokens, -100)

    return masking(forward)


class _Seeded(nn.Module):
    """A feed-forward network whose dropout draws from a generator of its own."""

    def __init__(self, c: DrawnConfig, seed: Callable[[_Seeded], int]) -> None:
        super().__init__()
        self.seed, self.rate, self.calls = seed, c.dropout, 0
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(x))
        if self.training and self.rate:
            self.calls += 1
            own = torch.Generator().manual_seed(self.seed(self))
            y = y * (torch.rand(y.shape, generator=own) >= self.rate).to(y) / (1 - self.rate)
        made: Tensor = self.down(y)
        return made


@fault(
    "DR-one-mask",
    "The seed of dropout is drawn once, and every step drops the same",
    killed_by=("dropout.places",),
    cause="is made once (when the model is built) and used in every step",
)
def one_mask_for_all_steps() -> Subject:
    seed: Callable[[_Seeded], int] = put(lambda m: 5, instead_of=lambda m: 5 + m.calls)
    return Subject(
        kind="feed_forward", build=lambda c: _Seeded(c, seed), forward=lambda m, x: m(x),
        declares={"activation": "gelu"},
    )  # fmt: skip


class _Sinks(nn.Module):
    """Causal self-attention to two first tokens and to the last four, with its keys put together of both."""

    def __init__(self, c: DrawnConfig, beside: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.heads, self.beside = c.num_heads, beside
        self.qkv, self.out = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        places = torch.arange(x.shape[1], device=x.device)
        seen = places[None] <= places[:, None]
        near = seen & (places[:, None] - places[None] < 4) & self.beside(places)[None]
        k, v = (torch.cat([y[:, :, :2], y], 2) for y in (k, v))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~torch.cat([seen[:, :2], near], 1), torch.finfo(scores.dtype).min)
        y: Tensor = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return y


@fault(
    "AT-sinks-twice",
    "Sink tokens that lie in the window still stand in the keys twice",
    killed_by=("attention.attends",),
    cause="is not taken out of its usual place",
)
def sinks_stand_twice() -> Subject:
    beside: Callable[[Tensor], Tensor] = put(lambda places: places >= 0, instead_of=lambda places: places >= 2)
    return Subject(
        kind="self_attention", build=lambda c: _Sinks(c, beside), forward=lambda m, x: m(x), mask_forms=(),
        declares={"causal": True, "window": 4, "sink_tokens": 2, "positions": "none"},
    )  # fmt: skip


@fault(
    "RS-raw-keys",
    "A pre-norm layer norms the queries of its attention alone; keys and values are made of the stream as it is",
    killed_by=("residual.placement",),
    cause="is given the stream as it is, without its norm: the keys, the values",
)
def keys_of_the_raw_stream() -> Subject:
    given: Callable[[Tensor, Tensor], Tensor] = put(lambda raw, normed: raw, instead_of=lambda raw, normed: normed)

    class Layer(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.attend = nn.MultiheadAttention(c.d_model, c.num_heads, batch_first=True)
            self.first, self.second = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
            self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            memory = given(x, y)
            x = x + self.attend(y, memory, memory, need_weights=False)[0]
            return x + self.down(F.gelu(self.up(self.second(x))))

    return Subject(
        kind="layer", build=Layer, forward=lambda m, x: m(x),
        declares={"causal": False, "norm_placement": "pre", "activation": "gelu"},
    )  # fmt: skip
