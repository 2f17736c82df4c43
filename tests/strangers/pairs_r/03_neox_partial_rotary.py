# A GPT-NeoX exercise, nanoGPT manner: rotary on the first ROTARY channels of every head, the others pass.
import math

import torch
import torch.nn as nn
from torch.nn import functional as F

from veriformer.properties import Subject

ROTARY = 4


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head, rope_width):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.rope_width = rope_width

    def rope(self, x):
        inv_freq = 10000.0 ** (-torch.arange(0, ROTARY, 2, device=x.device).float() / self.rope_width)
        angles = torch.arange(x.size(-2), device=x.device)[:, None] * inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        turn, keep = x[..., :ROTARY], x[..., ROTARY:]
        turn = turn * angles.cos().to(x.dtype) + rotate_half(turn) * angles.sin().to(x.dtype)
        return torch.cat((turn, keep), dim=-1)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        q, k = self.rope(q), self.rope(k)
        att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        att = att.masked_fill(torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1), float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, n_embd, n_head, n_inner, rope_width):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head, rope_width)
        self.mlp = nn.Sequential(nn.Linear(n_embd, n_inner), nn.GELU(), nn.Linear(n_inner, n_embd))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NeoX(nn.Module):
    def __init__(self, c, rope_width):
        super().__init__()
        if c.d_model // c.num_heads < ROTARY:
            raise ValueError("a head is narrower than its rotated part")
        self.wte = nn.Embedding(c.vocab_size, c.d_model)
        self.h = nn.ModuleList([Block(c.d_model, c.num_heads, c.d_ff, rope_width) for _ in range(c.num_layers)])
        self.ln_f = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, idx):
        x = self.wte(idx)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def make(width_of):
    return Subject(
        kind="decoder",
        name="NeoX",
        build=lambda c: NeoX(c, width_of(c)),
        forward=lambda m, tokens: m(tokens),
        domain={"d_model": (16, 32), "num_heads": (1, 2)},
        declares={
            "positions": "rotary",
            "rotary_dim": ROTARY,
            "base": 10000,
            "layout": "halves",
            "norm": "layer",
            "norm_placement": "pre",
            "final_norm": True,
            "activation": "gelu",
        },
    )


right = make(lambda c: ROTARY)
wrong = make(lambda c: c.d_model // c.num_heads)
WHAT = "The exponents of the rotary frequencies are divided by the width of a head instead of by the rotated width."
CAUSE = (
    "inv_freq is base^(-2i/d_head) where only rotary_dim channels are rotated and base^(-2i/rotary_dim) is meant: "
    "all pairs after the first turn too fast, the spectrum ends long before 1/base."
)
