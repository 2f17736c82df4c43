"""nanoGPT whose embedding and head are one matrix."""

from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "The head is tied to the embedding first, and the embedding gets a new parameter afterwards."
CAUSE = (
    "reset_parameters() replaces wte.weight by a new Parameter after lm_head.weight was set to the old one: the two are "
    "separate matrices from the start, although the model is declared (and documented) as tied."
)


@dataclass
class GPTConfig:
    vocab_size: int
    block_size: int
    n_layer: int
    n_head: int
    n_embd: int
    n_inner: int
    dropout: float = 0.0


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.dropout = config.n_head, config.dropout

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.n_inner, bias=False)
        self.c_proj = nn.Linear(config.n_inner, config.n_embd, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attn, self.mlp = CausalSelfAttention(config), MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()

    def post_init(self):
        self.reset_parameters()
        self.tie_weights()

    def tie_weights(self):
        self.lm_head.weight = self.wte.weight

    def reset_parameters(self):
        """Embeddings in the scale of the stream."""
        std = self.config.n_embd**-0.5
        self.wte.weight = nn.Parameter(torch.randn(self.config.vocab_size, self.config.n_embd) * std)
        self.wpe.weight = nn.Parameter(torch.randn(self.config.block_size, self.config.n_embd) * std)

    def forward(self, idx):
        pos = torch.arange(idx.size(1), device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(pos))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class GPTReordered(GPT):
    def post_init(self):
        self.tie_weights()
        self.reset_parameters()


def subject(cls):
    return Subject(
        kind="decoder",
        build=lambda c: cls(
            GPTConfig(c.vocab_size, c.max_len, c.num_layers, c.num_heads, c.d_model, c.d_ff, c.dropout)
        ),
        forward=lambda m, tokens: m(tokens),
        declares={"tied": True, "positions": "learned", "norm": "layer", "norm_placement": "pre", "activation": "gelu"},
    )


right, wrong = subject(GPT), subject(GPTReordered)
