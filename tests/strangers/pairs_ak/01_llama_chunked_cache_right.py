"""A small LLaMA: RMSNorm, rotary positions, SwiGLU, grouped queries, a cache that takes prompts in chunks."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate(x, positions, base=10000.0):
    half = x.shape[-1] // 2
    freqs = base ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = positions.double()[:, None] * freqs
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class KVCache:
    def __init__(self, n_layers):
        self.keys = [None] * n_layers
        self.values = [None] * n_layers
        self.seen = 0

    def update(self, layer, k, v):
        if self.keys[layer] is not None:
            k = torch.cat((self.keys[layer], k), dim=2)
            v = torch.cat((self.values[layer], v), dim=2)
        self.keys[layer], self.values[layer] = k, v
        return k, v

    def advance(self, n):
        self.seen = n if self.seen == 0 else self.seen + n


class Attention(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads, layer):
        super().__init__()
        self.n_heads, self.n_kv, self.d_head, self.layer = n_heads, n_kv_heads, dim // n_heads, layer
        if self.d_head % 2:
            raise ValueError("rotary positions need an even width of heads")
        self.wq = nn.Linear(dim, n_heads * self.d_head, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.d_head, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.d_head, bias=False)
        self.wo = nn.Linear(n_heads * self.d_head, dim, bias=False)

    def forward(self, x, positions, cache):
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, self.n_heads, self.d_head).transpose(1, 2)
        k = self.wk(x).view(B, T, self.n_kv, self.d_head).transpose(1, 2)
        v = self.wv(x).view(B, T, self.n_kv, self.d_head).transpose(1, 2)
        q, k = rotate(q, positions), rotate(k, positions)
        if cache is not None:
            k, v = cache.update(self.layer, k, v)
        S = k.shape[2]
        k = k.repeat_interleave(self.n_heads // self.n_kv, dim=1)
        v = v.repeat_interleave(self.n_heads // self.n_kv, dim=1)
        allowed = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.wo(y.transpose(1, 2).reshape(B, T, -1))


class Block(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads, hidden, layer):
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)
        self.attention = Attention(dim, n_heads, n_kv_heads, layer)
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x, positions, cache):
        x = x + self.attention(self.attention_norm(x), positions, cache)
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Llama(nn.Module):
    def __init__(self, vocab, dim, n_heads, n_kv_heads, n_layers, hidden):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, n_heads, n_kv_heads, hidden, i) for i in range(n_layers))
        self.norm = RMSNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, cache=None):
        start = 0 if cache is None else cache.seen
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, positions, cache)
        if cache is not None:
            cache.advance(tokens.shape[1])
        return self.output(self.norm(x))


def cached(model, chunks):
    cache = KVCache(len(model.layers))
    return torch.cat([model(chunk, cache) for chunk in chunks], dim=1)


subject = Subject(
    kind="decoder",
    name="llama with a chunked cache",
    build=lambda c: Llama(c.vocab_size, c.d_model, c.num_heads, c.num_key_value_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens),
    cache=cached,
    declares={
        "causal": True, "positions": "rotary", "layout": "halves", "norm": "rms", "norm_placement": "pre",
        "final_norm": True, "activation": "swiglu", "bias": False, "tied": False,
    },
)
