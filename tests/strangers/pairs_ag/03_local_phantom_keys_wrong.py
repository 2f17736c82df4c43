WHAT = 'In blockwise local attention the block before the first is made of zeros, and its position ids are padded with 0, a real position (line 35: `F.pad(pos, (w, 0), value=0)` instead of a value that no query reaches), so that without a padding mask the first queries attend to w phantom zero keys.'
"""Sliding-window attention in blocks: each block of queries looks at its own block and the one before (local-attention style)."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

WINDOW = 4


class LocalAttention(nn.Module):
    def __init__(self, dim, heads, window_size):
        super().__init__()
        self.heads, self.window_size = heads, window_size
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def look_back(self, t, value):
        """[..., n * w, d] -> [..., n, 2 w, d]: every block behind the one before it."""
        w = self.window_size
        t = F.pad(t, (0, 0, w, 0), value=value)
        return t.unfold(-2, 2 * w, w).transpose(-1, -2)

    def forward(self, x, mask=None):
        b, n, d = x.shape
        h, w = self.heads, self.window_size
        q, k, v = (t.view(b, n, h, -1).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        extra = -n % w
        q, k, v = (F.pad(t, (0, 0, 0, extra)) for t in (q, k, v))
        blocks = (n + extra) // w

        pos = torch.arange(n + extra, device=x.device)
        bq_pos = pos.view(blocks, w, 1)
        bk_pos = F.pad(pos, (w, 0), value=0).unfold(0, 2 * w, w)[:, None, :]
        distance = bq_pos - bk_pos
        allowed = (distance >= 0) & (distance < w)
        allowed = allowed[None, None]
        if mask is not None:
            keys = F.pad(F.pad(mask, (0, extra), value=False), (w, 0), value=False).unfold(-1, 2 * w, w)
            allowed = allowed & keys[:, None, :, None, :]

        bq = q.view(b, h, blocks, w, -1) * q.shape[-1] ** -0.5
        bk, bv = self.look_back(k, 0.0), self.look_back(v, 0.0)
        sim = torch.einsum("bhnid,bhnjd->bhnij", bq, bk)
        sim = sim.masked_fill(~allowed, -torch.finfo(sim.dtype).max)
        attn = sim.softmax(dim=-1).masked_fill(~allowed, 0.0)
        out = torch.einsum("bhnij,bhnjd->bhnid", attn, bv)
        out = out.reshape(b, h, n + extra, -1)[:, :, :n]
        return self.to_out(out.transpose(1, 2).reshape(b, n, d))


subject = Subject(
    kind="self_attention",
    name="local attention",
    build=lambda c: LocalAttention(c.d_model, c.num_heads, WINDOW),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    mask_forms=("padding",),
    declares={"causal": True, "window": WINDOW, "positions": "none", "bias": False},
)
