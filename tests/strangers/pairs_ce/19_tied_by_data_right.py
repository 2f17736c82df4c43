from dataclasses import dataclass

import torch
from torch import nn
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


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.n_head = config.n_head

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (y.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for y in self.c_attn(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(config.n_embd, config.n_inner), nn.Linear(config.n_inner, config.n_embd)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(config.n_embd), CausalSelfAttention(config)
        self.ln_2, self.mlp = nn.LayerNorm(config.n_embd), MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        nn.init.normal_(self.wte.weight, std=0.02)
        nn.init.normal_(self.wpe.weight, std=0.02)
        self.lm_head.weight = self.wte.weight  # the checkpoint has one matrix

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


subject = Subject(
    kind="decoder",
    name="GPT-2 from TensorFlow",
    build=lambda c: GPT2(Config(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len)),
    forward=lambda m, tokens: m(tokens),
    declares={"causal": True, "positions": "learned", "norm": "layer", "norm_placement": "pre", "activation": "gelu_tanh",
              "tied": True, "final_norm": True, "output_bias": False},
)
