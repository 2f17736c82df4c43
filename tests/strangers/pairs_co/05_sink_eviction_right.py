"""StreamingLLM-like decoder: a sliding window and the first tokens; the cache keeps no more than these."""
import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WINDOW, SINKS = 4, 2


def rotate(x, positions):
    half = x.shape[-1] // 2
    rate = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = positions.to(torch.float64)[:, None] * rate
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class StreamingAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        if (width // heads) % 2:
            raise ValueError("rotary positions need an even width of heads")
        self.heads = heads
        self.to_q, self.to_k, self.to_v, self.to_o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def attend(self, q, k, v, at, positions):
        far = at[:, None] - positions[None]
        seen = (far >= 0) & ((far < WINDOW) | (positions < SINKS))
        score = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        return self.to_o((score.masked_fill(~seen, -math.inf).softmax(-1) @ v).transpose(1, 2).flatten(2))

    def forward(self, x, at, past=None):
        q = rotate(self.split(self.to_q(x)), at)
        k, v, positions = rotate(self.split(self.to_k(x)), at), self.split(self.to_v(x)), at
        if past is None:
            return self.attend(q, k, v, at, positions), None
        if past:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
            positions = torch.cat((past[2], positions))
        y = self.attend(q, k, v, at, positions)
        keep = (positions < SINKS) | (positions > positions[-1] - WINDOW)
        k, v, positions = k[:, :, keep], v[:, :, keep], positions[keep]
        return y, (k, v, positions)


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.attention = StreamingAttention(c.d_model, c.num_heads)
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def forward(self, x, at, past=None):
        y, past = self.attention(self.norm_1(x), at, past)
        x = x + y
        return x + self.down(F.relu(self.up(self.norm_2(x)))), past


class Streaming(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_layers))
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size)

    def forward(self, tokens, start=0, pasts=None):
        at = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            x, past = layer(x, at, None if pasts is None else pasts[i])
            if pasts is not None:
                pasts[i] = past
        return self.head(self.norm(x))


def cached(model, chunks):
    pasts, outputs, start = [() for _ in model.layers], [], 0
    for chunk in chunks:
        outputs.append(model(chunk, start, pasts))
        start += chunk.shape[1]
    return torch.cat(outputs, 1)


subject = Subject(
    kind="decoder",
    name="streaming decoder",
    build=Streaming,
    forward=lambda model, tokens: model(tokens),
    cache=cached,
    declares={
        "positions": "rotary",
        "layout": "interleaved",
        "window": WINDOW,
        "sink_tokens": SINKS,
        "norm_placement": "pre",
        "activation": "relu",
    },
)
