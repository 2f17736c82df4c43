"""A GPT with one table for input and output."""

from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F

from veriformer.properties import Subject


@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float = 0.0


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd), nn.GELU(), nn.Linear(4 * config.n_embd, config.n_embd)
        )
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(C, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))
        return x + self.drop(self.mlp(self.ln_2(x)))


def gpt(tie):
    class GPT(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.transformer = nn.ModuleDict(
                dict(
                    wte=nn.Embedding(config.vocab_size, config.n_embd),
                    wpe=nn.Embedding(config.block_size, config.n_embd),
                    h=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
                    ln_f=nn.LayerNorm(config.n_embd),
                )
            )
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
            tie(self.lm_head, self.transformer.wte)
            self.apply(self._init_weights)

        def _init_weights(self, module):
            if isinstance(module, (nn.Linear, nn.Embedding)):
                torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                torch.nn.init.zeros_(module.bias)

        def forward(self, idx, targets=None):
            pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
            x = self.transformer.wte(idx) + self.transformer.wpe(pos)
            for block in self.transformer.h:
                x = block(x)
            logits = self.lm_head(self.transformer.ln_f(x))
            if targets is None:
                return logits, None
            return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-100)

    return GPT


def tie_parameter(head, table):
    head.weight = table.weight


def tie_data(head, table):
    head.weight.data = table.weight.data


def subject(cls):
    return Subject(
        kind="decoder",
        name="gpt tied",
        build=lambda c: cls(GPTConfig(c.max_len, c.vocab_size, c.num_layers, c.num_heads, c.d_model, c.dropout)),
        forward=lambda m, tokens: m(tokens)[0],
        loss=lambda m, tokens, labels: m(tokens, labels)[1],
        declares={
            "causal": True,
            "positions": "learned",
            "norm": "layer",
            "norm_placement": "pre",
            "activation": "gelu",
            "tied": True,
        },
    )


right = subject(gpt(tie_parameter))
wrong = subject(gpt(tie_data))
WHAT = "head.weight.data = wte.weight.data: two parameters on one storage, with two gradients, counted and stepped twice"
CAUSE = (
    "Output projection and token embedding share memory but are two parameters: gradients are not added up, the optimizer "
    "steps the table twice, and copying or casting the model unties them."
)
