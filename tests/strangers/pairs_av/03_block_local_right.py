"""Causal sliding-window self-attention in blocks: each block of queries sees its own block and the one before."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WINDOW = 4


class BlockLocalAttention(nn.Module):
    def __init__(self, dim, heads, window):
        super().__init__()
        self.heads, self.window = heads, window
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        b, t, d = x.shape
        h, w = self.heads, self.window
        if mask is None:
            mask = torch.ones(b, t, dtype=torch.bool, device=x.device)
        q, k, v = self.to_qkv(x).view(b, t, 3, h, d // h).permute(2, 0, 3, 1, 4)

        pad = -t % w
        q, k, v = (F.pad(z, (0, 0, 0, pad)) for z in (q, k, v))
        n = (t + pad) // w
        q, k, v = (z.reshape(b, h, n, w, d // h) for z in (q, k, v))
        real = F.pad(mask, (0, pad)).view(b, 1, n, 1, w)

        def look_back(z):
            before = F.pad(z, (0, 0, 0, 0, 1, 0))[:, :, :n]
            return torch.cat((before, z), dim=3)

        k, v = look_back(k), look_back(v)
        real = torch.cat((F.pad(real, (0, 0, 0, 0, 1, 0), value=False)[:, :, :n], real), dim=-1)

        i = torch.arange(w, device=x.device)[:, None] + w
        j = torch.arange(2 * w, device=x.device)
        band = (j <= i) & (j > i - w)
        allowed = band & real

        dots = torch.einsum("bhnid,bhnjd->bhnij", q, k) * (d // h) ** -0.5
        dots = dots.masked_fill(~allowed, torch.finfo(dots.dtype).min)
        attn = dots.softmax(dim=-1).masked_fill(~allowed, 0.0)
        out = torch.einsum("bhnij,bhnjd->bhnid", attn, v).reshape(b, h, n * w, d // h)[:, :, :t]
        return self.to_out(out.transpose(1, 2).reshape(b, t, d))


subject = Subject(
    kind="self_attention",
    name="block local attention",
    build=lambda c: BlockLocalAttention(c.d_model, c.num_heads, WINDOW),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": True, "window": WINDOW, "positions": "none"},
)
