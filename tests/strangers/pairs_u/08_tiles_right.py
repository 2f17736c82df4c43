# A LLaMA in one file; attention goes by tiles of 8 queries and 4 keys with an online softmax.
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

QUERIES, KEYS = 8, 4


def tiled_causal_attention(q, k, v):
    """q, k, v [B, H, T, K]"""
    length, scale = q.shape[2], q.shape[3] ** -0.5
    done = []
    for start in range(0, length, QUERIES):
        stop = min(start + QUERIES, length)
        rows = torch.arange(start, stop, device=q.device)
        query = q[:, :, start:stop] * scale
        peak = torch.full_like(query[..., :1], float("-inf"))
        total, mixed = torch.zeros_like(peak), torch.zeros_like(v[:, :, start:stop])
        for first in range(0, length, KEYS):
            if first >= stop:
                break
            columns = torch.arange(first, min(first + KEYS, length), device=q.device)
            scores = query @ k[:, :, first : first + KEYS].transpose(-1, -2)
            scores = scores.masked_fill(columns > rows[:, None], float("-inf"))
            higher = torch.maximum(peak, scores.amax(-1, keepdim=True))
            weights, fade = torch.exp(scores - higher), torch.exp(peak - higher)
            total = total * fade + weights.sum(-1, keepdim=True)
            mixed = mixed * fade + weights @ v[:, :, first : first + KEYS]
            peak = higher
        done.append(mixed / total)
    return torch.cat(done, dim=2)


def rope(x):
    pairs = x.unflatten(-1, (-1, 2))
    count = pairs.shape[-2]
    theta = 10000.0 ** (-torch.arange(count, device=x.device, dtype=torch.float64) / count)
    angle = torch.outer(torch.arange(x.shape[-2], device=x.device, dtype=torch.float64), theta)
    c, s = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    even, odd = pairs.unbind(-1)
    return torch.stack((even * c - odd * s, even * s + odd * c), -1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads):
        super().__init__()
        self.head_dim, self.group = dim // n_heads, n_heads // n_kv_heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        k, v = (y.repeat_interleave(self.group, dim=1) for y in (rope(k), v))
        return self.wo(tiled_causal_attention(rope(q), k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads, hidden):
        super().__init__()
        self.attention = Attention(dim, n_heads, n_kv_heads)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim, eps=1e-6), nn.RMSNorm(dim, eps=1e-6)
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        y = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        if (c.d_model // c.num_heads) % 2:
            raise ValueError("heads of an odd width cannot be rotated")
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.Sequential(
            *[Block(c.d_model, c.num_heads, c.num_key_value_heads, c.d_ff) for _ in range(c.num_layers)]
        )
        self.norm = nn.RMSNorm(c.d_model, eps=1e-6)
        self.output = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens):
        return self.output(self.norm(self.layers(self.tok_embeddings(tokens))))


subject = Subject(
    kind="decoder",
    name="Llama by tiles",
    build=Llama,
    forward=lambda model, tokens: model(tokens),
    declares={
        "positions": "rotary",
        "layout": "interleaved",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "grouped_queries": True,
    },
)
