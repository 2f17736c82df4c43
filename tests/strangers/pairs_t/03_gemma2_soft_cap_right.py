"""A Gemma 2 decoder: soft-capped scores and logits, norms before and behind each sublayer, GeGLU, tied embeddings."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

SCORE_CAP = 15.0
LOGIT_CAP = 30.0


class GemmaNorm(nn.Module):
    """The weight is stored as its distance from one."""

    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(dim)), eps

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * (1 + self.weight)


def cap(x, limit):
    return limit * torch.tanh(x / limit)


def rope(x, base=10000.0):
    length, dim = x.shape[-2:]
    inv = base ** -(torch.arange(0, dim, 2, device=x.device, dtype=torch.float64) / dim)
    angle = torch.arange(length, device=x.device, dtype=torch.float64)[:, None] * inv
    angle = torch.cat((angle, angle), dim=-1)
    a, b = x.chunk(2, dim=-1)
    return x * angle.cos().to(x.dtype) + torch.cat((-b, a), dim=-1) * angle.sin().to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.groups = c.num_heads, c.num_key_value_heads
        self.dim = c.d_model // c.num_heads
        if self.dim % 2:
            raise ValueError("even head_dim only")
        self.scaling = self.dim**-0.5
        self.qkv_proj = nn.Linear(c.d_model, (self.heads + 2 * self.groups) * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, c.d_model, bias=False)

    def forward(self, x, allowed):
        B, T, _ = x.shape
        sizes = [self.heads * self.dim, self.groups * self.dim, self.groups * self.dim]
        q, k, v = (p.view(B, T, -1, self.dim).transpose(1, 2) for p in self.qkv_proj(x).split(sizes, dim=-1))
        q, k = rope(q), rope(k)
        repeats = self.heads // self.groups
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        scores = torch.matmul(q, k.transpose(2, 3))
        scores = cap(scores * self.scaling, SCORE_CAP)
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.pre_attn, self.post_attn = GemmaNorm(c.d_model), GemmaNorm(c.d_model)
        self.pre_ffn, self.post_ffn = GemmaNorm(c.d_model), GemmaNorm(c.d_model)
        self.self_attn = Attention(c)
        self.gate_proj = nn.Linear(c.d_model, c.d_ff, bias=False)
        self.up_proj = nn.Linear(c.d_model, c.d_ff, bias=False)
        self.down_proj = nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x, allowed):
        x = x + self.post_attn(self.self_attn(self.pre_attn(x), allowed))
        h = self.pre_ffn(x)
        h = self.down_proj(F.gelu(self.gate_proj(h), approximate="tanh") * self.up_proj(h))
        return x + self.post_ffn(h)


class Gemma2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList([Layer(c) for _ in range(c.num_layers)])
        self.norm = GemmaNorm(c.d_model)
        self.normalizer = c.d_model**0.5

    def forward(self, tokens, attention_mask=None):
        x = self.embed_tokens(tokens) * self.normalizer
        T = tokens.shape[1]
        allowed = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, None, :]
        for layer in self.layers:
            x = layer(x, allowed)
        return cap(F.linear(self.norm(x), self.embed_tokens.weight), LOGIT_CAP)


subject = Subject(
    kind="decoder",
    name="gemma 2",
    build=Gemma2,
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "positions": "rotary",
        "layout": "halves",
        "soft_cap": SCORE_CAP,
        "attention_scale": "1/sqrt(d_head)",
        "norm": "rms",
        "norm_placement": "other",
        "final_norm": True,
        "activation": "other",
        "embedding_scale": True,
        "tied": True,
        "bias": False,
        "padding_side": "both",
    },
)
