"""A forecaster over quantised values, sliding window, with a rolling cache of the last WINDOW keys."""
import torch
from torch import nn

from veriformer.properties import Subject

WINDOW = 4


def extend(past, new):
    if past is None:
        return new
    return torch.cat((past, new), dim=2)


class WindowLayer(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.h = h
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.kv, self.o = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)
        self.by_lag = nn.Parameter(torch.randn(h, WINDOW))
        self.f = nn.Sequential(nn.Linear(d, f), nn.GELU(), nn.Linear(f, d))

    def forward(self, x, past=(None, None)):
        y = self.n1(x)
        q, k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in (self.q(y), *self.kv(y).chunk(2, -1)))
        k, v = extend(past[0], k), extend(past[1], v)
        t, s = q.shape[2], k.shape[2]
        lag = torch.arange(s - t, s, device=x.device)[:, None] - torch.arange(s, device=x.device)[None, :]
        scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5 + self.by_lag[:, lag.clamp(0, WINDOW - 1)]
        scores = scores.masked_fill((lag < 0) | (lag >= WINDOW), torch.finfo(scores.dtype).min)
        y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + self.o(y)
        return x + self.f(self.n2(x)), (k[:, :, -WINDOW:], v[:, :, -WINDOW:])


class Forecaster(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.bins = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(WindowLayer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size)

    def step(self, values, state=None):
        state = state or [(None, None)] * len(self.layers)
        x, kept = self.bins(values), []
        for layer, past in zip(self.layers, state):
            x, now = layer(x, past)
            kept.append(now)
        return self.head(self.norm(x)), kept

    def forward(self, values):
        return self.step(values)[0]


def in_chunks(model, chunks):
    state, outputs = None, []
    for chunk in chunks:
        out, state = model.step(chunk, state)
        outputs.append(out)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="rolling forecaster",
    build=Forecaster,
    forward=lambda m, tokens: m(tokens),
    cache=in_chunks,
    declares={"window": WINDOW, "norm_placement": "pre", "activation": "gelu"},
)
