"""A sliding-window decoder with a cache, rotary positions by complex numbers."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "a single cached token is decoded without a mask, so that it sees beyond the sliding window"
CAUSE = (
    "With the cache a chunk of a single token attends to the whole cached past: the sliding window is not applied when "
    "one token is decoded at a time, only to longer chunks and to the whole sequence."
)
WINDOW = 3


def rope(x, start):
    """x [B, T, H, K], neighbours are a pair."""
    T, K = x.shape[1], x.shape[-1]
    theta = 10000.0 ** (-torch.arange(0, K, 2, dtype=torch.float64, device=x.device) / K)
    angle = torch.outer(torch.arange(start, start + T, dtype=torch.float64, device=x.device), theta)[:, None]
    wide = x if x.dtype == torch.float64 else x.float()
    cos, sin = angle.cos().to(wide.dtype), angle.sin().to(wide.dtype)
    even, odd = wide[..., 0::2], wide[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


class WindowAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def mask(self, start, T, device):
        query = torch.arange(start, start + T, device=device)[:, None]
        key = torch.arange(start + T, device=device)[None, :]
        return (key <= query) & (key > query - WINDOW)

    def forward(self, x, past):
        B, T, D = x.shape
        start = 0 if past is None else past[0].shape[2]
        q, k, v = (w(x).view(B, T, self.heads, -1) for w in (self.wq, self.wk, self.wv))
        q, k, v = rope(q, start).transpose(1, 2), rope(k, start).transpose(1, 2), v.transpose(1, 2)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(start, T, x.device))
        return self.wo(y.transpose(1, 2).reshape(B, T, D)), (k, v)


class RollingAttention(WindowAttention):
    def mask(self, start, T, device):
        if T == 1:
            return None
        return super().mask(start, T, device)


class Block(nn.Module):
    def __init__(self, dim, heads, hidden, attention):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
        self.attention = attention(dim, heads)
        self.gate, self.up, self.down = (
            nn.Linear(dim, hidden, bias=False),
            nn.Linear(dim, hidden, bias=False),
            nn.Linear(hidden, dim, bias=False),
        )

    def forward(self, x, past):
        y, present = self.attention(self.norm_1(x), past)
        x = x + y
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h)), present


class Mistral(nn.Module):
    def __init__(self, c, attention):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff, attention) for _ in range(c.num_layers))
        self.norm = nn.RMSNorm(c.d_model, eps=1e-5)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, state=None):
        x = self.embed(tokens)
        new = []
        for i, block in enumerate(self.blocks):
            x, present = block(x, None if state is None else state[i])
            new.append(present)
        return self.lm_head(self.norm(x)), new


def by_chunks(model, chunks):
    state, outputs = None, []
    for chunk in chunks:
        y, state = model(chunk, state)
        outputs.append(y)
    return torch.cat(outputs, dim=1)


def subject(attention):
    return Subject(
        kind="decoder",
        name="Mistral",
        build=lambda c: Mistral(c, attention),
        forward=lambda model, tokens: model(tokens)[0],
        cache=by_chunks,
        domain={"d_model": (8, 16), "num_heads": (1, 2)},
        declares={
            "causal": True,
            "window": WINDOW,
            "positions": "rotary",
            "layout": "interleaved",
            "norm": "rms",
            "norm_placement": "pre",
            "activation": "swiglu",
            "bias": False,
        },
    )


right = subject(WindowAttention)
wrong = subject(RollingAttention)
