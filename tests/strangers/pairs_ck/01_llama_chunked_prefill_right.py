"""A small Llama. The cache learnt to take several tokens at once (chunked prefill)."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate(x, start):
    width = x.shape[-1]
    inverse = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64, device=x.device) / width)
    steps = torch.arange(start, start + x.shape[-2], dtype=torch.float64, device=x.device)
    angle = torch.outer(steps, inverse)
    angle = torch.cat([angle, angle], -1)
    a, b = x.chunk(2, -1)
    return x * angle.cos().to(x.dtype) + torch.cat([-b, a], -1) * angle.sin().to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h, self.g = c.num_heads, c.num_key_value_heads
        self.d = c.d_model // c.num_heads
        if self.d % 2:
            raise ValueError("rotary wants an even head width")
        self.wq = nn.Linear(c.d_model, self.h * self.d, bias=False)
        self.wk = nn.Linear(c.d_model, self.g * self.d, bias=False)
        self.wv = nn.Linear(c.d_model, self.g * self.d, bias=False)
        self.wo = nn.Linear(self.h * self.d, c.d_model, bias=False)

    def forward(self, x, past=None):
        B, T, _ = x.shape
        start = 0 if past is None else past[0].shape[2]
        q = rotate(self.wq(x).view(B, T, self.h, self.d).transpose(1, 2), start)
        k = rotate(self.wk(x).view(B, T, self.g, self.d).transpose(1, 2), start)
        v = self.wv(x).view(B, T, self.g, self.d).transpose(1, 2)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        present = (k, v)
        k = k.repeat_interleave(self.h // self.g, 1)
        v = v.repeat_interleave(self.h // self.g, 1)
        scores = q @ k.transpose(-1, -2) / self.d**0.5
        if T > 1:  # a single new token sees everything
            seen = torch.ones(T, k.shape[2], dtype=torch.bool, device=x.device).tril(start)
            scores = scores.masked_fill(~seen, float("-inf"))
        y = scores.softmax(-1) @ v
        return self.wo(y.transpose(1, 2).reshape(B, T, -1)), present


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n1, self.n2 = RMSNorm(c.d_model), RMSNorm(c.d_model)
        self.attn = Attention(c)
        self.gate = nn.Linear(c.d_model, c.d_ff, bias=False)
        self.up = nn.Linear(c.d_model, c.d_ff, bias=False)
        self.down = nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x, past=None):
        y, present = self.attn(self.n1(x), past)
        x = x + y
        z = self.n2(x)
        return x + self.down(F.silu(self.gate(z)) * self.up(z)), present


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm = RMSNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, pasts=None):
        x, presents = self.embed(tokens), []
        for i, block in enumerate(self.blocks):
            x, present = block(x, None if pasts is None else pasts[i])
            presents.append(present)
        return self.head(self.norm(x)), presents


def cached(model, chunks):
    outputs, pasts = [], None
    for chunk in chunks:
        logits, pasts = model(chunk, pasts)
        outputs.append(logits)
    return torch.cat(outputs, 1)


subject = Subject(
    kind="decoder",
    name="llama with chunked prefill",
    build=Llama,
    forward=lambda m, tokens: m(tokens)[0],
    cache=cached,
    declares={"causal": True, "positions": "rotary", "layout": "halves", "norm": "rms", "norm_placement": "pre",
              "activation": "swiglu", "bias": False},
)
