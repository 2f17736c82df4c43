WHAT = "the smaller initial weights are given by the name c_proj alone: the feed-forward output projections, named fc2 here, keep std 0.02 without 1/sqrt(2 n_layer) (line 72)."
"""A GPT whose weights begin as GPT-2's do."""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


@dataclass
class Config:
    vocab_size: int
    n_positions: int
    n_embd: int
    n_layer: int
    n_head: int
    n_inner: int
    initializer_range: float = 0.02


class Attention(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.heads = cfg.n_head
        self.c_attn = nn.Linear(cfg.n_embd, 3 * cfg.n_embd)
        self.c_proj = nn.Linear(cfg.n_embd, cfg.n_embd)

    def forward(self, x):
        qkv = self.c_attn(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.fc1 = nn.Linear(cfg.n_embd, cfg.n_inner)
        self.fc2 = nn.Linear(cfg.n_inner, cfg.n_embd)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class Layer(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(cfg.n_embd), Attention(cfg)
        self.ln_2, self.mlp = nn.LayerNorm(cfg.n_embd), FeedForward(cfg)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Model(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.wpe = nn.Embedding(cfg.n_positions, cfg.n_embd)
        self.layers = nn.ModuleList(Layer(cfg) for _ in range(cfg.n_layer))
        self.ln_f = nn.LayerNorm(cfg.n_embd)
        self.lm_head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        self.apply(self._init_weights)
        # what writes to the residual stream begins smaller, by the number of residual layers
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, mean=0.0, std=cfg.initializer_range / math.sqrt(2 * cfg.n_layer))

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=self.cfg.initializer_range)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, input_ids):
        x = self.wte(input_ids) + self.wpe.weight[: input_ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.ln_f(x))


subject = Subject(
    kind="decoder",
    name="GPT-2 from scratch",
    build=lambda c: Model(Config(c.vocab_size, c.max_len, c.d_model, c.num_layers, c.num_heads, c.d_ff)),
    forward=lambda m, tokens: m(tokens),
    declares={
        "init": "gpt2",
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "gelu_tanh",
        "tied": True,
        "bias": True,
    },
)
