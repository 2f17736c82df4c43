# Mistral-like decoder: rotary positions, sliding window, RMSNorm, SwiGLU, and a cache that stays short.
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WINDOW = 4


def rotate(x, position):
    half = x.shape[-1] // 2
    inv = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    theta = position.double()[:, None] * inv.to(position.device)
    cos, sin = theta.cos().to(x.dtype), theta.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Attention(nn.Module):
    def __init__(self, dim, n_heads, window):
        super().__init__()
        if (dim // n_heads) % 2:
            raise ValueError("rotary positions need heads of even width")
        self.n_heads, self.window = n_heads, window
        self.wqkv = nn.Linear(dim, 3 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x, start, past):
        B, T, D = x.shape
        q, k, v = self.wqkv(x).view(B, T, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        here = torch.arange(start, start + T, device=x.device)
        q, k = rotate(q, here), rotate(k, here)
        if past is not None:
            keep = self.window + T - 1
            k = torch.cat((past[0], k), dim=2)[:, :, -keep:]
            v = torch.cat((past[1], v), dim=2)[:, :, -keep:]
        there = torch.arange(start + T - k.shape[2], start + T, device=x.device)
        back = here[:, None] - there[None, :]
        seen = (back >= 0) & (back < self.window)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.wo(y.transpose(1, 2).reshape(B, T, D)), (k, v)


class Layer(nn.Module):
    def __init__(self, dim, n_heads, hidden, window):
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)
        self.attention = Attention(dim, n_heads, window)
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x, start, past):
        h, present = self.attention(self.attention_norm(x), start, past)
        x = x + h
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h)), present


class WindowDecoder(nn.Module):
    def __init__(self, vocab, dim, n_heads, n_layers, hidden, window=WINDOW):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([Layer(dim, n_heads, hidden, window) for _ in range(n_layers)])
        self.norm = RMSNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, start=0, past=None):
        past = past or [None] * len(self.layers)
        x, present = self.tok_embeddings(tokens), []
        for layer, old in zip(self.layers, past):
            x, new = layer(x, start, old)
            present.append(new)
        return self.output(self.norm(x)), present


def cached(model, chunks):
    outputs, start, past = [], 0, None
    for chunk in chunks:
        logits, past = model(chunk, start, past)
        outputs.append(logits)
        start += chunk.shape[1]
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="sliding-window decoder",
    build=lambda c: WindowDecoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens)[0],
    cache=cached,
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "halves",
        "window": WINDOW,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
    },
)
