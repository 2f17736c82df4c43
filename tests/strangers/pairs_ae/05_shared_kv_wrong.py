WHAT = "A layer that borrows the keys of the layer before rotates them again though they are stored rotated, so its scores depend on t - 2s and not on the distance (line 45)."
"""Keys and values shared between neighbouring layers: every second layer borrows those of the one before it."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def rope(x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """Interleaved pairs; x [B, T, H, K], pos [T]."""
    dim = x.size(-1)
    freq = 1.0 / 10000 ** (torch.arange(0, dim, 2, device=x.device, dtype=torch.float64) / dim)
    phase = torch.outer(pos.double(), freq)[:, None, :]
    c, s = phase.cos().to(x.dtype), phase.sin().to(x.dtype)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * c - odd * s, even * s + odd * c], dim=-1).flatten(-2)


class SharingLayer(nn.Module):
    def __init__(self, c, owns_kv: bool):
        super().__init__()
        if c.d_head % 2:
            raise ValueError("odd head width")
        self.h, self.owns_kv = c.num_heads, owns_kv
        self.norm_attn = nn.RMSNorm(c.d_model, eps=1e-6)
        self.norm_mlp = nn.RMSNorm(c.d_model, eps=1e-6)
        self.q = nn.Linear(c.d_model, c.d_model, bias=False)
        if owns_kv:
            self.kv = nn.Linear(c.d_model, 2 * c.d_model, bias=False)
        self.o = nn.Linear(c.d_model, c.d_model, bias=False)
        self.w1 = nn.Linear(c.d_model, c.d_ff, bias=False)
        self.w2 = nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x, pos, mask, shared):
        B, T, D = x.shape
        y = self.norm_attn(x)
        q = self.q(y).view(B, T, self.h, -1)
        if self.owns_kv:
            k, v = self.kv(y).view(B, T, 2, self.h, -1).unbind(2)
            q, k = rope(q, pos), rope(k, pos)
        else:
            k, v = shared
            q, k = rope(q, pos), rope(k, pos)
        a = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
        x = x + self.o(a.transpose(1, 2).reshape(B, T, D))
        return x + self.w2(F.gelu(self.w1(self.norm_mlp(x)))), (k, v)


class SharedKV(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList([SharingLayer(c, owns_kv=i % 2 == 0) for i in range(c.num_layers)])
        self.norm = nn.RMSNorm(c.d_model, eps=1e-6)
        self.unembed = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, attention_mask=None, first=0):
        T = tokens.size(1)
        pos = torch.arange(first, first + T, device=tokens.device)
        mask = torch.ones(T, T, dtype=torch.bool, device=tokens.device).tril()[None, None]
        if attention_mask is not None:
            mask = mask & attention_mask[:, None, None, :]
            mask = mask | torch.eye(T, dtype=torch.bool, device=tokens.device)  # padding sees itself: no NaN
        x, shared = self.embed(tokens), None
        for layer in self.layers:
            x, shared = layer(x, pos, mask, shared)
        return self.unembed(self.norm(x))


subject = Subject(
    kind="decoder",
    name="cross-layer key-value sharing",
    build=SharedKV,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    mask_forms=("padding",),
    declares={
        "positions": "rotary",
        "layout": "interleaved",
        "padding_side": "both",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "bias": False,
        "output_bias": False,
        "structure": "other",
    },
)
