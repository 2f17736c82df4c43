WHAT = 'the memory-saving loss takes the mean of each chunk\'s mean instead of the sum over all chunks by the number of labels that count: chunks with few labels weigh too much (line 66: total = total + F.cross_entropy(self.lm_head(x), y, reduction="mean"))'
"""Small code LM whose loss is computed chunk by chunk, so that all logits never exist at once."""
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F

from veriformer.properties import Subject


@dataclass
class Config:
    vocab_size: int
    n_embd: int
    n_head: int
    n_layer: int
    n_ff: int
    block_size: int
    loss_chunk: int = 4


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.n_head = cfg.n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(cfg.n_embd), nn.LayerNorm(cfg.n_embd)
        self.c_attn, self.c_proj = nn.Linear(cfg.n_embd, 3 * cfg.n_embd), nn.Linear(cfg.n_embd, cfg.n_embd)
        self.c_fc, self.c_out = nn.Linear(cfg.n_embd, cfg.n_ff), nn.Linear(cfg.n_ff, cfg.n_embd)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = [z.view(B, T, self.n_head, -1).transpose(1, 2) for z in self.c_attn(self.ln_1(x)).split(C, -1)]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class CodeGPT(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.wte, self.wpe = nn.Embedding(cfg.vocab_size, cfg.n_embd), nn.Embedding(cfg.block_size, cfg.n_embd)
        self.h = nn.ModuleList([Block(cfg) for _ in range(cfg.n_layer)])
        self.ln_f = nn.LayerNorm(cfg.n_embd)
        self.lm_head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight

    def trunk(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        return self.ln_f(x)

    def forward(self, idx):
        return self.lm_head(self.trunk(idx))

    def loss(self, idx, labels):
        """labels[b, t] is what position t predicts; -100 does not count."""
        hidden, labels = self.trunk(idx).flatten(0, 1), labels.flatten()
        total, count = 0.0 * hidden.sum(), 0
        for x, y in zip(hidden.split(self.cfg.loss_chunk), labels.split(self.cfg.loss_chunk)):
            n = int((y != -100).sum())
            if n == 0:
                continue
            total = total + F.cross_entropy(self.lm_head(x), y, reduction="mean")
            count += 1
        return total / max(count, 1)


subject = Subject(
    kind="decoder",
    name="code GPT with a chunked loss",
    build=lambda c: CodeGPT(Config(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len)),
    forward=lambda m, tokens: m(tokens),
    loss=lambda m, tokens, labels: m.loss(tokens, labels),
    declares={"causal": True, "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
              "activation": "gelu_tanh", "tied": True, "output_bias": False, "ignore_index": -100, "shifts_labels": False,
              "plain_loss": True, "empty_loss": "zero"},
)
