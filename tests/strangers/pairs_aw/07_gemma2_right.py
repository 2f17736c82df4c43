"""Gemma 2, functional: parameters in a dict of tensors, RMSNorm with 1 + w, sandwich norms, capped scores, tied head."""
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from veriformer.properties import Subject

SOFT_CAP = 4.0


def rms(x, w, eps=1e-6):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1.0 + w)


def rotary(x):
    length, dim = x.shape[-2:]
    freq = 10000.0 ** (-2.0 * torch.arange(dim // 2, dtype=torch.float64, device=x.device) / dim)
    phase = torch.outer(torch.arange(length, dtype=torch.float64, device=x.device), freq)
    cos, sin = phase.cos().to(x.dtype), phase.sin().to(x.dtype)
    first, second = x[..., : dim // 2], x[..., dim // 2 :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attend(p, x, heads, allowed):
    q, k, v = (rearrange(x @ p[n].T, "b t (h d) -> b h t d", h=heads) for n in ("q", "k", "v"))
    scale = q.shape[-1] ** -0.5
    q, k = rotary(q), rotary(k)
    logits = torch.einsum("bhtd,bhsd->bhts", q, k)
    logits = SOFT_CAP * torch.tanh(logits * scale / SOFT_CAP)
    logits = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)
    out = torch.einsum("bhts,bhsd->bhtd", logits.softmax(-1), v)
    return rearrange(out, "b h t d -> b t (h d)") @ p["o"].T


def geglu(p, x):
    return (F.gelu(x @ p["gate"].T, approximate="tanh") * (x @ p["up"].T)) @ p["down"].T


class Gemma2(nn.Module):
    def __init__(self, vocab, dim, heads, layers, inner):
        super().__init__()
        self.heads, self.dim = heads, dim
        self.embed = nn.Parameter(torch.randn(vocab, dim) * dim**-0.5)
        shapes = {n: (dim, dim) for n in "qkvo"} | {"gate": (inner, dim), "up": (inner, dim), "down": (dim, inner)}
        self.blocks = nn.ModuleList(
            nn.ParameterDict(
                {n: nn.Parameter(torch.randn(s) * s[1] ** -0.5) for n, s in shapes.items()}
                | {n: nn.Parameter(torch.zeros(dim)) for n in ("pre_a", "post_a", "pre_f", "post_f")}
            )
            for _ in range(layers)
        )
        self.final = nn.Parameter(torch.zeros(dim))

    def forward(self, tokens, attention_mask=None):
        length = tokens.shape[1]
        allowed = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :]
        x = F.embedding(tokens, self.embed) * self.dim**0.5
        for p in self.blocks:
            x = x + rms(attend(p, rms(x, p["pre_a"]), self.heads, allowed), p["post_a"])
            x = x + rms(geglu(p, rms(x, p["pre_f"])), p["post_f"])
        return rms(x, self.final) @ self.embed.T


subject = Subject(
    kind="decoder",
    name="Gemma 2",
    build=lambda c: Gemma2(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    domain={"d_model": (16, 32), "num_heads": (2, 4)},
    declares={
        "positions": "rotary",
        "layout": "halves",
        "soft_cap": SOFT_CAP,
        "attention_scale": "1/sqrt(d_head)",
        "embedding_scale": True,
        "tied": True,
        "norm": "rms",
        "norm_placement": "other",
        "final_norm": True,
        "activation": "other",
        "bias": False,
        "padding_side": "both",
        "structure": "other",
    },
)
