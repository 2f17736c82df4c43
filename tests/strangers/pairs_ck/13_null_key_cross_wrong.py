"""Cross-attention with a learned null key of value zero (for classifier-free guidance), in front of the memory."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class NullCrossAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(dim, 2 * dim, bias=False)
        self.null = nn.Parameter(torch.randn(heads, dim // heads))
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, context, mask=None):
        b = x.shape[0]
        q = self.to_q(self.norm(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in self.to_kv(context).chunk(2, dim=-1))
        k = torch.cat([self.null[None, :, None].expand(b, -1, -1, -1), k], dim=2)
        v = F.pad(v, (0, 0, 1, 0))
        sim = torch.einsum("bhid,bhjd->bhij", q, k) / q.shape[-1] ** 0.5
        if mask is not None:
            mask = F.pad(mask, (0, 1), value=True)
            sim = sim.masked_fill(~mask[:, None, None], -torch.finfo(sim.dtype).max)
        return self.to_out((sim.softmax(-1) @ v).transpose(1, 2).flatten(2))


subject = Subject(
    kind="cross_attention",
    build=lambda c: NullCrossAttention(c.d_model, c.num_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    declares={"sink": True},
)

WHAT = 'Line 27: the mask is padded behind, while the null key stands in front: every entry of it hides the key before the one that it means, the last key is always seen and the null key goes with the first.'
