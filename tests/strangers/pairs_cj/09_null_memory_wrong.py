"""Cross-attention to a text encoder with a learned null key and value, as image generators use for free guidance."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class CrossAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(dim, 2 * dim, bias=False)
        self.null_kv = nn.Parameter(torch.randn(2, dim // heads))
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, context, mask=None):
        b, n, d = x.shape
        split = lambda t: t.reshape(b, t.shape[1], self.heads, -1).transpose(1, 2)
        q = split(self.to_q(self.norm(x)))
        k, v = map(split, self.to_kv(context).chunk(2, dim=-1))
        nk, nv = (t.expand(b, self.heads, 1, -1) for t in self.null_kv.unbind(0))
        k, v = torch.cat((nk, k), dim=-2), torch.cat((nv, v), dim=-2)
        sim = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if mask is not None:
            mask = F.pad(mask.bool(), (0, 1), value=True)  # the null key is always there
            sim = sim.masked_fill(~mask[:, None, None, :], -torch.inf)
        out = sim.softmax(dim=-1) @ v
        return self.to_out(out.transpose(1, 2).reshape(b, n, d))


subject = Subject(
    kind="cross_attention",
    build=lambda c: CrossAttention(c.d_model, c.num_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    declares={"positions": "none"},
)

WHAT = 'The null key stands first, but the mask is padded at its end: it is shifted by one key, so the last memory position is always visible and each mask entry acts on the key before its own (line 28).'
