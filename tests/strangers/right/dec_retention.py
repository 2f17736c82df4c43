"""RetNet style decoder: retention (decay instead of softmax), a norm per head and a gate; `cache` runs the recurrent form.

Unusual: no softmax anywhere. Weights are q.k * gamma^(t - s), so they do not sum to one and may be negative; the norm per
head behind them sets the size. `forward` is the parallel form, `cache` the recurrent one: the same sums in another order.
Padding writes nothing into the state (its keys are zero); the decay counts real tokens, so padding may stand anywhere.
"""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def swish(x):
    return x * torch.sigmoid(x)


def theta_shift(x, sin, cos):
    rotated = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos + rotated * sin


class MultiScaleRetention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.key_dim = heads, dim // heads
        self.scaling = self.key_dim**-0.5
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.g_proj = nn.Linear(dim, dim, bias=False)
        self.out_proj = nn.Linear(dim, dim, bias=False)
        # 1 - 2^-(2 + h): fast and slow heads
        self.decay = [1.0 - 2.0 ** -(2 + h) for h in range(heads)]

    def split(self, x):
        return x.unflatten(-1, (self.heads, self.key_dim)).transpose(1, 2)

    def inputs(self, x, real, places):
        freq = 10000.0 ** -torch.linspace(0, 1, self.key_dim // 2, dtype=torch.float64, device=x.device)
        angle = (places.to(torch.float64)[..., None] * freq).repeat_interleave(2, -1)[:, None]  # [B, 1, T, d]
        sin, cos = angle.sin().to(x.dtype), angle.cos().to(x.dtype)
        q = theta_shift(self.split(self.q_proj(x)), sin, cos)
        k = theta_shift(self.split(self.k_proj(x)) * self.scaling, sin, cos)
        k = k * real[:, None, :, None]
        return q, k, self.split(self.v_proj(x))

    def finish(self, retained, x):
        normed = F.layer_norm(retained, (self.key_dim,)).transpose(1, 2).flatten(2)
        return self.out_proj(swish(self.g_proj(x)) * normed)

    def gamma(self, x):
        return torch.tensor(self.decay, dtype=torch.float64, device=x.device)

    def forward(self, x, real, places):
        q, k, v = self.inputs(x, real, places)
        t = x.size(1)
        tril = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        steps = (places[:, :, None] - places[:, None, :]).clamp(min=0)  # [B, T, S]
        decay = self.gamma(x)[None, :, None, None] ** steps[:, None].to(torch.float64)
        decay = (decay * tril).to(x.dtype)
        return self.finish(((q @ k.mT) * decay) @ v, x)

    def recur(self, x, real, places, state):
        q, k, v = self.inputs(x, real, places)
        gamma = self.gamma(x).to(x.dtype)[None, :, None, None]
        rows = []
        for t in range(x.size(1)):
            keep = torch.where(real[:, t, None, None, None], gamma, torch.ones_like(gamma))
            state = keep * state + k[:, :, t, :, None] * v[:, :, t, None, :]
            rows.append((q[:, :, t, None, :] @ state).squeeze(2))
        return self.finish(torch.stack(rows, dim=2), x), state


class RetNetBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.retention_norm = nn.RMSNorm(c.d_model, eps=1e-6)
        self.retention = MultiScaleRetention(c.d_model, c.num_heads)
        self.ffn_norm = nn.RMSNorm(c.d_model, eps=1e-6)
        self.gate = nn.Linear(c.d_model, c.d_ff, bias=False)
        self.fc1 = nn.Linear(c.d_model, c.d_ff, bias=False)
        self.fc2 = nn.Linear(c.d_ff, c.d_model, bias=False)
        self.dropout = nn.Dropout(c.dropout)

    def ffn(self, x):
        return self.dropout(self.fc2(swish(self.gate(x)) * self.fc1(x)))


class RetNet(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList([RetNetBlock(c) for _ in range(c.num_layers)])
        self.norm = nn.RMSNorm(c.d_model, eps=1e-6)
        self.output = nn.Linear(c.d_model, c.vocab_size, bias=False)

    @staticmethod
    def places(real):
        return real.long().cumsum(-1) - 1

    def forward(self, tokens, attention_mask=None):
        real = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask
        places = self.places(real)
        x = self.embed_tokens(tokens)
        for block in self.blocks:
            x = x + block.dropout(block.retention(block.retention_norm(x), real, places))
            x = x + block.ffn(block.ffn_norm(x))
        return self.output(self.norm(x))


def cache(model, chunks, attention_mask=None):
    total = sum(chunk.size(1) for chunk in chunks)
    batch = chunks[0].size(0)
    real = attention_mask
    if real is None:
        real = torch.ones(batch, total, dtype=torch.bool, device=chunks[0].device)
    places = model.places(real)
    states, start, outputs = [0.0] * len(model.blocks), 0, []
    for chunk in chunks:
        here = slice(start, start + chunk.size(1))
        start = here.stop
        x = model.embed_tokens(chunk)
        for i, block in enumerate(model.blocks):
            y, states[i] = block.retention.recur(block.retention_norm(x), real[:, here], places[:, here], states[i])
            x = x + block.dropout(y)
            x = x + block.ffn(block.ffn_norm(x))
        outputs.append(model.output(model.norm(x)))
    return torch.cat(outputs, dim=1)


COMMON = dict(
    kind="decoder",
    build=RetNet,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    cache=cache,
    mask_forms=("padding",),
    domain={"d_model": [16, 24, 32], "num_heads": [1, 2, 4]},
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "causal": True,
        "positions": "other",
        "padding_side": "both",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "output_bias": False,
        "tied": False,
        "structure": "other",
    },
)
