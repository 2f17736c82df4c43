WHAT = "the null key is put before the memory but the mask is padded for it behind, so each memory position has the mask of its right neighbour and the null key that of the first one (line 28: mask = F.pad(mask.bool(), (0, 1), value=True))"
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class CrossAttention(nn.Module):
    """Cross-attention with a learned null key of value zero: a query may look at nothing."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(dim, 2 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)
        self.null_k = nn.Parameter(torch.randn(heads, 1, dim // heads))

    def forward(self, x, context, mask=None):
        b, h = x.shape[0], self.heads
        q, k, v = self.to_q(x), *self.to_kv(context).chunk(2, dim=-1)
        q, k, v = (z.unflatten(-1, (h, -1)).transpose(1, 2) for z in (q, k, v))
        k = torch.cat((self.null_k.expand(b, -1, -1, -1), k), dim=-2)
        v = F.pad(v, (0, 0, 1, 0))
        sim = torch.einsum("bhid,bhjd->bhij", q * self.scale, k)
        if mask is not None:
            mask = F.pad(mask.bool(), (0, 1), value=True)
            sim = sim.masked_fill(~mask[:, None, None, :], -torch.finfo(sim.dtype).max)
        attn = sim.softmax(dim=-1)
        out = torch.einsum("bhij,bhjd->bhid", attn, v)
        return self.to_out(out.transpose(1, 2).flatten(2))


subject = Subject(
    kind="cross_attention",
    build=lambda c: CrossAttention(c.d_model, c.num_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    declares={"sink": True, "bias": False, "empty_row": "zeros", "positions": "none"},
)
