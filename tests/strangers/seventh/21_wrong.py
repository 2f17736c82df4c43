"""Classifier over events; positions enter by random Fourier features, whose frequencies are drawn once and never
trained; the state of the last real event is classified."""

import torch
from torch import nn

from veriformer.properties import Subject


class RandomFourierPositions(nn.Module):
    def __init__(self, dim, bandwidth=1.0):
        super().__init__()
        self.register_buffer("frequencies", torch.randn(dim // 2) * bandwidth, persistent=False)
        self.register_buffer("phases", torch.rand(dim // 2) * 2 * torch.pi, persistent=False)
        self.project = nn.Linear(dim, dim)

    def forward(self, positions):
        angles = positions[..., None].double() * self.frequencies.double() + self.phases.double()
        return self.project(torch.cat([angles.sin(), angles.cos()], dim=-1).to(self.frequencies.dtype))


class EventLayer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, dim * 2)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def attention(self, x, mask):
        b, t, d = x.shape
        q = self.q(x).reshape(b, t, self.heads, -1).transpose(1, 2)
        k, v = self.kv(x).reshape(b, t, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        dots = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        dots = dots.masked_fill(~mask[:, None, None, :], torch.finfo(dots.dtype).min)
        return self.proj((dots.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))

    def forward(self, x, mask):
        x = x + self.attention(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class EventClassifier(nn.Module):
    def __init__(self, num_events, num_classes, dim, depth, heads, hidden):
        super().__init__()
        self.events = nn.Embedding(num_events, dim)
        self.positions = RandomFourierPositions(dim)
        self.layers = nn.ModuleList([EventLayer(dim, heads, hidden) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, events, mask=None):
        if mask is None:
            mask = torch.ones_like(events, dtype=torch.bool)
        order = (mask.long().cumsum(dim=1) - 1).clamp(min=0)  # padding on either side is not counted
        x = self.events(events) + self.positions(order)
        for layer in self.layers:
            x = layer(x, mask)
        place = torch.arange(events.shape[1], device=events.device)
        last = torch.where(mask, place, 0).amax(dim=1)
        return self.head(self.norm(x[torch.arange(len(x), device=x.device), last]))


subject = Subject(
    kind="classifier",
    name="events",
    build=lambda c: EventClassifier(c.vocab_size, c.num_classes, c.d_model, c.num_layers, c.num_heads, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    domain={"d_model": (8, 16, 32)},
    declares={
        "causal": False,
        "positions": "other",
        "pooling": "last",
        "embedding_scale": False,
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "residual": True,
        "activation": "gelu",
        "bias": True,
        "output_bias": True,
        "attention_scale": "1/sqrt(d_head)",
        "memory": "quadratic",
        "padding_side": "both",
        "structure": "other",
    },
)
