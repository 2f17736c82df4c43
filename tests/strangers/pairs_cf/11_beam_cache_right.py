import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def rope(x, start):
    half = x.size(-1) // 2
    freq = 10000 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(start, start + x.size(-2), device=x.device)[:, None] * freq
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class KVCache:
    def __init__(self, layers):
        self.keys = [None] * layers
        self.values = [None] * layers

    def length(self, i):
        return 0 if self.keys[i] is None else self.keys[i].size(2)

    def update(self, i, k, v):
        if self.keys[i] is not None:
            k = torch.cat([self.keys[i], k], 2)
            v = torch.cat([self.values[i], v], 2)
        self.keys[i], self.values[i] = k, v
        return k, v

    def reorder(self, beam):
        for i in range(len(self.keys)):
            self.keys[i] = self.keys[i].index_select(0, beam)
            self.values[i] = self.values[i].index_select(0, beam)


class Layer(nn.Module):
    def __init__(self, dim, heads, hidden, index):
        super().__init__()
        if (dim // heads) % 2:
            raise ValueError("rotary needs an even head")
        self.heads, self.index = heads, index
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x, cache):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1))
        past = cache.length(self.index) if cache else 0
        q, k = rope(q, past), rope(k, past)
        if cache:
            k, v = cache.update(self.index, k, v)
        allowed = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=x.device).tril(past)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class CodeLM(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim, heads, hidden, i) for i in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, cache=None):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, cache)
        return self.head(self.norm(x))


def run_cached(model, chunks, reorder=None):
    cache, outputs = KVCache(len(model.layers)), []
    for n, chunk in enumerate(chunks):
        outputs.append(model(chunk, cache))
        if n == 0 and reorder is not None:
            cache.reorder(reorder)
    return outputs


subject = Subject(
    kind="decoder",
    name="code model with beams",
    build=lambda c: CodeLM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens),
    cache=lambda m, chunks, reorder=None: run_cached(m, chunks, reorder),
    declares={"causal": True, "positions": "rotary", "layout": "halves", "norm": "layer", "norm_placement": "pre",
              "final_norm": True, "activation": "gelu"},
)
