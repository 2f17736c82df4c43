"""Causal self-attention that works off its queries in chunks, so that scores are [chunk, T] at most."""

import math

import torch
from torch import nn

from veriformer.properties import Subject


class ChunkedCausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head, chunk=4):
        super().__init__()
        self.n_head, self.n_embd, self.chunk = n_head, n_embd, chunk
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x, attention_mask=None):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        pieces = []
        for start in range(0, T, self.chunk):
            part = q[:, :, start : start + self.chunk]
            att = (part @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            seen = torch.ones(part.size(2), T, dtype=torch.bool, device=x.device).tril(diagonal=start)
            if attention_mask is not None:
                seen = seen & attention_mask[:, None, None, :]
            att = att.masked_fill(~seen, torch.finfo(att.dtype).min)
            pieces.append(att.softmax(dim=-1) @ v)
        y = torch.cat(pieces, dim=2).transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


def projections(m):
    w, b, n = m.c_attn.weight, m.c_attn.bias, m.n_embd
    return {
        "q": w[:n],
        "k": w[n : 2 * n],
        "v": w[2 * n :],
        "o": m.c_proj.weight,
        "q_bias": b[:n],
        "k_bias": b[n : 2 * n],
        "v_bias": b[2 * n :],
        "o_bias": m.c_proj.bias,
    }


subject = Subject(
    kind="self_attention",
    name="chunked causal attention",
    build=lambda c: ChunkedCausalSelfAttention(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    projections=projections,
    declares={"causal": True, "positions": "none", "bias": True},
)
