"""A decoder with a cache of fixed size, allocated once for a whole generation."""

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "The fixed-size cache is allocated in bfloat16 whatever the model computes in."
CAUSE = (
    "Keys and values are rounded to bfloat16 as they are stored (and widened again when read), so cached decoding of a float32 model "
    "is off by about half a percent from the forward without a cache; in bfloat16 itself nothing differs."
)


class StaticCache:
    def __init__(self, layers, batch, heads, length, width, dtype, device):
        shape = (layers, 2, batch, heads, length, width)
        self.store = torch.zeros(shape, dtype=dtype, device=device)
        self.filled = 0

    def update(self, layer, k, v):
        """Store what is new and give all so far, in the type of what is computed."""
        stop = self.filled + k.shape[2]
        self.store[layer, 0, :, :, self.filled : stop] = k
        self.store[layer, 1, :, :, self.filled : stop] = v
        return self.store[layer, :, :, :, :stop].to(k.dtype).unbind(0)


class Layer(nn.Module):
    def __init__(self, index, dim, heads, hidden):
        super().__init__()
        self.index, self.heads = index, heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def split(self, x):
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def forward(self, x, cache):
        h = self.norm1(x)
        q, k, v = self.split(self.q(h)), self.split(self.k(h)), self.split(self.v(h))
        if cache is not None:
            k, v = cache.update(self.index, k, v)
        T, S = q.shape[2], k.shape[2]
        allowed = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))


class LM(nn.Module):
    cache_dtype = None  # that of the weights

    def __init__(self, c):
        super().__init__()
        self.sizes = (c.num_heads, c.max_len, c.d_model // c.num_heads)
        self.tokens, self.places = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(Layer(i, c.d_model, c.num_heads, c.d_ff) for i in range(c.num_layers))
        self.norm, self.out = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size)

    def new_cache(self, batch):
        weight = self.tokens.weight
        return StaticCache(len(self.layers), batch, *self.sizes, self.cache_dtype or weight.dtype, weight.device)

    def forward(self, tokens, cache=None):
        start = 0 if cache is None else cache.filled
        x = self.tokens(tokens) + self.places(torch.arange(start, start + tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x, cache)
        if cache is not None:
            cache.filled += tokens.shape[1]
        return self.out(self.norm(x))


class ServedLM(LM):
    cache_dtype = torch.bfloat16


@torch.no_grad()
def cached(model, chunks):
    cache = model.new_cache(chunks[0].shape[0])
    return torch.cat([model(chunk, cache) for chunk in chunks], 1)


@torch.no_grad()
def generate(model, tokens, steps, use_cache):
    cache = model.new_cache(tokens.shape[0]) if use_cache else None
    new = tokens
    for _ in range(steps):
        best = model(new if use_cache else tokens, cache)[:, -1:].argmax(-1)
        new, tokens = best, torch.cat([tokens, best], 1)
    return tokens


FACTS = {"positions": "learned", "norm_placement": "pre", "activation": "gelu", "tied": False}
right, wrong = (
    Subject(kind="decoder", name="served LM", build=cls, forward=lambda m, tokens: m(tokens), cache=cached,
            generate=generate, declares=FACTS)
    for cls in (LM, ServedLM)
)  # fmt: skip
