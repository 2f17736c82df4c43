WHAT = "the cache's token count is advanced by the first layer already, so later layers rotate a chunk by positions that are the chunk's length too high (line 20)"
# A decoder with rotary positions, a cache object and a generate loop.
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class Cache:
    def __init__(self, layers):
        self.seen = 0
        self.keys, self.values = [None] * layers, [None] * layers

    def update(self, layer, k, v):
        if self.keys[layer] is not None:
            k = torch.cat([self.keys[layer], k], 2)
            v = torch.cat([self.values[layer], v], 2)
        self.keys[layer], self.values[layer] = k, v
        self.seen = k.shape[2]
        return k, v


def rope(x, start):
    half = x.shape[-1] // 2
    rate = 10000.0 ** -(torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = torch.arange(start, start + x.shape[2], device=x.device).double()[:, None] * rate
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Block(nn.Module):
    def __init__(self, dim, heads, hidden, index):
        super().__init__()
        self.heads, self.index = heads, index
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x, cache):
        q, k, v = self.qkv(self.ln1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        start = 0 if cache is None else cache.seen
        q, k = rope(q, start), rope(k, start)
        if cache is not None:
            k, v = cache.update(self.index, k, v)
        T, S = q.shape[2], k.shape[2]
        seen = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln2(x))


class Decoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        if c.d_model // c.num_heads % 2:
            raise ValueError("heads of an even width, please")
        self.wte = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff, i) for i in range(c.num_layers))
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, cache=None):
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x, cache)
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, tokens, steps, use_cache=True):
        cache = Cache(len(self.blocks)) if use_cache else None
        fresh = tokens
        for _ in range(steps):
            logits = self(fresh if use_cache else tokens, cache)
            fresh = logits[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, fresh], 1)
        return tokens


def cached(model, chunks):
    cache = Cache(len(model.blocks))
    return torch.cat([model(chunk, cache) for chunk in chunks], 1)


subject = Subject(
    kind="decoder",
    name="rotary decoder",
    build=Decoder,
    forward=lambda m, tokens: m(tokens),
    cache=cached,
    generate=lambda m, tokens, steps, use_cache: m.generate(tokens, steps, use_cache),
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "halves",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
    },
)
