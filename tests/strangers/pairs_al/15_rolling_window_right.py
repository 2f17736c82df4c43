import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject

WINDOW = 4


def rotate(x, pos):
    d = x.shape[-1]
    theta = pos.to(x.dtype)[:, None] * 10000.0 ** (-torch.arange(0, d, 2, dtype=x.dtype, device=x.device) / d)
    c, s = theta.cos(), theta.sin()
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)


class RollingCache:
    """Keys and values of the last tokens of one layer, and how many there have been."""

    def __init__(self):
        self.k = self.v = self.pos = None
        self.seen = 0

    def append(self, k, v, pos):
        if self.k is not None:
            k, v, pos = torch.cat((self.k, k), 2), torch.cat((self.v, v), 2), torch.cat((self.pos, pos))
        first = max(0, len(pos) - (WINDOW - 1))
        self.k, self.v, self.pos = k[:, :, first:], v[:, :, first:], pos[first:]
        return k, v, pos


class MistralBlock(nn.Module):
    def __init__(self, dim, n_heads, n_kv, hidden):
        super().__init__()
        self.n_heads, self.n_kv, self.hd = n_heads, n_kv, dim // n_heads
        self.wq, self.wk = nn.Linear(dim, dim, bias=False), nn.Linear(dim, n_kv * self.hd, bias=False)
        self.wv, self.wo = nn.Linear(dim, n_kv * self.hd, bias=False), nn.Linear(dim, dim, bias=False)
        self.w1, self.w2, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False), nn.Linear(dim, hidden, bias=False)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim, 1e-5), nn.RMSNorm(dim, 1e-5)

    def forward(self, x, pos, cache=None):
        b, t, _ = x.shape
        h = self.attention_norm(x)
        q = rotate(self.wq(h).view(b, t, self.n_heads, self.hd).transpose(1, 2), pos)
        k = rotate(self.wk(h).view(b, t, self.n_kv, self.hd).transpose(1, 2), pos)
        v = self.wv(h).view(b, t, self.n_kv, self.hd).transpose(1, 2)
        kpos = pos
        if cache is not None:
            k, v, kpos = cache.append(k, v, pos)
        k, v = (z[:, :, None].expand(-1, -1, self.n_heads // self.n_kv, -1, -1).flatten(1, 2) for z in (k, v))
        gap = pos[:, None] - kpos[None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=(gap >= 0) & (gap < WINDOW))
        x = x + self.wo(y.transpose(1, 2).reshape(b, t, -1))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Mistral(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList([MistralBlock(c.d_model, c.num_heads, c.num_key_value_heads, c.d_ff) for _ in range(c.num_layers)])
        self.norm, self.output = nn.RMSNorm(c.d_model, 1e-5), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, ids, start=0, caches=None):
        pos = torch.arange(start, start + ids.shape[1], device=ids.device)
        x = self.tok_embeddings(ids)
        for i, layer in enumerate(self.layers):
            x = layer(x, pos, caches and caches[i])
        return self.output(self.norm(x))


def cached(model, chunks):
    caches, start, outs = [RollingCache() for _ in model.layers], 0, []
    for chunk in chunks:
        outs.append(model(chunk, start, caches))
        start += chunk.shape[1]
    return torch.cat(outs, 1)


subject = Subject(
    kind="decoder", name="mistral", build=Mistral, forward=lambda m, tokens: m(tokens), cache=cached,
    domain={"d_model": [8, 16], "num_heads": [2, 4]},
    declares={"positions": "rotary", "layout": "interleaved", "window": WINDOW, "norm": "rms", "norm_placement": "pre",
              "final_norm": True, "activation": "swiglu", "bias": False},
)
