"""zoo/PR 262: text classifier, sinusoids and maximum over time. einops-like helpers, no buffers."""

import torch
from torch import Tensor, nn

from veriformer.properties import Subject

WHAT = "Padding is multiplied to zero before the maximum over time, where it is to be taken out of it."
CAUSE = (
    "Max pooling sees zeros at padded positions: in every channel whose real states are all negative the maximum is 0 "
    "and comes from the padding, so the class scores of a short text change with whether it is padded at all."
)


def split_heads(x: Tensor, h: int) -> Tensor:
    """b t (h k) -> b h t k"""
    return x.unflatten(-1, (h, -1)).swapaxes(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """b h t k -> b t (h k)"""
    return x.swapaxes(1, 2).flatten(2)


def positions(t: int, d: int, like: Tensor) -> Tensor:
    channel = torch.arange(d, device=like.device)
    rate = 10000.0 ** (-(channel // 2 * 2).double() / d)
    angle = torch.arange(t, device=like.device).double()[:, None] * rate
    return torch.where((channel % 2).bool(), torch.cos(angle), torch.sin(angle)).to(like.dtype)


def max_over_time(x: Tensor, mask: Tensor) -> Tensor:
    """b t d, b t -> b d"""
    pooled = x.masked_fill(~mask[..., None], torch.finfo(x.dtype).min).amax(1)
    return torch.where(mask.any(1, keepdim=True), pooled, torch.zeros_like(pooled))


def max_over_time_zeros(x: Tensor, mask: Tensor) -> Tensor:
    """b t d, b t -> b d"""
    return (x * mask[..., None].to(x.dtype)).amax(1)


class Layer(nn.Module):
    def __init__(self, d: int, h: int, f: int) -> None:
        super().__init__()
        self.h = h
        self.norm_a, self.norm_f = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.i, self.j = nn.Linear(d, f), nn.Linear(f, d)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (split_heads(y, self.h) for y in self.qkv(self.norm_a(x)).chunk(3, -1))
        scores = torch.einsum("bhik,bhjk->bhij", q, k) / k.shape[-1] ** 0.5
        scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(x.dtype).min)
        x = x + self.o(merge_heads(torch.einsum("bhij,bhjk->bhik", scores.softmax(-1), v)))
        return x + self.j(nn.functional.gelu(self.i(self.norm_f(x))))


class MaxClassifier(nn.Module):
    def __init__(self, c, pool) -> None:
        super().__init__()
        self.words = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Layer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.num_classes)
        self.pool = pool

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        x = self.words(ids)
        x = x + positions(x.shape[1], x.shape[2], x)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.pool(self.norm(x), mask))


def subject(pool) -> Subject:
    return Subject(
        kind="classifier",
        name=f"MaxClassifier({pool.__name__})",
        build=lambda c: MaxClassifier(c, pool),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={
            "pooling": "max", "positions": "sinusoidal", "padding_side": "right", "norm_placement": "pre", "final_norm": True,
            "activation": "gelu",
        },
    )  # fmt: skip


right, wrong = subject(max_over_time), subject(max_over_time_zeros)
