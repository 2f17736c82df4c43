"""A decoder in Flax manners: the cache is a dict of arrays, beams are gathered by a map over its leaves."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def gather_beams(cache, beams):
    """Scalars (cache_index) have no batch axis and stay."""
    return {name: leaf[beams] if torch.is_tensor(leaf) and leaf.ndim > 2 else leaf for name, leaf in cache.items()}


class Decoder(nn.Module):
    """No positions: order enters by the causal mask alone."""

    def __init__(self, vocab, d, heads, layers, ff):
        super().__init__()
        self.heads, self.n = heads, layers
        self.embedding = nn.Embedding(vocab, d)
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(2 * layers + 1))
        self.qkv = nn.ModuleList(nn.Linear(d, 3 * d) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(d, d) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(d, ff) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(ff, d) for _ in range(layers))
        self.head = nn.Linear(d, vocab)

    def start(self):
        return {"cache_index": 0}

    def step(self, tokens, cache, mask=None):
        B, T = tokens.shape
        if mask is None:
            mask = torch.ones_like(tokens, dtype=torch.bool)
        start = cache["cache_index"]
        new = {"cache_index": start + T, "padding": torch.cat([cache["padding"], mask], 1) if start else mask}
        rows = torch.arange(start, start + T, device=tokens.device)
        columns = torch.arange(start + T, device=tokens.device)
        allowed = (columns <= rows[:, None]) & new["padding"][:, None, None, :]
        x = self.embedding(tokens)
        for i in range(self.n):
            q, k, v = self.qkv[i](self.norms[2 * i](x)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            if start:
                k, v = torch.cat([cache[f"key_{i}"], k], 2), torch.cat([cache[f"value_{i}"], v], 2)
            new[f"key_{i}"], new[f"value_{i}"] = k, v
            s = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~allowed, torch.finfo(x.dtype).min)
            w = s.softmax(-1).masked_fill(~allowed, 0.0)
            x = x + self.out[i]((w @ v).transpose(1, 2).reshape(B, T, -1))
            x = x + self.down[i](F.gelu(self.up[i](self.norms[2 * i + 1](x))))
        return self.head(self.norms[-1](x)), new

    def forward(self, tokens, mask=None):
        return self.step(tokens, self.start(), mask)[0]

    def in_chunks(self, chunks, mask=None, reorder=None):
        cache, outputs, at = self.start(), [], 0
        for n, chunk in enumerate(chunks):
            if n == 1 and reorder is not None:
                cache = gather_beams(cache, reorder)
            part = None if mask is None else mask[:, at : at + chunk.shape[1]]
            y, cache = self.step(chunk, cache, part)
            outputs.append(y)
            at += chunk.shape[1]
        return torch.cat(outputs, 1)


subject = Subject(
    kind="decoder",
    name="decoder with beams",
    build=lambda c: Decoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    cache=lambda m, chunks, attention_mask=None, reorder=None: m.in_chunks(chunks, attention_mask, reorder),
    declares={"positions": "none", "norm_placement": "pre", "activation": "gelu"},
)
WHAT = 'Leaves with two axes are taken for such without a batch axis (`ndim > 2` in line 11), so that keys and values follow their beams and the cached padding mask [B, T] does not.'
