"""Music Transformer (Huang et al. 2018): relative attention by skewing, the table's last row is distance 0."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class RelativeGlobalAttention(nn.Module):
    def __init__(self, d, h, max_len):
        super().__init__()
        self.h, self.max_len = h, max_len
        self.Wq, self.Wk, self.Wv, self.fc = (nn.Linear(d, d) for _ in range(4))
        self.E = nn.Parameter(torch.randn(h, max_len, d // h))

    @staticmethod
    def skew(qe):
        b, h, n, _ = qe.shape
        return F.pad(qe, (1, 0)).reshape(b, h, n + 1, n)[:, :, 1:]

    def forward(self, x):
        b, n, d = x.shape
        if n > self.max_len:
            raise ValueError(f"{n} events, {self.max_len} at most")
        q, k, v = (w(x).view(b, n, self.h, -1).permute(0, 2, 1, 3) for w in (self.Wq, self.Wk, self.Wv))
        e = self.E[:, :n]
        srel = self.skew(torch.einsum("bhid,hrd->bhir", q, e))
        logits = (q @ k.transpose(2, 3) + srel) / math.sqrt(k.shape[-1])
        future = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        out = logits.masked_fill(future, -math.inf).softmax(-1) @ v
        return self.fc(out.permute(0, 2, 1, 3).reshape(b, n, d))


class EventLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.rga = RelativeGlobalAttention(c.d_model, c.num_heads, c.max_len)
        self.ffn_pre, self.ffn_suf = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.ln1, self.ln2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)

    def forward(self, x):
        x = self.ln1(x + self.rga(x))
        return self.ln2(x + self.ffn_suf(F.relu(self.ffn_pre(x))))


class MusicTransformer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.scale = math.sqrt(c.d_model)
        self.event = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList([EventLayer(c) for _ in range(c.num_layers)])
        self.fc = nn.Linear(c.d_model, c.vocab_size)

    def forward(self, events):
        x = self.event(events) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.fc(x)


subject = Subject(
    kind="decoder",
    build=MusicTransformer,
    forward=lambda m, tokens: m(tokens),
    declares={
        "positions": "relative", "norm": "layer", "norm_placement": "post", "activation": "relu",
        "embedding_scale": True,
    },
)

WHAT = "Line 29: the first n rows of the relative table are taken, not the last n: which row a distance gets depends on the length of the sequence."
