"""Faults by which what is hidden, or later, enters beside the scores: normalisers, convolutions, scales of rounding."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put


@fault(
    "PM-normaliser",
    "Hidden memory is left out of the sum of values, and stays in the sum that divides it",
    killed_by=("attention.masked-equals-removed", "padding.content-irrelevant"),
    cause="not of the normaliser",
)
def hidden_keys_in_the_normaliser() -> Subject:
    total = put(lambda e, kept: e.sum(-1, keepdim=True), instead_of=lambda e, kept: kept.sum(-1, keepdim=True))

    class Attention(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.heads = c.num_heads
            self.q, self.k, self.v, self.o = (nn.Linear(c.d_model, c.d_model, bias=False) for _ in range(4))

        def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
            q, k, v = (
                part(y).unflatten(-1, (self.heads, -1)) for part, y in ((self.q, x), (self.k, memory), (self.v, memory))
            )
            scores = torch.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
            e = (scores - scores.amax(-1, keepdim=True)).exp()
            kept = e if memory_mask is None else e.masked_fill(~memory_mask[:, None, None], 0.0)
            mixed = torch.einsum("bhts,bshk->bhtk", kept, v) / total(e, kept).clamp_min(torch.finfo(e.dtype).tiny)
            return self.o(mixed.transpose(1, 2).flatten(2))

    return Subject(
        kind="cross_attention", build=Attention, mask_forms=("padding",),
        forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask), declares={"empty_row": "zeros"},
    )  # fmt: skip


class _Convolved(nn.Module):
    """An encoder of embeddings: two convolutions over time before one layer."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv1d(c.d_model, c.d_model, 3, padding=1) for _ in range(2))
        self.layer = nn.TransformerEncoderLayer(c.d_model, c.num_heads, c.d_ff, 0.0, batch_first=True)


@fault(
    "PM-convolution",
    "Padding is set to zero before the first convolution, and not again before the second",
    killed_by=("padding.amount-irrelevant",),
    cause="is given padded positions that are not zero",
)
def padding_is_convolved() -> Subject:
    again = put(lambda x, real: x, instead_of=lambda x, real: x * real)

    class Encoder(_Convolved):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
            real = mask[:, None].to(x.dtype)
            y = F.gelu(self.first(x.transpose(1, 2) * real))
            y = F.gelu(self.second(again(y, real)))
            return self.layer(y.transpose(1, 2), src_key_padding_mask=~mask)

    return Subject(
        kind="encoder", build=Encoder, forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        inputs="embeddings", declares={"structure": "other", "padding_side": "right"},
    )  # fmt: skip


@fault(
    "CS-scale-of-rounding",
    "Activations are rounded to eight bits by one scale for the whole sequence",
    killed_by=("causality.no-future-influence",),
    cause="the scale by which numbers are rounded is taken over all of the sequence",
)
def one_scale_for_all_tokens() -> Subject:
    largest = put(lambda x: x.abs().amax(), instead_of=lambda x: x.abs().amax(-1, keepdim=True))

    class Rounded(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            scale = (largest(x).clamp_min(1e-8) / 127).detach()
            return F.linear(x + ((x / scale).round() * scale - x).detach(), self.weight, self.bias)

    class Decoder(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.embed, self.place = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
            self.qkv, self.out = Rounded(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
            self.head, self.heads = nn.Linear(c.d_model, c.vocab_size), c.num_heads

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
            q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.head(x + self.out(mixed.transpose(1, 2).flatten(2)))

    return Subject(
        kind="decoder", build=Decoder, forward=lambda m, tokens: m(tokens),
        declares={"quantised": True, "structure": "other", "positions": "learned"},
    )  # fmt: skip
