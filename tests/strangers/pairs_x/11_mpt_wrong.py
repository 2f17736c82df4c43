WHAT = "For heads that are no power of two the slopes of the next power are taken in the wrong order, the even ones first (line 19)."
"""MPT-7B (MosaicML 2023): ALiBi, no biases anywhere, tied embeddings."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def gen_slopes(n_heads, alibi_bias_max=8):
    """The slopes of n_heads; of heads that are no power of two, those of the next power, every other one."""
    ceiling = 2 ** math.ceil(math.log2(n_heads))
    m = torch.arange(1, ceiling + 1, dtype=torch.float64) * (alibi_bias_max / ceiling)
    slopes = 1.0 / torch.pow(2.0, m)
    if ceiling != n_heads:
        slopes = torch.cat((slopes[::2], slopes[1::2]))[:n_heads]
    return slopes


class LayerNorm(nn.Module):
    """Without a bias."""

    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.weight, None, self.eps)


class MPTAttention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.softmax_scale = 1 / math.sqrt(d_model / n_heads)
        self.Wqkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x, bias, allowed):
        B, T, D = x.shape
        q, k, v = (t.view(B, T, self.n_heads, -1).transpose(1, 2) for t in self.Wqkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-1, -2) * self.softmax_scale + bias
        weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1)
        return self.out_proj((weights @ v).transpose(1, 2).reshape(B, T, D))


class MPTBlock(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.norm_1, self.norm_2 = LayerNorm(d_model), LayerNorm(d_model)
        self.attn = MPTAttention(d_model, n_heads)
        self.up_proj = nn.Linear(d_model, d_ff, bias=False)
        self.down_proj = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x, bias, allowed):
        x = x + self.attn(self.norm_1(x), bias, allowed)
        return x + self.down_proj(F.gelu(self.up_proj(self.norm_2(x))))


class MPT(nn.Module):
    def __init__(self, vocab_size, d_model, n_heads, n_layers, d_ff):
        super().__init__()
        self.n_heads = n_heads
        self.wte = nn.Embedding(vocab_size, d_model)
        self.blocks = nn.ModuleList([MPTBlock(d_model, n_heads, d_ff) for _ in range(n_layers)])
        self.norm_f = LayerNorm(d_model)

    def alibi(self, length, like):
        distance = torch.arange(1 - length, 1, dtype=torch.float64, device=like.device)
        slopes = gen_slopes(self.n_heads).to(like.device)
        return (slopes[:, None, None] * distance).to(like.dtype)  # [H, 1, S]

    def forward(self, tokens, attention_mask=None):
        T = tokens.shape[1]
        allowed = torch.ones(T, T, dtype=torch.bool, device=tokens.device).tril()[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, None, :]
        x = self.wte(tokens)
        bias = self.alibi(T, x)
        for block in self.blocks:
            x = block(x, bias, allowed)
        return F.linear(self.norm_f(x), self.wte.weight)


subject = Subject(
    kind="decoder",
    name="MPT",
    build=lambda c: MPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    domain={"d_model": (12, 24), "num_heads": (2, 3, 6)},
    declares={
        "positions": "alibi",
        "slopes": "interleaved",
        "norm": "layer",
        "norm_bias": False,
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "bias": False,
        "tied": True,
        "output_bias": False,
        "padding_side": "both",
    },
)
