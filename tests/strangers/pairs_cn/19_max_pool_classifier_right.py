"""Classify a padded series of events: a transformer encoder, then the maximum over time of every channel."""
import torch
from torch import nn
from veriformer.properties import Subject


class EncoderLayer(nn.Module):
    def __init__(self, d, heads, f):
        super().__init__()
        self.heads = heads
        self.ln_a, self.ln_f = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.kv, self.o = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)
        self.f1, self.f2 = nn.Linear(d, f), nn.Linear(f, d)

    def forward(self, x, real):
        b, t, d = x.shape
        y = self.ln_a(x)
        q = self.q(y).view(b, t, self.heads, -1).transpose(1, 2)
        k, v = self.kv(y).view(b, t, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        hide = ~real[:, None, None, :]
        w = scores.masked_fill(hide, torch.finfo(x.dtype).min).softmax(-1).masked_fill(hide, 0.0)
        x = x + self.o((w @ v).transpose(1, 2).reshape(b, t, d))
        return x + self.f2(torch.relu(self.f1(self.ln_f(x))))


class EventClassifier(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.event, self.when = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(EncoderLayer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.classes = nn.Linear(c.d_model, c.num_classes)

    def forward(self, events, real=None):
        if real is None:
            real = torch.ones_like(events, dtype=torch.bool)
        x = self.event(events) + self.when(torch.arange(events.shape[1], device=events.device))
        for layer in self.layers:
            x = layer(x, real)
        peak = x.masked_fill(~real[..., None], float("-inf")).amax(1)
        peak = torch.where(real.any(1, keepdim=True), peak, 0.0)  # a sample without events
        return self.classes(peak)


subject = Subject(
    kind="classifier",
    name="event classifier",
    build=EventClassifier,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "pooling": "max",
        "positions": "learned",
        "padding_side": "right",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": False,
        "activation": "relu",
    },
)
