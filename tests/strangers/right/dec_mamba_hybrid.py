"""Hybrid decoder (Hymba, Jamba): each layer runs a selective state space mixer and attention without positions side by side.

Unusual: order enters through the state space half alone (a causal convolution and a scan), so attention has no positions.
The scan is a loop over time. Padding neither enters the convolution nor moves the state (its step size is zero), hence a
row that is padded on the left gives what it gives without padding.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

STATE = 4
CONV = 3


class SelectiveSSM(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.d_inner = d_model
        self.dt_rank = math.ceil(d_model / 8)
        self.in_proj = nn.Linear(d_model, 2 * self.d_inner, bias=False)
        self.conv1d = nn.Conv1d(self.d_inner, self.d_inner, CONV, groups=self.d_inner, padding=CONV - 1)
        self.x_proj = nn.Linear(self.d_inner, self.dt_rank + 2 * STATE, bias=False)
        self.dt_proj = nn.Linear(self.dt_rank, self.d_inner)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, STATE + 1, dtype=torch.float32).repeat(self.d_inner, 1)))
        self.D = nn.Parameter(torch.ones(self.d_inner))
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=False)

    def forward(self, h, real):
        length = h.size(1)
        x, z = self.in_proj(h).chunk(2, dim=-1)
        x = x * real  # a padded place looks like the zeros in front of the sequence
        x = self.conv1d(x.transpose(1, 2))[..., :length].transpose(1, 2)
        x = F.silu(x)
        delta, b_in, c_out = self.x_proj(x).split([self.dt_rank, STATE, STATE], dim=-1)
        delta = F.softplus(self.dt_proj(delta)) * real
        a = -torch.exp(self.A_log)
        decay = torch.exp(delta.unsqueeze(-1) * a)  # [B, T, D, N]
        drive = (delta * x).unsqueeze(-1) * b_in.unsqueeze(2)
        state = torch.zeros_like(drive[:, 0])
        ys = []
        for decay_t, drive_t, c_t in zip(decay.unbind(1), drive.unbind(1), c_out.unbind(1)):
            state = torch.addcmul(drive_t, decay_t, state)
            ys.append((state * c_t.unsqueeze(1)).sum(-1))
        y = torch.stack(ys, dim=1) + self.D * x
        return self.out_proj(y * F.silu(z))


class NoPEAttention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, h, blocked):
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.qkv(h).chunk(3, -1))
        score = torch.einsum("bhid,bhjd->bhij", q, k).div(math.sqrt(q.size(-1)))
        score = score.masked_fill(blocked, torch.finfo(score.dtype).min)
        weight = score.softmax(-1).masked_fill(blocked, 0.0)
        return self.out(torch.einsum("bhij,bhjd->bihd", weight, v).flatten(2))


class HybridLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm1 = nn.RMSNorm(c.d_model, eps=1e-5)
        self.ssm = SelectiveSSM(c.d_model)
        self.attn = NoPEAttention(c.d_model, c.num_heads)
        self.ssm_norm = nn.RMSNorm(c.d_model, eps=1e-5)
        self.attn_norm = nn.RMSNorm(c.d_model, eps=1e-5)
        self.norm2 = nn.RMSNorm(c.d_model, eps=1e-5)
        self.up = nn.Linear(c.d_model, c.d_ff, bias=False)
        self.down = nn.Linear(c.d_ff, c.d_model, bias=False)
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x, real, blocked):
        h = self.norm1(x)
        mixed = 0.5 * (self.ssm_norm(self.ssm(h, real)) + self.attn_norm(self.attn(h, blocked)))
        x = x + self.drop(mixed)
        return x + self.drop(self.down(F.relu(self.up(self.norm2(x))).square()))


class HybridLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(HybridLayer(c) for _ in range(c.num_layers))
        self.norm_f = nn.RMSNorm(c.d_model, eps=1e-5)

    def forward(self, ids, attention_mask=None):
        if attention_mask is None:
            attention_mask = ids.new_ones(ids.shape, dtype=torch.bool)
        t = ids.size(1)
        blocked = torch.ones(t, t, device=ids.device).triu(1).bool() | ~attention_mask[:, None, None, :]
        x = self.embedding(ids)
        real = attention_mask[..., None].to(x.dtype)
        for layer in self.layers:
            x = layer(x, real, blocked)
        return self.norm_f(x) @ self.embedding.weight.T


COMMON = dict(
    kind="decoder",
    build=HybridLM,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    mask_forms=("padding",),
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
        "activation": "other",
        "output_bias": False,
        "tied": True,
        "structure": "other",
    },
)
