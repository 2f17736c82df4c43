"""minGPT style decoder: a `bias` buffer of ones below the diagonal, masked_fill with -inf, NewGELU, untied head.

It takes no attention_mask at all, as minGPT does: text is cut into full blocks and there is no padding.
The block size is fixed at 32 and a longer input is an error.
"""

import math

import torch
import torch.nn as nn
from torch.nn import functional as F

from veriformer.properties import Subject

BLOCK_SIZE = 32


class NewGELU(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head, pdrop):
        super().__init__()
        self.key = nn.Linear(n_embd, n_embd)
        self.query = nn.Linear(n_embd, n_embd)
        self.value = nn.Linear(n_embd, n_embd)
        self.attn_drop = nn.Dropout(pdrop)
        self.resid_drop = nn.Dropout(pdrop)
        self.proj = nn.Linear(n_embd, n_embd)
        # causal mask, so that attention only looks to the left
        self.register_buffer("bias", torch.tril(torch.ones(BLOCK_SIZE, BLOCK_SIZE)).view(1, 1, BLOCK_SIZE, BLOCK_SIZE))
        self.n_head = n_head

    def forward(self, x):
        B, T, C = x.size()
        k = self.key(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = self.query(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = self.value(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_drop(F.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_drop(self.proj(y))


class Block(nn.Module):
    def __init__(self, n_embd, n_head, n_hidden, pdrop):
        super().__init__()
        self.ln1 = nn.LayerNorm(n_embd)
        self.ln2 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head, pdrop)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, n_hidden), NewGELU(), nn.Linear(n_hidden, n_embd), nn.Dropout(pdrop)
        )

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class MinGPT(nn.Module):
    def __init__(self, vocab, n_embd, n_head, n_layer, n_hidden, pdrop):
        super().__init__()
        self.tok_emb = nn.Embedding(vocab, n_embd)
        self.pos_emb = nn.Parameter(torch.zeros(1, BLOCK_SIZE, n_embd))
        self.drop = nn.Dropout(pdrop)
        self.blocks = nn.Sequential(*[Block(n_embd, n_head, n_hidden, pdrop) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.head = nn.Linear(n_embd, vocab, bias=False)
        nn.init.normal_(self.pos_emb, std=0.02)

    def forward(self, idx):
        b, t = idx.size()
        if t > BLOCK_SIZE:
            raise ValueError("Cannot forward, model block size is exhausted.")
        x = self.drop(self.tok_emb(idx) + self.pos_emb[:, :t, :])
        return self.head(self.ln_f(self.blocks(x)))


COMMON = dict(
    kind="decoder",
    build=lambda c: MinGPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.dropout),
    forward=lambda m, tokens: m(tokens),
    domain={"max_len": [BLOCK_SIZE]},
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "causal": True,
        "positions": "learned",
        "max_len": BLOCK_SIZE,
        "beyond_max_len": "error",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu_tanh",
        "bias": True,
        "output_bias": False,
        "tied": False,
    },
)
