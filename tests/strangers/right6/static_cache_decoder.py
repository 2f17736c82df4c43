"""A GPT with a static cache: buffers of the greatest length, written in place; it generates greedily."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject


class StaticCache:
    def __init__(self, batch, heads, length, width, layers, like):
        shape = (layers, 2, batch, heads, length, width)
        self.store, self.used = torch.zeros(shape, dtype=like.dtype, device=like.device), 0

    def update(self, layer, k, v):
        stop = self.used + k.shape[2]
        if stop > self.store.shape[-2]:
            raise ValueError("the cache is full")
        self.store[layer, 0, :, :, self.used : stop] = k
        self.store[layer, 1, :, :, self.used : stop] = v
        return self.store[layer, 0, :, :, :stop].clone(), self.store[layer, 1, :, :, :stop].clone()

    def reorder(self, index):
        self.store = self.store.index_select(2, index)


class Layer(nn.Module):
    def __init__(self, d, h, f, number):
        super().__init__()
        self.h, self.number = h, number
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down = nn.Linear(d, f), nn.Linear(f, d)

    def forward(self, x, see, cache):
        b, t, d = x.shape
        y = self.ln1(x)
        q, k, v = (w(y).view(b, t, self.h, d // self.h).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        if cache is not None:
            k, v = cache.update(self.number, k, v)
        s = torch.einsum("bhtk,bhsk->bhts", q, k) / (d // self.h) ** 0.5
        w = torch.where(see, s, torch.finfo(s.dtype).min).softmax(-1)
        x = x + self.wo(torch.einsum("bhts,bhsk->bthk", w, v).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class CachedGPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.sizes = (c.num_heads, c.max_len, c.d_model // c.num_heads, c.num_layers)
        self.max_len = c.max_len
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList([Layer(c.d_model, c.num_heads, c.d_ff, i) for i in range(c.num_layers)])
        self.ln, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def new_cache(self, batch):
        return StaticCache(batch, *self.sizes, self.wte.weight)

    def forward(self, tokens, mask=None, cache=None):
        start = 0 if cache is None else cache.used
        place = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        see = (torch.arange(len(place) + start, device=tokens.device) <= place[:, None])[None, None]
        if mask is not None:
            see = see & mask[:, None, None, : len(place) + start].bool()
        x = self.wte(tokens) + self.wpe(place)
        for layer in self.layers:
            x = layer(x, see, cache)
        if cache is not None:
            cache.used += tokens.shape[1]
        return self.head(self.ln(x))


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


def cached(model, chunks, attention_mask=None, reorder=None):
    cache, outputs = model.new_cache(chunks[0].shape[0]), []
    for i, chunk in enumerate(chunks):
        if i == 1 and reorder is not None:
            cache.reorder(reorder)
            attention_mask = None if attention_mask is None else attention_mask[reorder]
        outputs.append(model(chunk, attention_mask, cache))
    return torch.cat(outputs, 1)


@torch.no_grad()
def generate(model, tokens, steps, use_cache):
    cache = model.new_cache(tokens.shape[0]) if use_cache else None
    new = tokens
    for _ in range(steps):
        logits = model(new if use_cache else tokens, None, cache)
        new = logits[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, new], 1)
    return tokens


declared = Subject(
    kind="decoder", name="static cache", build=CachedGPT, forward=forward, cache=cached, generate=generate,
    declares={
        "causal": True, "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
        "residual": True, "activation": "gelu", "bias": True, "output_bias": False, "tied": False,
        "padding_side": "right", "attention_scale": "1/sqrt(d_head)", "beyond_max_len": "error",
        "embedding_scale": False, "reorders_mask": True, "cached_chunks": True,
    },
)
undeclared = Subject(kind="decoder", build=CachedGPT, forward=forward)
