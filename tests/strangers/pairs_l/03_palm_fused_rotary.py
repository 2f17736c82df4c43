"""PaLM: parallel blocks, one key-value head, SwiGLU, rotary; in the compact style."""

import torch
import torch.nn.functional as F
from torch import einsum, nn

from veriformer.properties import Subject


def exists(x):
    return x is not None


class LayerNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.eps, self.gamma = eps, nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.gamma, None, self.eps)


def rotate(t):
    n, d = t.shape[-2:]
    inv = 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64, device=t.device) / d)
    ang = torch.arange(n, dtype=torch.float64, device=t.device)[:, None] * inv
    cos, sin = ang.cos().to(t.dtype), ang.sin().to(t.dtype)
    a, b = t.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def palm(turn):
    class ParallelBlock(nn.Module):
        def __init__(self, dim, heads, ff):
            super().__init__()
            self.h, self.dh = heads, dim // heads
            self.dims = (dim, self.dh, self.dh, 2 * ff)
            self.norm = LayerNorm(dim)
            self.fused = nn.Linear(dim, sum(self.dims), bias=False)
            self.attn_out = nn.Linear(dim, dim, bias=False)
            self.ff_out = nn.Linear(ff, dim, bias=False)

        def forward(self, x):
            b, n, _ = x.shape
            q, k, v, ff = self.fused(self.norm(x)).split(self.dims, dim=-1)
            q, k, v = turn(q.view(b, n, self.h, self.dh).transpose(1, 2), k, v)
            sim = einsum("b h i d, b j d -> b h i j", q, k) * self.dh**-0.5
            future = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
            attn = sim.masked_fill(future, -torch.inf).softmax(dim=-1)
            out = einsum("b h i j, b j d -> b h i d", attn, v).transpose(1, 2).reshape(b, n, -1)
            gate, up = ff.chunk(2, dim=-1)
            return x + self.attn_out(out) + self.ff_out(F.silu(gate) * up)

    class PaLM(nn.Module):
        def __init__(self, num_tokens, dim, depth, heads, ff):
            super().__init__()
            self.emb = nn.Embedding(num_tokens, dim)
            self.net = nn.Sequential(*[ParallelBlock(dim, heads, ff) for _ in range(depth)])
            self.norm = LayerNorm(dim)
            self.to_logits = nn.Linear(dim, num_tokens, bias=False)
            self.to_logits.weight = self.emb.weight

        def forward(self, ids):
            return self.to_logits(self.norm(self.net(self.emb(ids))))

    return PaLM


def turn_some(q, k, v):
    return rotate(q), rotate(k), v


def turn_fused(q, k, v):
    kv = rotate(torch.stack((k, v), dim=1))
    return rotate(q), *kv.unbind(1)


def subject(cls):
    return Subject(
        kind="decoder",
        name="palm",
        build=lambda c: cls(c.vocab_size, c.d_model, c.num_layers, c.num_heads, c.d_ff),
        forward=lambda m, tokens: m(tokens),
        domain={"d_model": [8, 16], "num_heads": [1, 2, 4]},
        declares={"causal": True, "positions": "rotary", "bias": False, "norm_bias": False, "tied": True},
    )


right = subject(palm(turn_some))
wrong = subject(palm(turn_fused))
WHAT = "keys and values are rotated together: rotary turns the values too, so absolute positions enter the output"
CAUSE = (
    "The rotary embedding is applied to the values as well as to queries and keys, so what attention gives depends on the "
    "absolute position and not on distances alone."
)
