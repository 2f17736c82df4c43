"""PaLM blocks: attention and SwiGLU side by side, one key-value head, no biases; a cache made once, reordered by beams."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def rotate(x, start):
    half = x.shape[-1] // 2
    rate = 10000.0 ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    turn = (start + torch.arange(x.shape[-2], device=x.device, dtype=x.dtype))[:, None] * rate
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * turn.cos() - b * turn.sin(), b * turn.cos() + a * turn.sin()], -1)


class Slots:
    """Room for `longest` keys and values of one layer."""

    def __init__(self, batch, longest, width, like):
        self.keys = like.new_zeros(batch, longest, width)
        self.values = like.new_zeros(batch, longest, width)
        self.used = 0

    def add(self, k, v):
        end = self.used + k.shape[1]
        self.keys[:, self.used : end] = k
        self.values[:, self.used : end] = v
        self.used = end
        return self.keys[:, :end], self.values[:, :end]

    def reorder(self, beams):
        for store in (self.keys, self.values):
            store.copy_(store[beams])


class ParallelBlock(nn.Module):
    def __init__(self, d, heads, d_ff):
        super().__init__()
        self.heads, self.width, self.d_ff = heads, d // heads, d_ff
        self.norm = nn.LayerNorm(d, bias=False)
        self.fused = nn.Linear(d, d + 2 * self.width + 2 * d_ff, bias=False)
        self.attn_out, self.ff_out = nn.Linear(d, d, bias=False), nn.Linear(d_ff, d, bias=False)

    def forward(self, x, mask=None, slots=None):
        b, t, d = x.shape
        parts = self.fused(self.norm(x)).split([d, self.width, self.width, self.d_ff, self.d_ff], -1)
        q, k, v, gate, up = parts
        start = slots.used if slots is not None else 0
        q = rotate(q.view(b, t, self.heads, self.width).transpose(1, 2), start)
        k = rotate(k, start)
        if slots is not None:
            k, v = slots.add(k, v)
        seen = torch.ones(t, k.shape[1], dtype=torch.bool, device=x.device).tril(k.shape[1] - t)
        if mask is not None:
            seen = seen & mask[:, None, None, :]
        scores = torch.einsum("bhtk,bsk->bhts", q, k) / self.width**0.5
        weights = scores.masked_fill(~seen, torch.finfo(x.dtype).min).softmax(-1) * seen
        mixed = torch.einsum("bhts,bsk->bthk", weights, v).reshape(b, t, d)
        return x + self.attn_out(mixed) + self.ff_out(F.silu(gate) * up)


class PaLM(nn.Module):
    def __init__(self, vocab, d, heads, layers, d_ff, max_len):
        super().__init__()
        if (d // heads) % 2:
            raise ValueError("rotary channels come in pairs")
        self.max_len = max_len
        self.embed = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList(ParallelBlock(d, heads, d_ff) for _ in range(layers))
        self.norm = nn.LayerNorm(d, bias=False)

    def forward(self, tokens, mask=None, cache=None):
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, mask, None if cache is None else cache[i])
        return self.norm(x) @ self.embed.weight.T


@torch.no_grad()
def cached(model, chunks, reorder=None):
    longest = sum(chunk.shape[1] for chunk in chunks)
    cache = [Slots(len(chunks[0]), longest, b.width, model.embed.weight) for b in model.blocks]
    outputs = []
    for i, chunk in enumerate(chunks):
        outputs.append(model(chunk, cache=cache))
        if i == 0 and reorder is not None:
            for slots in cache:
                slots.reorder(torch.as_tensor(reorder, device=chunk.device))
    return torch.cat(outputs, 1)


subject = Subject(
    kind="decoder",
    build=lambda c: PaLM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    cache=cached,
    declares={
        "positions": "rotary", "layout": "halves", "norm": "layer", "norm_bias": False, "bias": False,
        "norm_placement": "pre", "activation": "swiglu", "tied": True,
    },
)
