"""A hybrid decoder: selective state-space mixers and sliding-window attention by turns, with a streaming cache."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

KERNEL, STATE, WINDOW = 4, 4, 5


class Mixer(nn.Module):
    """A gated selective scan behind a short causal convolution."""

    def __init__(self, width):
        super().__init__()
        self.into = nn.Linear(width, 2 * width)
        self.kernel = nn.Parameter(torch.randn(width, 1, KERNEL) * 0.5)
        self.select = nn.Linear(width, 2 * STATE)
        self.delta = nn.Linear(width, width)
        self.log_decay = nn.Parameter(torch.arange(1.0, STATE + 1).log().repeat(width, 1))
        self.skip = nn.Parameter(torch.ones(width))
        self.out = nn.Linear(width, width)

    def forward(self, x, past):
        u, gate = self.into(x).chunk(2, dim=-1)
        seen, h = past if past is not None else (u.new_zeros(u.shape[0], KERNEL - 1, u.shape[2]), None)
        padded = torch.cat([seen, u], dim=1)
        seen = padded[:, -(KERNEL - 1) :]
        u = F.silu(F.conv1d(padded.transpose(1, 2), self.kernel, groups=u.shape[2]).transpose(1, 2))
        delta = F.softplus(self.delta(u))
        write, read = self.select(u).chunk(2, dim=-1)
        decay = torch.exp(-delta[..., None] * self.log_decay.exp())
        drive = (delta * u)[..., None] * write[:, :, None, :]
        h = drive.new_zeros(drive[:, 0].shape) if h is None else h
        ys = []
        for t in range(x.shape[1]):
            h = decay[:, t] * h + drive[:, t]
            ys.append((h * read[:, t, None, :]).sum(-1))
        y = torch.stack(ys, dim=1) + self.skip * u
        return self.out(y * F.silu(gate)), (seen, h)


class WindowAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, past):
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        S = k.shape[2]
        lag = torch.arange(S - T, S, device=x.device)[:, None] - torch.arange(S, device=x.device)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = scores.masked_fill((lag < 0) | (lag >= WINDOW), -torch.inf)
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D)
        return self.out(y), (k[:, :, -(WINDOW - 1) :], v[:, :, -(WINDOW - 1) :])


class Layer(nn.Module):
    def __init__(self, c, attends):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.mix = WindowAttention(c.d_model, c.num_heads) if attends else Mixer(c.d_model)
        self.mlp = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model))

    def forward(self, x, past=None):
        y, past = self.mix(self.norm1(x), past)
        x = x + y
        return x + self.mlp(self.norm2(x)), past


class Hybrid(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList([Layer(c, attends=i % 2 == 1) for i in range(c.num_layers)])
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size)

    def forward(self, tokens, pasts=None):
        x = self.tokens(tokens)
        pasts = list(pasts) if pasts is not None else [None] * len(self.layers)
        for i, layer in enumerate(self.layers):
            x, pasts[i] = layer(x, pasts[i])
        return self.head(self.norm(x)), pasts


def stream(model, chunks):
    outputs, pasts = [], None
    for chunk in chunks:
        y, pasts = model(chunk, pasts)
        outputs.append(y)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="state-space and window hybrid",
    build=Hybrid,
    forward=lambda model, tokens: model(tokens)[0],
    cache=stream,
    declares={"causal": True, "positions": "other", "norm": "layer", "norm_placement": "pre", "activation": "gelu", "structure": "other"},
)
