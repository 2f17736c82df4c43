"""A decoder with ALiBi and a sampler with temperature and top-k."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def get_slopes(n):
    """The slopes of `Train Short, Test Long`, for any number of heads."""

    def power_of_two(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(n).is_integer():
        return power_of_two(n)
    closest = 2 ** math.floor(math.log2(n))
    return power_of_two(closest) + get_slopes(2 * closest)[0::2][: n - closest]


class AlibiBlock(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.h = h
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.Wqkv = nn.Linear(d, 3 * d)
        self.out_proj = nn.Linear(d, d)
        self.up_proj, self.down_proj = nn.Linear(d, f), nn.Linear(f, d)

    def forward(self, x, bias):
        b, t, d = x.shape
        q, k, v = self.Wqkv(self.ln1(x)).reshape(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4).unbind(0)
        a = torch.softmax(q @ k.transpose(-1, -2) * (d // self.h) ** -0.5 + bias, dim=-1) @ v
        x = x + self.out_proj(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down_proj(F.gelu(self.up_proj(self.ln2(x))))


class AlibiLM(nn.Module):
    def __init__(self, vocab_size, d, h, n, f):
        super().__init__()
        self.h = h
        self.wte = nn.Embedding(vocab_size, d)
        self.blocks = nn.ModuleList([AlibiBlock(d, h, f) for _ in range(n)])
        self.ln_f = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab_size, bias=False)

    def bias(self, t, mask, like):
        i = torch.arange(t, device=like.device)
        slopes = torch.tensor(get_slopes(self.h), dtype=like.dtype, device=like.device)
        bias = slopes[:, None, None] * (i[None, :] - i[:, None]).to(like.dtype)
        hidden = (i[None, :] > i[:, None])[None, None]
        if mask is not None:
            hidden = hidden | ~mask[:, None, None, :]
        return bias[None].masked_fill(hidden, torch.finfo(like.dtype).min / 2)

    def forward(self, idx, mask=None):
        x = self.wte(idx)
        bias = self.bias(idx.shape[1], mask, x)
        for block in self.blocks:
            x = block(x, bias)
        return self.head(self.ln_f(x))

    @torch.no_grad()
    def sample(self, idx, steps, temperature=1.0, top_k=None):
        """The tokens [B, T + steps], and the probabilities [B, steps, V] that they were drawn with."""
        drawn_from = []
        for _ in range(steps):
            logits = self(idx)[:, -1, :] / temperature
            if top_k is not None:
                best, _ = torch.topk(logits, min(top_k, logits.size(-1)), dim=-1)
                logits = logits.masked_fill(logits < best.min(), -float("inf"))
            probs = F.softmax(logits, dim=-1)
            idx = torch.cat((idx, torch.multinomial(probs, num_samples=1)), dim=1)
            drawn_from.append(probs)
        return idx, torch.stack(drawn_from, dim=1)


subject = Subject(
    kind="decoder",
    name="alibi lm",
    build=lambda c: AlibiLM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    sampling=lambda m, tokens, steps, temperature=1.0, top_k=None: m.sample(tokens, steps, temperature, top_k),
    declares={
        "causal": True,
        "positions": "alibi",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "residual": True,
        "activation": "gelu",
        "bias": True,
        "output_bias": False,
        "tied": False,
        "embedding_scale": False,
        "attention_scale": "1/sqrt(d_head)",
        "memory": "quadratic",
        "padding_side": "both",
        "structure": "textbook",
    },
)
