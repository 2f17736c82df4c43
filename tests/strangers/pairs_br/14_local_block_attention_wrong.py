WHAT = "the zeros that stand in for the block before the first are not masked: the first window - 1 queries give part of their weight to keys that do not exist (line 37)"
"""A layer with sliding-window attention in linear memory: each block of queries looks at its own block and the one before."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

WINDOW = 4


class LocalAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, n, dim = x.shape
        w, h = WINDOW, self.heads
        q, k, v = (t.unflatten(-1, (h, -1)).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))

        pad = -n % w
        q, k, v = (F.pad(t, (0, 0, 0, pad)).unflatten(2, (-1, w)) for t in (q, k, v))  # b h blocks w d
        blocks = q.shape[2]

        def look_back(t):
            before = F.pad(t, (0, 0, 0, 0, 1, 0))[:, :, :-1]
            return torch.cat((before, t), dim=3)

        k, v = look_back(k), look_back(v)  # b h blocks 2w d

        q_pos = torch.arange(blocks * w, device=x.device).view(blocks, w)
        k_pos = (torch.arange(blocks, device=x.device) * w)[:, None] + torch.arange(-w, w, device=x.device)
        distance = q_pos[:, :, None] - k_pos[:, None, :]
        visible = (distance >= 0) & (distance < w)

        sim = torch.einsum("bhgid,bhgjd->bhgij", q, k) * (dim // h) ** -0.5
        attn = sim.masked_fill(~visible, torch.finfo(sim.dtype).min).softmax(dim=-1)
        out = torch.einsum("bhgij,bhgjd->bhgid", attn, v).flatten(2, 3)[:, :, :n]
        return self.to_out(out.transpose(1, 2).flatten(2))


class LocalLayer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.norm_attn, self.attn = nn.LayerNorm(dim), LocalAttention(dim, heads)
        self.norm_ff = nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x):
        x = x + self.attn(self.norm_attn(x))
        return x + self.ff(self.norm_ff(x))


subject = Subject(
    kind="layer",
    name="local layer",
    build=lambda c: LocalLayer(c.d_model, c.num_heads, c.d_ff),
    forward=lambda m, x: m(x),
    declares={
        "causal": True,
        "window": WINDOW,
        "positions": "none",
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "gelu",
        "memory": "linear",
    },
)
