"""Speech-unit LM: two causal convolutions in front of a pre-norm decoder with ALiBi."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class StemNorm(nn.LayerNorm):
    """Over channels; what comes in and goes out is [B, C, T]."""

    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class CausalStem(nn.Module):
    def __init__(self, d, kernel=3):
        super().__init__()
        self.kernel = kernel
        self.convs = nn.ModuleList([nn.Conv1d(d, d, kernel) for _ in range(2)])
        self.norms = nn.ModuleList([StemNorm(d) for _ in range(2)])

    def forward(self, x):
        x = x.transpose(1, 2)
        for conv, norm in zip(self.convs, self.norms):
            x = F.gelu(norm(conv(F.pad(x, (self.kernel - 1, 0)))))
        return x.transpose(1, 2)


def alibi(heads, T, like):
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, device=like.device, dtype=like.dtype) / heads)
    t = torch.arange(T, device=like.device)
    distance = (t[:, None] - t[None, :]).to(like.dtype)
    bias = -slopes[:, None, None] * distance
    return bias.masked_fill(distance < 0, float("-inf"))


class Layer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.h = h
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.wqkv, self.wo, self.w1, self.w2 = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, ff), nn.Linear(ff, d)

    def forward(self, x, bias):
        B, T, D = x.shape
        q, k, v = self.wqkv(self.ln1(x)).view(B, T, 3, self.h, -1).unbind(2)
        s = torch.einsum("bthd,bshd->bhts", q, k) / (D // self.h) ** 0.5 + bias
        x = x + self.wo(torch.einsum("bhts,bshd->bthd", s.softmax(-1), v).reshape(B, T, D))
        return x + self.w2(F.gelu(self.w1(self.ln2(x))))


class UnitLM(nn.Module):
    def __init__(self, units, d, h, n, ff):
        super().__init__()
        self.h, self.embed, self.stem = h, nn.Embedding(units, d), CausalStem(d)
        self.layers = nn.ModuleList([Layer(d, h, ff) for _ in range(n)])
        self.ln_f, self.head = nn.LayerNorm(d), nn.Linear(d, units, bias=False)

    def forward(self, units):
        x = self.embed(units)
        x = x + self.stem(x)
        bias = alibi(self.h, x.shape[1], x)
        for layer in self.layers:
            x = layer(x, bias)
        return self.head(self.ln_f(x))


subject = Subject(
    kind="decoder",
    name="speech unit LM",
    build=lambda c: UnitLM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens),
    declares={"causal": True, "positions": "alibi", "slopes": "geometric", "norm": "layer", "norm_placement": "pre",
              "final_norm": True, "activation": "gelu", "output_bias": False, "structure": "other"},
)
