WHAT = 'the cache keeps the keys after rope() (line 41), and the next chunk rotates all of them from 0 again: cached keys are rotated twice, three times, ...'
"""nanoGPT with rotary positions and a key-value cache."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


def rope(x, start):
    # x: (B, nh, T, hs), rotated as positions start, start + 1, ...
    half = x.size(-1) // 2
    freqs = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angles = torch.arange(start, start + x.size(-2), device=x.device, dtype=torch.float64)[:, None] * freqs
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        if (n_embd // n_head) % 2:
            raise ValueError("rotary positions need an even head size")
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=False)
        self.n_head = n_head

    def forward(self, x, past=None):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        start = 0 if past is None else past[0].size(2)
        if past is not None:
            k = torch.cat((past[0], k), dim=2)
            v = torch.cat((past[1], v), dim=2)
        q, k = rope(q, start), rope(k, 0)
        present = (k, v)

        S = k.size(2)
        visible = torch.ones(S, S, dtype=torch.bool, device=x.device).tril()[start:]
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = F.softmax(att.masked_fill(~visible, float("-inf")), dim=-1)
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y), present


class Block(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd, bias=False), nn.GELU(), nn.Linear(4 * n_embd, n_embd, bias=False)
        )

    def forward(self, x, past=None):
        a, present = self.attn(self.ln_1(x), past)
        x = x + a
        return x + self.mlp(self.ln_2(x)), present


class GPT(nn.Module):
    def __init__(self, vocab_size, n_embd, n_head, n_layer):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.h = nn.ModuleList([Block(n_embd, n_head) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx, pasts=None):
        x = self.wte(idx)
        presents = []
        for i, block in enumerate(self.h):
            x, present = block(x, None if pasts is None else pasts[i])
            presents.append(present)
        return self.lm_head(self.ln_f(x)), presents


def cached(model, chunks):
    pasts, out = None, []
    for chunk in chunks:
        logits, pasts = model(chunk, pasts)
        out.append(logits)
    return torch.cat(out, dim=1)


subject = Subject(
    kind="decoder",
    name="GPT with rotary cache",
    build=lambda c: GPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers),
    forward=lambda m, tokens: m(tokens)[0],
    cache=cached,
    declares={
        "positions": "rotary", "layout": "halves", "norm": "layer", "norm_placement": "pre",
        "final_norm": True, "activation": "gelu", "bias": False,
    },
)
