"""Differential attention: the difference of two softmaxes, normed by head, lambda learned by layer."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import DrawnConfig, Subject


def lambda_init_fn(depth):
    return 0.8 - 0.6 * math.exp(-0.3 * depth)


class MultiheadDiffAttn(nn.Module):
    def __init__(self, embed_dim, num_heads, depth):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads // 2
        if embed_dim // num_heads % 2:
            raise ValueError("two halves of a head are needed")
        self.scaling = self.head_dim**-0.5
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(embed_dim, embed_dim, bias=False) for _ in range(4)
        )
        self.lambda_init = lambda_init_fn(depth)
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(torch.zeros(self.head_dim).normal_(mean=0, std=0.1)) for _ in range(4)
        )
        self.subln = nn.RMSNorm(2 * self.head_dim, eps=1e-5)

    def forward(self, x, attn_mask):
        b, t, d = x.shape
        q = self.q_proj(x).view(b, t, 2 * self.num_heads, self.head_dim).transpose(1, 2) * self.scaling
        k = self.k_proj(x).view(b, t, 2 * self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.num_heads, 2 * self.head_dim).transpose(1, 2)
        w = torch.matmul(q, k.transpose(-1, -2)).masked_fill(~attn_mask, torch.finfo(x.dtype).min)
        w = F.softmax(w, dim=-1).view(b, self.num_heads, 2, t, t)
        lambda_1 = torch.exp(torch.sum(self.lambda_q1 * self.lambda_k1))
        lambda_2 = torch.exp(torch.sum(self.lambda_q2 * self.lambda_k2))
        lambda_full = lambda_1 - lambda_2 + self.lambda_init
        attn = torch.matmul(w[:, :, 0] - lambda_full * w[:, :, 1], v)
        attn = self.subln(attn) * (1 - self.lambda_init)
        return self.out_proj(attn.transpose(1, 2).reshape(b, t, d))


class DiffLayer(nn.Module):
    def __init__(self, d, h, f, depth):
        super().__init__()
        self.attn = MultiheadDiffAttn(d, h, depth)
        self.norm1, self.norm2 = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)
        self.gate, self.up, self.down = (
            nn.Linear(d, f, bias=False), nn.Linear(d, f, bias=False), nn.Linear(f, d, bias=False)
        )

    def forward(self, x, mask):
        x = x + self.attn(self.norm1(x), mask)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class DiffTransformer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed, self.places = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList([DiffLayer(c.d_model, c.num_heads, c.d_ff, i) for i in range(c.num_layers)])
        self.norm, self.head = nn.RMSNorm(c.d_model, eps=1e-5), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, mask=None):
        t = tokens.shape[1]
        see = torch.ones(t, t, dtype=torch.bool, device=tokens.device).tril()[None, None]
        if mask is not None:
            see = see & mask.bool()[:, None, None]
        x = self.embed(tokens) + self.places(torch.arange(t, device=tokens.device))
        for layer in self.layers:
            x = layer(x, see)
        return self.head(self.norm(x))


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


declared = Subject(
    kind="decoder", name="differential attention", build=DiffTransformer, forward=forward,
    declares={
        "causal": True, "positions": "learned", "attention_scale": "1/sqrt(d_head/2)", "norm": "rms",
        "norm_placement": "pre", "final_norm": True, "residual": True, "activation": "swiglu", "bias": False,
        "output_bias": False, "tied": False, "padding_side": "right", "beyond_max_len": "error", "structure": "other",
        "embedding_scale": False,
    },
)
undeclared = Subject(kind="decoder", build=DiffTransformer, forward=forward)
