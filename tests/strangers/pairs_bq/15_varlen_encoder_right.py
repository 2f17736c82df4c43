import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def sinusoids(position, width):
    rate = torch.exp(torch.arange(0, width, 2, dtype=torch.float64, device=position.device) * (-math.log(1e4) / width))
    angle = position.to(torch.float64)[..., None] * rate
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[..., :width]


def attention_varlen(q, k, v, cu_seqlens):  # [N, H, K] each; samples lie behind one another
    out = torch.zeros_like(q)
    for start, stop in zip(cu_seqlens[:-1], cu_seqlens[1:]):
        if stop > start:
            s = torch.einsum("thk,shk->hts", q[start:stop], k[start:stop]) / math.sqrt(q.shape[-1])
            out[start:stop] = torch.einsum("hts,shk->thk", s.softmax(-1), v[start:stop])
    return out


class Block(nn.Module):
    def __init__(self, dim, heads, ffn):
        super().__init__()
        self.heads = heads
        self.attn_norm, self.ffn_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.wqkv, self.wo = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.w1, self.w2 = nn.Linear(dim, ffn), nn.Linear(ffn, dim)

    def forward(self, x, cu_seqlens):
        n, d = x.shape
        q, k, v = self.wqkv(self.attn_norm(x)).view(n, 3, self.heads, d // self.heads).unbind(1)
        x = x + self.wo(attention_varlen(q, k, v, cu_seqlens).reshape(n, d))
        return x + self.w2(F.gelu(self.w1(self.ffn_norm(x))))


class VarlenEncoder(nn.Module):
    def __init__(self, vocab, dim, heads, layers, ffn):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList([Block(dim, heads, ffn) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim)

    def forward(self, tokens, attention_mask=None):
        B, T = tokens.shape
        if attention_mask is None:
            where = torch.arange(B * T, device=tokens.device)
            lengths = torch.full((B,), T, device=tokens.device)
            position = torch.arange(T, device=tokens.device).repeat(B)
        else:
            where = attention_mask.flatten().nonzero().squeeze(-1)
            lengths = attention_mask.sum(1)
            position = torch.arange(len(where), device=tokens.device) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        x = self.embed(tokens.flatten()[where])
        x = x + sinusoids(position, x.shape[-1]).to(x.dtype)
        cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).tolist()
        for block in self.blocks:
            x = block(x, cu_seqlens)
        x = self.norm(x)
        return x.new_zeros(B * T, x.shape[-1]).index_copy(0, where, x).view(B, T, -1)


subject = Subject(
    kind="encoder",
    name="encoder without padding",
    build=lambda c: VarlenEncoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "sinusoidal",
        "padding_side": "both",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
    },
)
