import math
from typing import NamedTuple

import torch
import torch.nn as nn


class WindowConfig(NamedTuple):
    vocab: int = 128
    width: int = 48
    heads: int = 4
    layers: int = 2
    window: int = 8
    max_len: int = 64


class WindowAttention(nn.Module):
    """Causal sliding window attention. The first `n_prefix` tokens (a prompt) are global:
    every position may look at them."""

    def __init__(self, cfg: WindowConfig):
        super().__init__()
        self.heads = cfg.heads
        self.hd = cfg.width // cfg.heads
        self.in_proj = nn.Linear(cfg.width, 3 * cfg.width)
        self.out_proj = nn.Linear(cfg.width, cfg.width)
        i = torch.arange(cfg.max_len)
        dist = i[:, None] - i[None, :]
        self.register_buffer("visible", (dist >= 0) & (dist < cfg.window))

    def forward(self, x, n_prefix=0):
        B, T, W = x.shape
        q, k, v = self.in_proj(x).chunk(3, dim=-1)
        q = q.view(B, T, self.heads, self.hd).transpose(1, 2)
        k = k.view(B, T, self.heads, self.hd).transpose(1, 2)
        v = v.view(B, T, self.heads, self.hd).transpose(1, 2)
        visible = self.visible[:T, :T]
        if n_prefix > 0:
            visible[:, :n_prefix] = True
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.hd)
        scores = scores.masked_fill(~visible, float("-inf"))
        y = torch.softmax(scores, dim=-1) @ v
        return self.out_proj(y.transpose(1, 2).reshape(B, T, W))


class Layer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.norm1 = nn.LayerNorm(cfg.width)
        self.attn = WindowAttention(cfg)
        self.norm2 = nn.LayerNorm(cfg.width)
        self.mlp = nn.Sequential(
            nn.Linear(cfg.width, 2 * cfg.width), nn.SiLU(), nn.Linear(2 * cfg.width, cfg.width)
        )

    def forward(self, x, n_prefix):
        x = x + self.attn(self.norm1(x), n_prefix)
        return x + self.mlp(self.norm2(x))


class WindowLM(nn.Module):
    def __init__(self, cfg: WindowConfig = WindowConfig()):
        super().__init__()
        self.cfg = cfg
        self.tok = nn.Embedding(cfg.vocab, cfg.width)
        self.pos = nn.Embedding(cfg.max_len, cfg.width)
        self.layers = nn.ModuleList([Layer(cfg) for _ in range(cfg.layers)])
        self.norm = nn.LayerNorm(cfg.width)

    def forward(self, ids, n_prefix=0):
        x = self.tok(ids) + self.pos.weight[: ids.size(1)]
        for layer in self.layers:
            x = layer(x, n_prefix)
        return self.norm(x) @ self.tok.weight.T


model = WindowLM(WindowConfig(window=8))
