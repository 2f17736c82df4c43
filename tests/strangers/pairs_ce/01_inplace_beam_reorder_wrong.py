WHAT = "Beam reorder of the preallocated KV buffers copies rows one after another inside the same buffer (buf[b].copy_(buf[r]) in StaticCache.reorder), so a row that was already overwritten is read as the source of a later beam."
import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class StaticCache:
    """Preallocated keys and values of all layers: [L, B, H, max_len, K]."""

    def __init__(self, layers, batch, heads, max_len, width, like):
        self.k = like.new_zeros(layers, batch, heads, max_len, width)
        self.v = torch.zeros_like(self.k)
        self.filled = 0

    def update(self, layer, k, v):
        end = self.filled + k.size(2)
        self.k[layer, :, :, self.filled:end] = k
        self.v[layer, :, :, self.filled:end] = v
        return self.k[layer, :, :, :end], self.v[layer, :, :, :end]

    def reorder(self, order):
        for buffer in (self.k, self.v):
            rows = buffer.transpose(0, 1)
            for b, r in enumerate(order.tolist()):
                rows[b].copy_(rows[r])


class Block(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.h = h
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.fc, self.proj = nn.Linear(d, ff), nn.Linear(ff, d)

    def forward(self, x, index, cache=None):
        B, T, D = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(B, T, 3, self.h, D // self.h).permute(2, 0, 3, 1, 4)
        start = 0
        if cache is not None:
            start = cache.filled
            k, v = cache.update(index, k, v)
        seen = torch.arange(k.size(2), device=x.device) <= torch.arange(start, start + T, device=x.device)[:, None]
        scores = (q @ k.mT / math.sqrt(D // self.h)).masked_fill(~seen, -math.inf)
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D)
        x = x + self.out(y)
        return x + self.proj(F.gelu(self.fc(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, vocab, d, h, layers, ff, max_len):
        super().__init__()
        self.h, self.d, self.max_len = h, d, max_len
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.blocks = nn.ModuleList(Block(d, h, ff) for _ in range(layers))
        self.ln_f, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, ids, cache=None):
        start = 0 if cache is None else cache.filled
        x = self.wte(ids) + self.wpe(torch.arange(start, start + ids.size(1), device=ids.device))
        for i, block in enumerate(self.blocks):
            x = block(x, i, cache)
        if cache is not None:
            cache.filled += ids.size(1)
        return self.head(self.ln_f(x))


@torch.no_grad()
def cached(model, chunks, reorder=None):
    cache = StaticCache(len(model.blocks), chunks[0].size(0), model.h, model.max_len, model.d // model.h, model.wte.weight)
    outputs = []
    for i, chunk in enumerate(chunks):
        if i == 1 and reorder is not None:
            cache.reorder(torch.as_tensor(reorder))
        outputs.append(model(chunk, cache))
    return outputs


subject = Subject(
    kind="decoder",
    name="static-cache GPT",
    build=lambda c: GPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens: m(tokens),
    cache=cached,
    declares={"causal": True, "positions": "learned", "norm": "layer", "norm_placement": "pre", "activation": "gelu", "final_norm": True},
)
