"""RetNet (Sun et al. 2023): retention in place of attention, parallel over a chunk and recurrent between chunks."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def rotate(x, start, base=10000.0):
    """Neighbouring channels of x [B, H, T, K] turn with the position."""
    T, K = x.shape[-2:]
    theta = base ** (-torch.arange(0, K, 2, device=x.device, dtype=torch.float64) / K)
    angle = torch.arange(start, start + T, device=x.device, dtype=torch.float64)[:, None] * theta
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


class MultiScaleRetention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        if (dim // heads) % 2:
            raise ValueError("rotary heads have an even width")
        self.heads, self.head_dim = heads, dim // heads
        self.w_q, self.w_k, self.w_v, self.w_g, self.w_o = (nn.Linear(dim, dim, bias=False) for _ in range(5))
        self.group_norm_weight = nn.Parameter(torch.ones(dim))
        self.group_norm_bias = nn.Parameter(torch.zeros(dim))

    def gamma(self, like):
        heads = torch.arange(self.heads, device=like.device, dtype=torch.float64)
        return (1 - 2.0 ** (-5 - heads)).to(like.dtype)

    def forward(self, x, state=None, start=0):
        """Retain over a chunk x [B, T, D] that begins at position `start`, behind what `state` [B, H, K, V] keeps."""
        B, T, D = x.shape
        q, k, v = (f(x).view(B, T, self.heads, -1).transpose(1, 2) for f in (self.w_q, self.w_k, self.w_v))
        q, k = rotate(q, start), rotate(k * self.head_dim**-0.5, start)
        gamma = self.gamma(x)[:, None]
        n = torch.arange(T, device=x.device)
        lag = n[:, None] - n[None, :]
        decay = (gamma[:, None] ** lag.clamp(min=0)) * (lag >= 0)  # [H, T, T]
        out = (q @ k.transpose(-1, -2) * decay) @ v
        fresh = (k * (gamma ** (T - 1 - n))[..., None]).transpose(-1, -2) @ v
        if state is not None:
            out = out + (q * (gamma ** (n + 1))[..., None]) @ state
            fresh = fresh + (gamma**T)[..., None] * state
        out = F.layer_norm(out, (self.head_dim,)).transpose(1, 2).reshape(B, T, D)
        out = out * self.group_norm_weight + self.group_norm_bias
        return self.w_o(F.silu(self.w_g(x)) * out), fresh


class RetNetLayer(nn.Module):
    def __init__(self, dim, heads, ffn):
        super().__init__()
        self.retention = MultiScaleRetention(dim, heads)
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, ffn), nn.Linear(ffn, dim)

    def forward(self, x, state=None, start=0):
        retained, state = self.retention(self.norm_1(x), state, start)
        x = x + retained
        return x + self.fc2(F.gelu(self.fc1(self.norm_2(x)))), state


class RetNet(nn.Module):
    def __init__(self, vocab_size, dim, heads, layers, ffn):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList([RetNetLayer(dim, heads, ffn) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens, states=None, start=0):
        x = self.embedding(tokens)
        kept = []
        for i, layer in enumerate(self.layers):
            x, state = layer(x, None if states is None else states[i], start)
            kept.append(state)
        return self.head(self.norm(x)), kept


def chunkwise(model, chunks):
    states, start, outputs = None, 0, []
    for chunk in chunks:
        logits, states = model(chunk, states, start)
        start += chunk.shape[1]
        outputs.append(logits)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="RetNet",
    build=lambda c: RetNet(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens)[0],
    cache=chunkwise,
    declares={
        "positions": "other",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "tied": False,
        "output_bias": False,
    },
)
