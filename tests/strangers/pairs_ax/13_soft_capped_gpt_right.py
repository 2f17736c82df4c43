"""A decoder with soft-capped scores, in einsum."""

from dataclasses import dataclass

import torch
from torch import einsum, nn
from torch.nn import functional as F

from veriformer.properties import Subject


@dataclass
class Config:
    vocab_size: int
    n_embd: int
    n_head: int
    n_layer: int
    n_inner: int
    block_size: int
    attn_logit_softcap: float = 5.0


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.g = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return self.g * (x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt())


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        d, h = config.n_embd, config.n_head
        self.scale = (d // h) ** -0.5
        self.softcap = config.attn_logit_softcap
        self.wqkv = nn.Parameter(torch.randn(3, h, d // h, d) * d**-0.5)
        self.wo = nn.Parameter(torch.randn(d, h, d // h) * d**-0.5)

    def forward(self, x, allowed):
        q, k, v = einsum("btd,nhkd->nbhtk", x, self.wqkv)
        logits = einsum("bhtk,bhsk->bhts", q, k) * self.scale
        logits = self.softcap * torch.tanh(logits / self.softcap)
        logits = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)
        y = einsum("bhts,bhsk->bhtk", logits.softmax(-1), v)
        return einsum("bhtk,dhk->btd", y, self.wo)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.pre_attn, self.pre_mlp = RMSNorm(config.n_embd), RMSNorm(config.n_embd)
        self.attn = Attention(config)
        self.up = nn.Linear(config.n_embd, config.n_inner, bias=False)
        self.down = nn.Linear(config.n_inner, config.n_embd, bias=False)

    def forward(self, x, allowed):
        x = x + self.attn(self.pre_attn(x), allowed)
        return x + self.down(F.gelu(self.up(self.pre_mlp(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.ln_f = RMSNorm(config.n_embd)

    def forward(self, idx, attention_mask=None):
        t = idx.shape[1]
        allowed = torch.ones(t, t, dtype=torch.bool, device=idx.device).tril()
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :]
        x = self.wte(idx) + self.wpe(torch.arange(t, device=idx.device))
        for block in self.h:
            x = block(x, allowed)
        return self.ln_f(x) @ self.wte.weight.T


subject = Subject(
    kind="decoder",
    name="soft-capped GPT",
    build=lambda c: GPT(Config(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len)),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "positions": "learned",
        "soft_cap": 5.0,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu_tanh",
        "bias": False,
        "tied": True,
        "padding_side": "right",
    },
)
