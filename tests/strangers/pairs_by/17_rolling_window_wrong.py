WHAT = "the past is cut to WINDOW - T keys before a chunk of T attends, so that its first queries lose keys inside their window (right for T = 1) (line 36)"
"""Mistral in small: grouped queries, a window of five, a rolling cache that holds no more than the window."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WINDOW = 5


class RMSNorm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, x):
        return self.weight * (x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt())


class Attention(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.h, self.g, self.d = heads, kv_heads, dim // heads
        self.wq = nn.Linear(dim, heads * self.d, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.d, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.d, bias=False)
        self.wo = nn.Linear(heads * self.d, dim, bias=False)

    def forward(self, x, past=None):
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, self.h, self.d).transpose(1, 2)
        k = self.wk(x).view(B, T, self.g, self.d).transpose(1, 2)
        v = self.wv(x).view(B, T, self.g, self.d).transpose(1, 2)
        if past is not None:
            keep = min(max(WINDOW - T, 0), past[0].shape[2])
            start = past[0].shape[2] - keep
            k = torch.cat([past[0][:, :, start:], k], 2)
            v = torch.cat([past[1][:, :, start:], v], 2)
        S = k.shape[2]
        # the last query stands at the last key
        gap = torch.arange(S - T, S, device=x.device)[:, None] - torch.arange(S, device=x.device)
        seen = (gap >= 0) & (gap < WINDOW)
        kk, vv = k.repeat_interleave(self.h // self.g, 1), v.repeat_interleave(self.h // self.g, 1)
        y = F.scaled_dot_product_attention(q, kk, vv, attn_mask=seen)
        return self.wo(y.transpose(1, 2).reshape(B, T, -1)), (k[:, :, -WINDOW:], v[:, :, -WINDOW:])


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attention = Attention(c.d_model, c.num_heads, c.num_key_value_heads)
        self.w1, self.w3 = (nn.Linear(c.d_model, c.d_ff, bias=False) for _ in range(2))
        self.w2 = nn.Linear(c.d_ff, c.d_model, bias=False)
        self.norm1, self.norm2 = RMSNorm(c.d_model), RMSNorm(c.d_model)

    def forward(self, x, past):
        y, present = self.attention(self.norm1(x), past)
        x = x + y
        z = self.norm2(x)
        return x + self.w2(F.silu(self.w1(z)) * self.w3(z)), present


class Mistral(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_layers))
        self.norm, self.output = RMSNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, past=None):
        x, presents = self.embed(tokens), []
        for n, layer in enumerate(self.layers):
            x, present = layer(x, None if past is None else past[n])
            presents.append(present)
        return self.output(self.norm(x)), presents


def cached(model, chunks):
    past, outs = None, []
    for chunk in chunks:
        logits, past = model(chunk, past)
        outs.append(logits)
    return outs


subject = Subject(
    kind="decoder",
    name="rolling window",
    build=Mistral,
    forward=lambda m, tokens: m(tokens)[0],
    cache=cached,
    declares={
        "causal": True,
        "positions": "none",
        "window": WINDOW,
        "grouped_queries": True,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
    },
)
