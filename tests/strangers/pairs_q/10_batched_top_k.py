"""nanoGPT with its sampling loop, made to serve several prompts at once."""

import math

import torch
import torch.nn as nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "In top-k sampling the threshold is the smallest of the top values of the whole batch, not of each row."
CAUSE = (
    "topk(...).values.min() has no axis: every row is cut at the lowest k-th logit of any row, so rows with higher logits keep more "
    "than k tokens and what a prompt is sampled from depends on the prompts beside it. A batch of one is right."
)


def row_threshold(top):
    return top[:, [-1]]


def threshold(top):
    return top.min()


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head, block_size, dropout):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.n_head, self.n_embd = n_head, n_embd
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.block_size = c.max_len
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.attn = nn.ModuleList(
            [CausalSelfAttention(c.d_model, c.num_heads, c.max_len, c.dropout) for _ in range(c.num_layers)]
        )
        self.mlp = nn.ModuleList(
            [nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model), nn.Dropout(c.dropout))
             for _ in range(c.num_layers)]
        )  # fmt: skip
        self.ln = nn.ModuleList([nn.LayerNorm(c.d_model) for _ in range(2 * c.num_layers + 1)])
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for i, (attn, mlp) in enumerate(zip(self.attn, self.mlp)):
            x = x + attn(self.ln[2 * i](x))
            x = x + mlp(self.ln[2 * i + 1](x))
        return self.lm_head(self.ln[-1](x))

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature, top_k, cut):
        drawn_from = []
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.block_size :])[:, -1, :] / temperature
            if top_k is not None:
                v, _ = torch.topk(logits, min(top_k, logits.size(-1)))
                logits[logits < cut(v)] = -float("inf")
            probs = F.softmax(logits, dim=-1)
            drawn_from.append(probs)
            idx = torch.cat((idx, torch.multinomial(probs, num_samples=1)), dim=1)
        return idx, torch.stack(drawn_from, dim=1)


def subject(cut):
    def sampling(model, tokens, steps, temperature=1.0, top_k=None):
        return model.generate(tokens, steps, temperature, top_k, cut)

    return Subject(kind="decoder", name="nanoGPT", build=GPT, forward=lambda m, tokens: m(tokens), sampling=sampling)


right, wrong = subject(row_threshold), subject(threshold)
