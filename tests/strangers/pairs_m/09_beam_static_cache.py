"""zoo/PR 191: a static cache for beam search. Keys and values live in buffers that are allocated once per request;
choosing beams moves rows inside of them, no memory is allocated on the way."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "Beams are reordered row by row inside the same buffer, so that rows are read after they were overwritten."
CAUSE = (
    "StaticCache.reorder copies row src onto row dst one after another in place, without a copy of the old rows: where "
    "a source row stands before its destination, what is copied is a beam that was already replaced. Decoding without "
    "reordering is right."
)


class StaticCache:
    def __init__(self, layers, batch, heads, room, width, like):
        self.keys = [like.new_zeros(batch, heads, room, width) for _ in range(layers)]
        self.values = [like.new_zeros(batch, heads, room, width) for _ in range(layers)]
        self.filled = 0

    def write(self, layer, k, v):
        end = self.filled + k.size(2)
        self.keys[layer][:, :, self.filled : end] = k
        self.values[layer][:, :, self.filled : end] = v
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def reorder(self, beams):
        for buffer in self.keys + self.values:
            buffer.copy_(buffer.index_select(0, beams))


class InPlaceCache(StaticCache):
    def reorder(self, beams):
        for buffer in self.keys + self.values:
            for dst, src in enumerate(beams.tolist()):
                if dst != src:
                    buffer[dst].copy_(buffer[src])


class Layer(nn.Module):
    def __init__(self, n_embd, n_head, n_inner):
        super().__init__()
        self.n_head = n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.c_fc, self.c_out = nn.Linear(n_embd, n_inner), nn.Linear(n_inner, n_embd)

    def forward(self, x, index, cache):
        B, T, C = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).view(B, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)
        past = 0
        if cache is not None:
            past = cache.filled
            k, v = cache.write(index, k, v)
        seen = torch.ones(T, past + T, dtype=torch.bool, device=x.device).tril(past)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    cache_class = StaticCache

    def __init__(self, vocab_size, n_embd, n_head, n_inner, n_layer, n_positions):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(n_positions, n_embd)
        self.h = nn.ModuleList([Layer(n_embd, n_head, n_inner) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, ids, cache=None):
        start = cache.filled if cache is not None else 0
        x = self.wte(ids) + self.wpe(torch.arange(start, start + ids.size(1), device=ids.device))
        for i, layer in enumerate(self.h):
            x = layer(x, i, cache)
        if cache is not None:
            cache.filled += ids.size(1)
        return self.head(self.ln_f(x))

    @torch.no_grad()
    def decode(self, chunks, beams=None):
        first, like = self.h[0], self.wte.weight
        room = sum(chunk.size(1) for chunk in chunks)
        width = like.size(1) // first.n_head
        cache = self.cache_class(len(self.h), chunks[0].size(0), first.n_head, room, width, like)
        outputs = []
        for n, chunk in enumerate(chunks):
            outputs.append(self(chunk, cache))
            if n == 0 and beams is not None:
                cache.reorder(torch.as_tensor(beams, device=like.device))
        return torch.cat(outputs, 1)


class GPTInPlace(GPT):
    cache_class = InPlaceCache


def subject(cls):
    return Subject(
        kind="decoder",
        name=cls.__name__,
        build=lambda c: cls(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers, c.max_len),
        forward=lambda m, tokens: m(tokens),
        cache=lambda m, chunks, reorder=None: m.decode(chunks, reorder),
    )


right, wrong = subject(GPT), subject(GPTInPlace)
