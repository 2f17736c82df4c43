"""LLaMA in one file: RMSNorm, rotary positions, grouped queries, SwiGLU, key-value cache."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def rope(x, start=0):
    """x [B, H, T, K], channels in halves."""
    half = x.size(-1) // 2
    f = 10000.0 ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
    a = torch.arange(start, start + x.size(-2), dtype=x.dtype, device=x.device)[:, None] * f
    x1, x2 = x[..., :half], x[..., half:]
    return torch.cat([x1 * a.cos() - x2 * a.sin(), x2 * a.cos() + x1 * a.sin()], -1)


class RMSNorm(nn.Module):
    def __init__(self, d, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Block(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.h, self.g, self.k = c.num_heads, c.num_key_value_heads, c.d_model // c.num_heads
        self.n1, self.n2 = RMSNorm(c.d_model), RMSNorm(c.d_model)
        self.wq = nn.Linear(c.d_model, self.h * self.k, bias=False)
        self.wk = nn.Linear(c.d_model, self.g * self.k, bias=False)
        self.wv = nn.Linear(c.d_model, self.g * self.k, bias=False)
        self.wo = nn.Linear(self.h * self.k, c.d_model, bias=False)
        self.w1, self.w3 = nn.Linear(c.d_model, c.d_ff, bias=False), nn.Linear(c.d_model, c.d_ff, bias=False)
        self.w2 = nn.Linear(c.d_ff, c.d_model, bias=False)
        self.bad = bad

    def attention(self, x, attention_mask, past):
        t = x.size(1)
        q = self.wq(x).unflatten(-1, (self.h, -1)).transpose(1, 2)
        k = self.wk(x).unflatten(-1, (self.g, -1)).transpose(1, 2)
        v = self.wv(x).unflatten(-1, (self.g, -1)).transpose(1, 2)
        start = 0 if past is None else past[0].size(2)
        q = rope(q, start)
        if self.bad:
            if past is not None:
                k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
            k = rope(k)
        else:
            k = rope(k, start)
            if past is not None:
                k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        present = (k, v)
        s = k.size(2)
        allowed = torch.ones(t, s, dtype=torch.bool, device=x.device).tril(s - t)
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :]
        n = self.h // self.g
        y = F.scaled_dot_product_attention(q, k.repeat_interleave(n, 1), v.repeat_interleave(n, 1), attn_mask=allowed)
        return self.wo(y.transpose(1, 2).flatten(2)), present

    def forward(self, x, attention_mask, past):
        y, present = self.attention(self.n1(x), attention_mask, past)
        x = x + y
        z = self.n2(x)
        return x + self.w2(F.silu(self.w1(z)) * self.w3(z)), present


class Llama(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.tok = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c, bad) for _ in range(c.num_layers))
        self.norm, self.out = RMSNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, attention_mask=None, past=None):
        x, new = self.tok(tokens), []
        for i, block in enumerate(self.blocks):
            x, kv = block(x, attention_mask, None if past is None else past[i])
            new.append(kv)
        return self.out(self.norm(x)), new


def cache(model, chunks):
    past, out = None, []
    for chunk in chunks:
        y, past = model(chunk, past=past)
        out.append(y)
    return torch.cat(out, 1)


def subject(bad):
    return Subject(kind="decoder", build=lambda c: Llama(c, bad), cache=cache,
                   forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask)[0],
                   domain={"d_model": [16, 32], "num_heads": [2, 4]})


right, wrong = subject(False), subject(True)
WHAT = "With a cache, all keys are rotated after concatenation and stored rotated, so that keys of earlier chunks are rotated once more at every step."
PLACE = "rotary positions of cached keys"
