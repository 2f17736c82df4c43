"""A decoder with a static key-value cache; beam search reorders it in place."""

import torch
from torch import nn
from torch.nn.functional import gelu, softmax

from veriformer.properties import Subject

WHAT = "Beam reordering copies the cache row by row within itself, so a row that was written already is read as another's source."
CAUSE = (
    "reorder writes cache[dst] = cache[src] one row after the other in the same buffer: where src < dst is itself a "
    "destination, the row is overwritten before it is read (order [1, 0] gives beam 1 twice). The gather has to be "
    "taken from the old cache as a whole."
)


class KVCache:
    def __init__(self, layers, batch, heads, size, width, like):
        self.keys = [like.new_zeros(batch, heads, size, width) for _ in range(layers)]
        self.values = [like.new_zeros(batch, heads, size, width) for _ in range(layers)]
        self.length = 0

    def write(self, layer, k, v):
        end = self.length + k.shape[2]
        self.keys[layer][:, :, self.length : end] = k
        self.values[layer][:, :, self.length : end] = v
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def reorder(self, beams):
        for buffer in (*self.keys, *self.values):
            buffer.copy_(buffer.index_select(0, beams))


class InPlaceKVCache(KVCache):
    def reorder(self, beams):
        for buffer in (*self.keys, *self.values):
            for row, beam in enumerate(beams.tolist()):  # no second buffer of this size is needed
                if row != beam:
                    buffer[row].copy_(buffer[beam])


class Layer(nn.Module):
    def __init__(self, index, dim, heads, hidden):
        super().__init__()
        self.index, self.heads = index, heads
        self.norm_a, self.norm_f = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x, cache):
        y = self.norm_a(x)
        q, k, v = (p(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        if cache is not None:
            k, v = cache.write(self.index, k, v)
        new, seen = q.shape[2], k.shape[2]
        hidden = torch.ones(new, seen, dtype=torch.bool, device=x.device).triu(seen - new + 1)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
        x = x + self.o((softmax(scores, -1) @ v).transpose(1, 2).flatten(-2))
        return x + self.down(gelu(self.up(self.norm_f(x))))


class Decoder(nn.Module):
    cache_class = KVCache

    def __init__(self, vocab, dim, heads, layers, hidden, size):
        super().__init__()
        self.heads, self.size = heads, size
        self.tokens, self.positions = nn.Embedding(vocab, dim), nn.Embedding(size, dim)
        self.layers = nn.ModuleList(Layer(i, dim, heads, hidden) for i in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def new_cache(self, batch):
        weight = self.tokens.weight
        return self.cache_class(
            len(self.layers), batch, self.heads, self.size, weight.shape[1] // self.heads, weight.detach()
        )

    def forward(self, tokens, cache=None):
        start = 0 if cache is None else cache.length
        x = self.tokens(tokens) + self.positions(torch.arange(start, start + tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x, cache)
        if cache is not None:
            cache.length += tokens.shape[1]
        return self.head(self.norm(x))


class DecoderInPlace(Decoder):
    cache_class = InPlaceKVCache


@torch.no_grad()
def decode(model, chunks, reorder=None):
    cache, outputs = model.new_cache(chunks[0].shape[0]), []
    for i, chunk in enumerate(chunks):
        if i == 1 and reorder is not None:
            cache.reorder(torch.as_tensor(reorder, device=chunk.device))
        outputs.append(model(chunk, cache))
    return torch.cat(outputs, dim=1)


def subject(cls, name):
    return Subject(
        kind="decoder",
        name=name,
        build=lambda c: cls(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
        forward=lambda m, tokens: m(tokens),
        cache=decode,
    )


right = subject(Decoder, "decoder, static cache")
wrong = subject(DecoderInPlace, "decoder, static cache in place")
