"""Gemma 2: norms on both sides of each sublayer, soft caps on scores and logits, every other layer local."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import DrawnConfig, Subject

CAP, FINAL_CAP, LOCAL = 5.0, 30.0, 4


class GemmaRMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        y = x if x.dtype == torch.float64 else x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.to(y.dtype))).to(x.dtype)


class GemmaAttention(nn.Module):
    def __init__(self, c, local):
        super().__init__()
        self.h, self.g, self.k, self.local = c.num_heads, c.num_key_value_heads, c.d_model // c.num_heads, local
        if self.k % 2:
            raise ValueError("odd head")
        self.qkv_proj = nn.Linear(c.d_model, (self.h + 2 * self.g) * self.k, bias=False)
        self.o_proj = nn.Linear(self.h * self.k, c.d_model, bias=False)

    def rotary(self, x):  # B T N K
        t, half = x.shape[1], self.k // 2
        rate = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
        turn = torch.polar(torch.ones((), dtype=torch.float64, device=x.device), torch.arange(t, device=x.device)[:, None] * rate)
        y = torch.complex(*x.to(torch.float64).chunk(2, -1)) * turn[:, None]
        return torch.cat([y.real, y.imag], -1).to(x.dtype)

    def forward(self, x, real):
        b, t, _ = x.shape
        q, k, v = self.qkv_proj(x).view(b, t, -1, self.k).split([self.h, self.g, self.g], 2)
        q, k = self.rotary(q), self.rotary(k)
        q = q.view(b, t, self.g, self.h // self.g, self.k).permute(0, 2, 3, 1, 4) * self.k**-0.5
        k, v = k.transpose(1, 2)[:, :, None], v.transpose(1, 2)[:, :, None]
        s = q @ k.transpose(-1, -2)
        s = CAP * torch.tanh(s / CAP)
        gap = torch.arange(t, device=x.device)[:, None] - torch.arange(t, device=x.device)
        see = (gap >= 0) & (gap < LOCAL) if self.local else gap >= 0
        see = see & real[:, None, None, None, :]
        s = s.masked_fill(~see, torch.finfo(s.dtype).min)
        y = s.softmax(-1) @ v
        return self.o_proj(y.permute(0, 3, 1, 2, 4).reshape(b, t, -1))


class GemmaLayer(nn.Module):
    def __init__(self, c, local):
        super().__init__()
        self.attn = GemmaAttention(c, local)
        self.pre1, self.post1, self.pre2, self.post2 = (GemmaRMSNorm(c.d_model) for _ in range(4))
        self.gate, self.up = nn.Linear(c.d_model, c.d_ff, bias=False), nn.Linear(c.d_model, c.d_ff, bias=False)
        self.down = nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x, real):
        x = x + self.post1(self.attn(self.pre1(x), real))
        y = self.pre2(x)
        return x + self.post2(self.down(F.gelu(self.gate(y), approximate="tanh") * self.up(y)))


class Gemma(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embedder = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList([GemmaLayer(c, i % 2 == 0) for i in range(c.num_layers)])
        self.norm = GemmaRMSNorm(c.d_model)

    def forward(self, tokens, mask=None):
        real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
        x = self.embedder(tokens) * self.embedder.embedding_dim**0.5
        for layer in self.layers:
            x = layer(x, real)
        return FINAL_CAP * torch.tanh(self.norm(x) @ self.embedder.weight.t() / FINAL_CAP)


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


declared = Subject(
    kind="decoder", name="Gemma sandwich", build=Gemma, forward=forward,
    declares={
        "causal": True, "positions": "rotary", "layout": "halves", "base": 10000, "soft_cap": CAP, "sparse": True,
        "norm": "rms", "norm_placement": "other", "final_norm": True, "residual": True, "activation": "other",
        "bias": False, "output_bias": False, "tied": True, "grouped_queries": True, "embedding_scale": True,
        "padding_side": "both", "attention_scale": "1/sqrt(d_head)", "beyond_max_len": "works", "structure": "other",
    },
)
undeclared = Subject(kind="decoder", build=Gemma, forward=forward)
