WHAT = "the scores are capped after the mask is added: tanh brings the -inf of a hidden key back to -cap, and the softmax gives it weight (line 29)."
"""Gemma 2 as functions over a dictionary of parameters: norms before and behind each sublayer, capped scores."""
import torch
from torch import nn
from torch.nn.functional import embedding, gelu, linear

from veriformer.properties import Subject

SOFT_CAP, FINAL_CAP = 5.0, 30.0


def rms_norm(x, gain, eps=1e-6):
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * (1 + gain)


def rope(x):
    """x [B, H, T, K]."""
    half = x.shape[-1] // 2
    freq = 10000.0 ** (torch.arange(half, dtype=x.dtype, device=x.device) / -half)
    angle = torch.arange(x.shape[-2], dtype=x.dtype, device=x.device)[:, None] * freq
    real, imaginary = x[..., :half], x[..., half:]
    return torch.cat(
        (real * angle.cos() - imaginary * angle.sin(), real * angle.sin() + imaginary * angle.cos()), dim=-1
    )


def attend(q, k, v, mask):
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores + mask
    scores = SOFT_CAP * torch.tanh(scores / SOFT_CAP)
    return scores.softmax(-1) @ v


def attention(p, x, heads, kv_heads, mask):
    def split(t, n):
        return t.unflatten(-1, (n, -1)).transpose(1, 2)

    q = rope(split(linear(x, p["q"]), heads))
    k = rope(split(linear(x, p["k"]), kv_heads)).repeat_interleave(heads // kv_heads, 1)
    v = split(linear(x, p["v"]), kv_heads).repeat_interleave(heads // kv_heads, 1)
    return linear(attend(q, k, v, mask).transpose(1, 2).flatten(2), p["o"])


def feed_forward(p, x):
    return linear(gelu(linear(x, p["gate"]), approximate="tanh") * linear(x, p["up"]), p["down"])


def layer(p, x, heads, kv_heads, mask):
    x = x + rms_norm(attention(p, rms_norm(x, p["pre_attn"]), heads, kv_heads, mask), p["post_attn"])
    return x + rms_norm(feed_forward(p, rms_norm(x, p["pre_ffw"])), p["post_ffw"])


class Gemma2(nn.Module):
    def __init__(self, vocab, d, heads, kv_heads, layers, d_ff):
        super().__init__()
        if (d // heads) % 2:
            raise ValueError("the rotation needs an even width per head")
        self.heads, self.kv_heads = heads, kv_heads
        kv = d // heads * kv_heads
        shapes = {"q": (d, d), "k": (kv, d), "v": (kv, d), "o": (d, d)}
        shapes |= {"gate": (d_ff, d), "up": (d_ff, d), "down": (d, d_ff)}
        norms = ("pre_attn", "post_attn", "pre_ffw", "post_ffw")
        self.embedder = nn.Parameter(torch.randn(vocab, d) * d**-0.5)
        self.layers = nn.ModuleList(
            nn.ParameterDict(
                {name: nn.Parameter(torch.randn(shape) * shape[1] ** -0.5) for name, shape in shapes.items()}
                | {name: nn.Parameter(torch.zeros(d)) for name in norms}
            )
            for _ in range(layers)
        )
        self.final_norm = nn.Parameter(torch.zeros(d))

    def forward(self, tokens):
        T, d = tokens.shape[1], self.embedder.shape[1]
        x = embedding(tokens, self.embedder) * d**0.5
        mask = torch.full((T, T), float("-inf"), dtype=x.dtype, device=x.device).triu(1)
        for p in self.layers:
            x = layer(p, x, self.heads, self.kv_heads, mask)
        logits = linear(rms_norm(x, self.final_norm), self.embedder)
        return FINAL_CAP * torch.tanh(logits / FINAL_CAP)


subject = Subject(
    kind="decoder",
    name="Gemma 2",
    build=lambda c: Gemma2(c.vocab_size, c.d_model, c.num_heads, c.num_key_value_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens),
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "halves",
        "soft_cap": SOFT_CAP,
        "embedding_scale": True,
        "norm": "rms",
        "norm_placement": "other",
        "final_norm": True,
        "activation": "other",
        "bias": False,
        "grouped_queries": True,
        "tied": True,
        "structure": "other",
    },
)
