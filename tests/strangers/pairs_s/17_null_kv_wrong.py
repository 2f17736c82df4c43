WHAT = "line 32: the mask is lengthened for the null key at its end while the null key stands in front, so all of the mask is one off: the first memory token takes the second place's bit"
"""Cross-attention to a text with a learned null key and value in front, as in Imagen, for when there is no text."""

import torch
import torch.nn.functional as F
from torch import einsum, nn

from veriformer.properties import Subject


class CrossAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        dim_head = dim // heads
        self.heads, self.scale = heads, dim_head**-0.5
        self.null_kv = nn.Parameter(torch.randn(2, dim_head))
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(dim, dim * 2, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, context, mask=None):
        b, n, _ = x.shape
        q, k, v = self.to_q(x), *self.to_kv(context).chunk(2, dim=-1)
        q, k, v = (t.reshape(b, -1, self.heads, t.shape[-1] // self.heads).transpose(1, 2) for t in (q, k, v))

        nk, nv = (t.expand(b, self.heads, 1, -1) for t in self.null_kv.unbind(dim=0))
        k = torch.cat((nk, k), dim=-2)
        v = torch.cat((nv, v), dim=-2)

        sim = einsum("b h i d, b h j d -> b h i j", q * self.scale, k)
        if mask is not None:
            mask = F.pad(mask, (0, 1), value=True)
            sim = sim.masked_fill(~mask[:, None, None, :], -torch.finfo(sim.dtype).max)

        out = einsum("b h i j, b h j d -> b h i d", sim.softmax(dim=-1), v)
        return self.to_out(out.transpose(1, 2).reshape(b, n, -1))


subject = Subject(
    kind="cross_attention",
    name="cross attention with a null key",
    build=lambda c: CrossAttention(c.d_model, c.num_heads),
    forward=lambda model, x, memory, memory_mask=None: model(x, memory, memory_mask),
    declares={"sink": True, "bias": False},
)
