"""A decoder with per-head RMS norm of queries and keys and a norm after each sublayer (OLMo-2 like)."""
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject

def rope(x, pos):
    f = 10000.0 ** (-torch.arange(0, x.size(-1), 2, dtype=x.dtype, device=x.device) / x.size(-1))
    a, (x1, x2) = pos[:, None].to(x.dtype) * f, x.chunk(2, -1)
    c, s = a.cos(), a.sin()
    return torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], -1)

class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, self.h = c.d_model, c.num_heads
        self.qn, self.kn = nn.RMSNorm(d // self.h, 1e-6), nn.RMSNorm(d // self.h, 1e-6)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.w1, self.w2, self.w3 = nn.Linear(d, c.d_ff, bias=False), nn.Linear(c.d_ff, d, bias=False), nn.Linear(d, c.d_ff, bias=False)
        self.after_attn, self.after_ff = nn.RMSNorm(d, 1e-6), nn.RMSNorm(d, 1e-6)
    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (self.h, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        i = torch.arange(x.shape[1], device=x.device)
        a = F.scaled_dot_product_attention(rope(self.qn(q), i), rope(self.kn(k), i), v, is_causal=True)
        x = x + self.after_attn(self.o(a.transpose(1, 2).flatten(2)))
        return x + self.after_ff(self.w2(F.silu(self.w1(x)) * self.w3(x)))

class Olmo(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb, self.blocks = nn.Embedding(c.vocab_size, c.d_model), nn.Sequential(*(Block(c) for _ in range(c.num_layers)))
        self.norm, self.head = nn.RMSNorm(c.d_model, 1e-6), nn.Linear(c.d_model, c.vocab_size, bias=False)
    def forward(self, t):
        return self.head(self.norm(self.blocks(self.emb(t))))

common = dict(kind="decoder", build=Olmo, forward=lambda m, tokens: m(tokens),
    domain={"d_model": [8, 16, 24], "num_heads": [1, 2, 4]})
undeclared = Subject(**common)
declared = Subject(**common, declares={"causal": True, "query_key_norm": True, "positions": "rotary", "norm": "rms", "norm_placement": "other", "final_norm": True,
    "activation": "swiglu", "bias": False})
