WHAT = "the rotary position of new tokens is the length of the cache (`start = past[0].shape[2]`), which stays at window - 1 once old keys are dropped: cached decoding is wrong beyond the window"
"""A decoder for streams: Mistral in small, sliding window of 4, with a rolling key-value cache."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

WINDOW = 4


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate(x, start):
    T, K = x.shape[-2:]
    t = torch.arange(start, start + T, dtype=x.dtype, device=x.device)
    freq = 10000.0 ** (-torch.arange(0, K, 2, dtype=x.dtype, device=x.device) / K)
    angle = t[:, None] * freq
    a, b = x[..., : K // 2], x[..., K // 2 :]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n, self.n_kv, self.hd = c.num_heads, c.num_key_value_heads, c.d_model // c.num_heads
        if self.hd % 2:
            raise ValueError("head width must be even")
        self.wq = nn.Linear(c.d_model, self.n * self.hd, bias=False)
        self.wk = nn.Linear(c.d_model, self.n_kv * self.hd, bias=False)
        self.wv = nn.Linear(c.d_model, self.n_kv * self.hd, bias=False)
        self.wo = nn.Linear(self.n * self.hd, c.d_model, bias=False)

    def forward(self, x, past=None, seen=0):
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, self.n, self.hd).transpose(1, 2)
        k = self.wk(x).view(B, T, self.n_kv, self.hd).transpose(1, 2)
        v = self.wv(x).view(B, T, self.n_kv, self.hd).transpose(1, 2)
        start = past[0].shape[2] if past is not None else 0
        q, k = rotate(q, start), rotate(k, start)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        S = k.shape[2]
        i = torch.arange(S - T, S, device=x.device)[:, None]
        j = torch.arange(S, device=x.device)[None]
        seen_by = (j <= i) & (j > i - WINDOW)
        rep = self.n // self.n_kv
        y = F.scaled_dot_product_attention(q, k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1), seen_by)
        past = (k[:, :, -(WINDOW - 1) :], v[:, :, -(WINDOW - 1) :])  # what the next token can see
        return self.wo(y.transpose(1, 2).reshape(B, T, -1)), past


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(c.d_model), RMSNorm(c.d_model)
        self.attention = Attention(c)
        self.w1 = nn.Linear(c.d_model, c.d_ff, bias=False)
        self.w2 = nn.Linear(c.d_ff, c.d_model, bias=False)
        self.w3 = nn.Linear(c.d_model, c.d_ff, bias=False)

    def forward(self, x, past=None, seen=0):
        y, past = self.attention(self.attention_norm(x), past, seen)
        x = x + y
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h)), past


class Streamer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList([Block(c) for _ in range(c.num_layers)])
        self.norm = RMSNorm(c.d_model)
        self.output = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, pasts=None, seen=0):
        pasts = pasts or [None] * len(self.layers)
        x, new = self.tok(tokens), []
        for layer, past in zip(self.layers, pasts):
            x, past = layer(x, past, seen)
            new.append(past)
        return self.output(self.norm(x)), new


def stream(model, chunks):
    out, pasts, seen = [], None, 0
    for chunk in chunks:
        logits, pasts = model(chunk, pasts, seen)
        seen += chunk.shape[1]
        out.append(logits)
    return torch.cat(out, 1)


subject = Subject(
    kind="decoder",
    name="streamer",
    build=Streamer,
    forward=lambda m, tokens: m(tokens)[0],
    cache=lambda m, chunks: stream(m, chunks),
    declares={"positions": "rotary", "layout": "halves", "window": WINDOW, "norm": "rms", "norm_placement": "pre",
              "final_norm": True, "activation": "swiglu", "bias": False, "tied": False},
)
