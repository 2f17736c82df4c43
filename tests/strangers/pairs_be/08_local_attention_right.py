"""Causal attention to the last WINDOW tokens, by buckets: each bucket looks at itself and the one before."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

WINDOW = 4


def exists(val):
    return val is not None


def look_back(t, dim):
    """Each bucket with the one before it; the first gets the last one, which nobody there may see."""
    return torch.cat((t.roll(1, dims=dim), t), dim=dim + 1)


class LocalSelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, mask=None):
        b, n, dim = x.shape
        h, w = self.heads, WINDOW
        q, k, v = (t.view(b, n, h, -1).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))

        pad = -n % w
        q, k, v = (F.pad(t, (0, 0, 0, pad)) for t in (q, k, v))
        buckets = (n + pad) // w
        q, k, v = (t.reshape(b, h, buckets, w, -1) for t in (q, k, v))
        k, v = look_back(k, 2), look_back(v, 2)

        q_pos = torch.arange(buckets * w, device=x.device).view(buckets, w, 1)
        k_pos = torch.arange(buckets, device=x.device).view(-1, 1, 1) * w + torch.arange(-w, w, device=x.device)
        dist = q_pos - k_pos
        visible = (dist >= 0) & (dist < w) & (k_pos >= 0)
        visible = visible[None, None]
        if exists(mask):
            mask = F.pad(mask, (0, pad), value=False).view(b, buckets, w)
            visible = visible & look_back(mask, 1)[:, None, :, None, :]

        sim = torch.einsum("bhcid,bhcjd->bhcij", q, k) * self.scale
        attn = sim.masked_fill(~visible, torch.finfo(sim.dtype).min).softmax(dim=-1)
        out = torch.einsum("bhcij,bhcjd->bhcid", attn, v)
        out = out.reshape(b, h, buckets * w, -1)[:, :, :n]
        return self.to_out(out.transpose(1, 2).reshape(b, n, dim))


subject = Subject(
    kind="self_attention",
    name="local attention",
    build=lambda c: LocalSelfAttention(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": True, "window": WINDOW, "positions": "none", "bias": False, "padding_side": "both"},
)
