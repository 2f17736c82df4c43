WHAT = "when beams are reordered the cached keys are reordered but the cached values are not: a beam goes on with another beam's values (line 35: self.v[layer] = self.v[layer].contiguous())"
"""Code LM in LLaMA style: RMSNorm, grouped queries, SwiGLU, rotary; a preallocation-free cache with beam reordering."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Cache:
    def __init__(self):
        self.k, self.v = {}, {}

    def length(self):
        return self.k[0].shape[2] if 0 in self.k else 0

    def update(self, layer, k, v):
        if layer in self.k:
            k, v = torch.cat([self.k[layer], k], 2), torch.cat([self.v[layer], v], 2)
        self.k[layer], self.v[layer] = k, v
        return k, v

    def reorder(self, beams):
        for layer in self.k:
            self.k[layer] = self.k[layer].index_select(0, beams)
            self.v[layer] = self.v[layer].contiguous()


def apply_rotary(x, offset):
    d = x.shape[-1]
    freqs = 1.0 / 10000 ** (torch.arange(0, d, 2, device=x.device, dtype=x.dtype) / d)
    t = torch.outer(torch.arange(offset, offset + x.shape[2], device=x.device, dtype=x.dtype), freqs)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * t.cos() - odd * t.sin(), even * t.sin() + odd * t.cos()], -1).flatten(-2)


class Block(nn.Module):
    def __init__(self, i, d, h, g, ff):
        super().__init__()
        self.i, self.h, self.g, self.hd = i, h, g, d // h
        self.wq, self.wo = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.wk, self.wv = nn.Linear(d, g * self.hd, bias=False), nn.Linear(d, g * self.hd, bias=False)
        self.w1, self.w3, self.w2 = nn.Linear(d, ff, bias=False), nn.Linear(d, ff, bias=False), nn.Linear(ff, d, bias=False)
        self.attention_norm, self.ffn_norm = RMSNorm(d), RMSNorm(d)

    def forward(self, x, cache, offset):
        B, T, D = x.shape
        y = self.attention_norm(x)
        q = apply_rotary(self.wq(y).view(B, T, self.h, self.hd).transpose(1, 2), offset)
        k = apply_rotary(self.wk(y).view(B, T, self.g, self.hd).transpose(1, 2), offset)
        v = self.wv(y).view(B, T, self.g, self.hd).transpose(1, 2)
        k, v = cache.update(self.i, k, v)
        k, v = (z.repeat_interleave(self.h // self.g, dim=1) for z in (k, v))
        S = k.shape[2]
        ok = torch.arange(S, device=x.device)[None] <= torch.arange(offset, offset + T, device=x.device)[:, None]
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=ok)
        x = x + self.wo(a.transpose(1, 2).reshape(B, T, D))
        y = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class CodeLM(nn.Module):
    def __init__(self, vocab, d, h, g, n, ff):
        super().__init__()
        if (d // h) % 2:
            raise ValueError("odd head width")
        self.tok = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList([Block(i, d, h, g, ff) for i in range(n)])
        self.norm, self.output = RMSNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, tokens, cache=None):
        cache = Cache() if cache is None else cache
        offset = cache.length()
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x, cache, offset)
        return self.output(self.norm(x))


def decode(model, chunks, reorder=None):
    cache, outs = Cache(), []
    for n, chunk in enumerate(chunks):
        outs.append(model(chunk, cache))
        if n == 0 and reorder is not None:
            cache.reorder(torch.as_tensor(reorder, device=chunk.device))
    return torch.cat(outs, 1)


subject = Subject(
    kind="decoder",
    name="code LM",
    build=lambda c: CodeLM(c.vocab_size, c.d_model, c.num_heads, c.num_key_value_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens),
    cache=decode,
    declares={"causal": True, "positions": "rotary", "layout": "interleaved", "norm": "rms", "norm_placement": "pre",
              "final_norm": True, "activation": "swiglu", "bias": False, "output_bias": False, "grouped_queries": True},
)
