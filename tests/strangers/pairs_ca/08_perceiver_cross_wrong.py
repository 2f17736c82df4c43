WHAT = "Heads are folded into the batch as (b h), but the memory mask is tiled as (h b) (`memory_mask.repeat(h, 1)` for repeat_interleave): with several samples heads get another sample's mask."
import torch
from torch import nn

from veriformer.properties import Subject


class PerceiverCrossAttention(nn.Module):
    """Latents attend to a byte array; heads folded into the batch for bmm."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.dim_head = heads, dim // heads
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(dim, dim * 2, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def fold(self, t):
        b, n, _ = t.shape
        return t.reshape(b, n, self.heads, self.dim_head).transpose(1, 2).reshape(b * self.heads, n, self.dim_head)

    def forward(self, latents, context, context_mask=None):
        b, n, d = latents.shape
        h = self.heads
        k, v = self.to_kv(context).chunk(2, dim=-1)
        q, k, v = map(self.fold, (self.to_q(latents), k, v))
        sim = torch.bmm(q, k.transpose(1, 2)).mul_(self.dim_head**-0.5)
        if context_mask is not None:
            keep = context_mask.repeat(h, 1)
            sim = sim.masked_fill(~keep[:, None, :], -torch.finfo(sim.dtype).max)
        out = torch.bmm(sim.softmax(dim=-1), v)
        return self.to_out(out.reshape(b, h, n, self.dim_head).transpose(1, 2).reshape(b, n, d))


subject = Subject(
    kind="cross_attention",
    name="Perceiver cross-attention",
    build=lambda c: PerceiverCrossAttention(c.d_model, c.num_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    declares={"positions": "none", "causal": False},
)
