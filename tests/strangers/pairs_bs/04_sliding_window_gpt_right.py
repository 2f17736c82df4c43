"""nanoGPT with a sliding window and a rolling key-value buffer."""

import math

import torch
import torch.nn as nn
from torch.nn import functional as F

from veriformer.properties import Subject

WINDOW = 4


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head, window):
        super().__init__()
        assert n_embd % n_head == 0
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.n_head = n_head
        self.n_embd = n_embd
        self.window = window

    def forward(self, x, past=None):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if past is not None:
            k = torch.cat((past[0], k), dim=2)
            v = torch.cat((past[1], v), dim=2)
        S = k.size(2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        if T > 1:  # a single query: all that the buffer holds lies in its window
            distance = torch.arange(S - T, S, device=x.device)[:, None] - torch.arange(S, device=x.device)[None, :]
            att = att.masked_fill((distance < 0) | (distance >= self.window), float("-inf"))
        att = F.softmax(att, dim=-1)
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        keep = min(S, self.window - 1)
        present = (k[:, :, S - keep :], v[:, :, S - keep :])
        return self.c_proj(y), present


class MLP(nn.Module):
    def __init__(self, n_embd, n_inner):
        super().__init__()
        self.c_fc = nn.Linear(n_embd, n_inner)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(n_inner, n_embd)

    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, n_embd, n_head, n_inner, window):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head, window)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = MLP(n_embd, n_inner)

    def forward(self, x, past=None):
        a, present = self.attn(self.ln_1(x), past)
        x = x + a
        x = x + self.mlp(self.ln_2(x))
        return x, present


class GPT(nn.Module):
    def __init__(self, vocab_size, n_embd, n_head, n_layer, n_inner, block_size, window=WINDOW):
        super().__init__()
        self.block_size = block_size
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([Block(n_embd, n_head, n_inner, window) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx, past=None, start=0):
        t = idx.size(1)
        if start + t > self.block_size:
            raise ValueError(f"cannot reach position {start + t}, block size is only {self.block_size}")
        pos = torch.arange(start, start + t, device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        presents = []
        for i, block in enumerate(self.h):
            x, present = block(x, None if past is None else past[i])
            presents.append(present)
        return self.lm_head(self.ln_f(x)), presents


def run_cached(model, chunks):
    past, start, outs = None, 0, []
    for chunk in chunks:
        logits, past = model(chunk, past, start)
        start += chunk.size(1)
        outs.append(logits)
    return torch.cat(outs, dim=1)


subject = Subject(
    kind="decoder",
    name="sliding-window GPT",
    build=lambda c: GPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda model, tokens: model(tokens)[0],
    cache=lambda model, chunks: run_cached(model, chunks),
    declares={
        "causal": True,
        "window": WINDOW,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "tied": True,
        "beyond_max_len": "error",
    },
)
