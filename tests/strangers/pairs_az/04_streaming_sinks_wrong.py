WHAT = "& binds tighter than |: sink tokens are seen by queries before them, so that query 0 sees token 1 (line 24)."
"""A streaming language model: a sliding window, and the first tokens kept as sinks. einsum throughout."""

import torch
from torch import einsum, nn

from veriformer.properties import Subject

WINDOW, SINKS = 3, 2


def sinusoid(length, dim, like):
    at = torch.arange(length, dtype=torch.float64, device=like.device)[:, None]
    angle = at * 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=like.device) / dim)
    table = torch.zeros(length, dim, dtype=torch.float64, device=like.device)
    table[:, 0::2] = angle.sin()
    table[:, 1::2] = angle.cos()[:, : dim // 2]
    return table.to(like.dtype)


def streaming_mask(length, device):
    i = torch.arange(length, device=device).unsqueeze(1)
    j = torch.arange(length, device=device).unsqueeze(0)
    return (j <= i) & (i - j < WINDOW) | (j < SINKS)


class StreamingAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.scale = (dim // heads) ** -0.5
        self.to_q = nn.Parameter(torch.randn(heads, dim, dim // heads) * dim**-0.5)
        self.to_k = nn.Parameter(torch.randn(heads, dim, dim // heads) * dim**-0.5)
        self.to_v = nn.Parameter(torch.randn(heads, dim, dim // heads) * dim**-0.5)
        self.to_out = nn.Parameter(torch.randn(heads, dim // heads, dim) * dim**-0.5)

    def forward(self, x, mask):
        q = einsum("btd,hdk->bhtk", x, self.to_q) * self.scale
        k = einsum("bsd,hdk->bhsk", x, self.to_k)
        v = einsum("bsd,hdk->bhsk", x, self.to_v)
        dots = einsum("bhtk,bhsk->bhts", q, k).masked_fill(~mask, -torch.inf)
        out = einsum("bhts,bhsk->bhtk", dots.softmax(dim=-1), v)
        return einsum("bhtk,hkd->btd", out, self.to_out)


class StreamingLM(nn.Module):
    def __init__(self, vocab, dim, heads, depth, hidden):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                [
                    nn.LayerNorm(dim),
                    StreamingAttention(dim, heads),
                    nn.LayerNorm(dim),
                    nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim)),
                ]
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)
        self.unembed = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + sinusoid(tokens.shape[1], x.shape[-1], x)
        mask = streaming_mask(tokens.shape[1], tokens.device)
        for norm_a, attention, norm_f, feed_forward in self.blocks:
            x = x + attention(norm_a(x), mask)
            x = x + feed_forward(norm_f(x))
        return self.unembed(self.norm(x))


subject = Subject(
    kind="decoder",
    name="streaming",
    build=lambda c: StreamingLM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens),
    declares={
        "positions": "sinusoidal",
        "layout": "interleaved",
        "window": WINDOW,
        "sink_tokens": SINKS,
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "relu",
    },
)
