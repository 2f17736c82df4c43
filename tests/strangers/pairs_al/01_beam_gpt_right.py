import math
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject


class Cache:
    def __init__(self):
        self.keys, self.values = {}, {}

    def update(self, layer, k, v):
        if layer in self.keys:
            k = torch.cat([self.keys[layer], k], 2)
            v = torch.cat([self.values[layer], v], 2)
        self.keys[layer], self.values[layer] = k, v
        return k, v

    def length(self):
        return self.keys[0].shape[2] if self.keys else 0

    def reorder(self, beams):
        for layer, (k, v) in enumerate(zip(self.keys.values(), self.values.values())):
            self.keys[layer], self.values[layer] = k.index_select(0, beams), v.index_select(0, beams)


class Block(nn.Module):
    def __init__(self, d, h, ff, index):
        super().__init__()
        self.h, self.index = h, index
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.c_attn, self.c_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, ff), nn.GELU(), nn.Linear(ff, d))

    def forward(self, x, cache=None):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.h, -1).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).chunk(3, -1))
        if cache is not None:
            k, v = cache.update(self.index, k, v)
        S = k.shape[2]
        att = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        seen = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        att = att.masked_fill(~seen, float("-inf")).softmax(-1)
        x = x + self.c_proj((att @ v).transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.h = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff, i) for i in range(c.num_layers))
        self.ln_f = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, idx, cache=None):
        past = cache.length() if cache is not None else 0
        x = self.wte(idx) + self.wpe(torch.arange(past, past + idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x, cache)
        return self.lm_head(self.ln_f(x))


def cached(model, chunks, reorder=None):
    cache, outs = Cache(), []
    for i, chunk in enumerate(chunks):
        outs.append(model(chunk, cache))
        if i == 0 and reorder is not None:
            cache.reorder(reorder)
    return torch.cat(outs, 1)


subject = Subject(
    kind="decoder", name="beam gpt", build=GPT, forward=lambda m, tokens: m(tokens), cache=cached,
    declares={"positions": "learned", "norm": "layer", "norm_placement": "pre", "activation": "gelu", "final_norm": True},
)
