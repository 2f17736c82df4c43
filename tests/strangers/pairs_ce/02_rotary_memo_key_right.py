import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.scale, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.scale


class Rotary:
    """Tables are made once per shape and kept (jit-style static cache)."""

    def __init__(self, dim, base=10000.0):
        self.dim, self.base, self.tables = dim, base, {}

    def table(self, start, length, like):
        key = (start, length, like.dtype, like.device)
        if key not in self.tables:
            with torch.inference_mode(False), torch.no_grad():
                freq = self.base ** (-torch.arange(0, self.dim, 2, dtype=torch.float64, device=like.device) / self.dim)
                angle = torch.arange(start, start + length, dtype=torch.float64, device=like.device)[:, None] * freq
                self.tables[key] = angle.cos().to(like.dtype), angle.sin().to(like.dtype)
        return self.tables[key]

    def __call__(self, x, start):
        cos, sin = self.table(start, x.shape[-2], x)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class LlamaLayer(nn.Module):
    def __init__(self, d, h, g, ff, rotary):
        super().__init__()
        self.h, self.g, self.k = h, g, d // h
        self.rotary = rotary
        self.attn_norm, self.mlp_norm = RMSNorm(d), RMSNorm(d)
        self.wq, self.wo = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.wkv = nn.Linear(d, 2 * g * self.k, bias=False)
        self.w1, self.w3, self.w2 = nn.Linear(d, ff, bias=False), nn.Linear(d, ff, bias=False), nn.Linear(ff, d, bias=False)

    def forward(self, x, past):
        B, T, D = x.shape
        h = self.attn_norm(x)
        q = self.wq(h).view(B, T, self.h, self.k).transpose(1, 2)
        k, v = self.wkv(h).view(B, T, 2, self.g, self.k).permute(2, 0, 3, 1, 4)
        start = 0 if past is None else past[0].shape[2]
        q, k = self.rotary(q, start), self.rotary(k, start)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        rep = self.h // self.g
        mask = torch.ones(T, start + T, dtype=torch.bool, device=x.device).tril(start)
        y = F.scaled_dot_product_attention(q, k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1), attn_mask=mask)
        x = x + self.wo(y.transpose(1, 2).reshape(B, T, D))
        h = self.mlp_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h)), (k, v)


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        rotary = Rotary(c.d_model // c.num_heads)
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(
            LlamaLayer(c.d_model, c.num_heads, c.num_key_value_heads, c.d_ff, rotary) for _ in range(c.num_layers)
        )
        self.norm, self.out = RMSNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, past=None):
        past = past or [None] * len(self.layers)
        x, new = self.emb(tokens), []
        for layer, p in zip(self.layers, past):
            x, kv = layer(x, p)
            new.append(kv)
        return self.out(self.norm(x)), new


def cached(model, chunks):
    past, outputs = None, []
    for chunk in chunks:
        y, past = model(chunk, past)
        outputs.append(y)
    return torch.cat(outputs, 1)


subject = Subject(
    kind="decoder",
    name="llama port",
    build=Llama,
    forward=lambda m, tokens: m(tokens)[0],
    cache=cached,
    domain={"d_model": [8, 16, 32], "num_heads": [1, 2, 4]},
    declares={"causal": True, "positions": "rotary", "layout": "halves", "norm": "rms", "norm_placement": "pre",
              "activation": "swiglu", "bias": False, "final_norm": True},
)
