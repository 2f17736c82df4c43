"""A small Mistral: RMSNorm, rotary positions, SwiGLU, a sliding window of 4 and a rolling cache."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WINDOW = 4


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def rope(x, start):
    dim = x.size(-1)
    freqs = 10000.0 ** (-torch.arange(0, dim, 2, device=x.device, dtype=torch.float64) / dim)
    angles = torch.arange(start, start + x.size(-2), device=x.device, dtype=torch.float64)[:, None] * freqs
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Attention(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        if (dim // n_heads) % 2:
            raise ValueError("rotary needs heads of even width")
        self.n_heads = n_heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim, bias=False)
        self.wv = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x, start=0, cache=None):
        b, t, d = x.shape
        q, k, v = (w(x).view(b, t, self.n_heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rope(q, start), rope(k, start)
        if cache is not None:
            if cache:
                k, v = torch.cat((cache["k"], k), 2), torch.cat((cache["v"], v), 2)
            keep = WINDOW - 1
            cache["k"], cache["v"] = k[:, :, -keep:], v[:, :, -keep:]
        if t == 1:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            past = k.size(2) - t
            distance = torch.arange(past, past + t, device=x.device)[:, None] - torch.arange(past + t, device=x.device)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=(distance >= 0) & (distance < WINDOW))
        return self.wo(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, dim, n_heads, hidden):
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)
        self.attention = Attention(dim, n_heads)
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x, start, cache):
        h = x + self.attention(self.attention_norm(x), start, cache)
        n = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(n)) * self.w3(n))


class Mistral(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm = RMSNorm(c.d_model)
        self.output = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, start=0, caches=None):
        h = self.tok_embeddings(tokens)
        for i, layer in enumerate(self.layers):
            h = layer(h, start, None if caches is None else caches[i])
        return self.output(self.norm(h))


def cached(model, chunks):
    caches, start, outputs = [{} for _ in model.layers], 0, []
    for chunk in chunks:
        outputs.append(model(chunk, start, caches))
        start += chunk.size(1)
    return torch.cat(outputs, 1)


subject = Subject(
    kind="decoder",
    build=Mistral,
    forward=lambda model, tokens: model(tokens),
    cache=cached,
    declares={
        "window": WINDOW,
        "positions": "rotary",
        "layout": "halves",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "tied": False,
    },
)
