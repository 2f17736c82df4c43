WHAT = "the old state is decayed by gamma, not by gamma ** T, when a chunk of T tokens goes over it: right for single steps only (line 50)"
"""RetNet: retention in its parallel form for a whole sequence, chunkwise with a recurrent state for generation."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def theta_shift(x, start):
    length, dim = x.shape[-2:]
    angle = 10000.0 ** (-torch.linspace(0, 1, dim // 2, dtype=torch.float64, device=x.device))
    angle = torch.outer(torch.arange(start, start + length, dtype=torch.float64, device=x.device), angle)
    sin, cos = angle.sin().to(x.dtype), angle.cos().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


class MultiScaleRetention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.key_dim = heads, dim // heads
        self.q_proj, self.k_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.v_proj, self.g_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.out_proj = nn.Linear(dim, dim, bias=False)
        gamma = 1 - 2.0 ** (-2 - torch.arange(heads, dtype=torch.float64))
        self.register_buffer("log_gamma", gamma.log(), persistent=False)

    def decay(self, exponent, like):
        """gamma ** exponent, for every head: [H, ...]."""
        shape = (-1,) + (1,) * exponent.ndim
        return (self.log_gamma.double().view(shape) * exponent.double()).exp().to(like.dtype)

    def forward(self, x, past=None):
        B, T, D = x.shape
        split = lambda t: t.view(B, T, self.heads, self.key_dim).transpose(1, 2)
        start = 0 if past is None else past["seen"]
        q = theta_shift(split(self.q_proj(x)), start)
        k = theta_shift(split(self.k_proj(x)), start) * self.key_dim**-0.5
        v = split(self.v_proj(x))
        steps = torch.arange(T, device=x.device)
        distance = steps[:, None] - steps[None, :]
        inner = self.decay(distance.clamp(min=0), x) * (distance >= 0)
        out = (q @ k.mT * inner) @ v
        if past is not None:
            if past["state"] is not None:
                out = out + (q * self.decay(steps + 1, x)[..., None]) @ past["state"]
            fresh = (k * self.decay(T - 1 - steps, x)[..., None]).mT @ v
            if past["state"] is not None:
                fresh = fresh + past["state"] * self.decay(torch.tensor([[1]], device=x.device), x)
            past["state"], past["seen"] = fresh, start + T
        out = F.rms_norm(out, (self.key_dim,), eps=1e-6).transpose(1, 2).reshape(B, T, D)
        return self.out_proj(F.silu(self.g_proj(x)) * out)


class RetNetLayer(nn.Module):
    def __init__(self, dim, heads, inner):
        super().__init__()
        self.retention_norm, self.ffn_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.retention = MultiScaleRetention(dim, heads)
        self.fc1, self.fc2 = nn.Linear(dim, inner), nn.Linear(inner, dim)

    def forward(self, x, past=None):
        x = x + self.retention(self.retention_norm(x), past)
        return x + self.fc2(F.gelu(self.fc1(self.ffn_norm(x))))


class RetNet(nn.Module):
    def __init__(self, vocab, dim, heads, layers, inner):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(RetNetLayer(dim, heads, inner) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, past=None):
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, None if past is None else past[i])
        return self.head(self.norm(x))


def recurrent(model, chunks):
    past = [{"state": None, "seen": 0} for _ in model.layers]
    return torch.cat([model(chunk, past) for chunk in chunks], dim=1)


subject = Subject(
    kind="decoder",
    name="RetNet",
    build=lambda c: RetNet(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens),
    cache=recurrent,
    domain={"d_model": (16, 32), "num_heads": (2, 4)},
    declares={
        "positions": "other",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "structure": "other",
    },
)
