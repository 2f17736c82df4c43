"""Cross-attention with heads folded into the batch, as old fairseq and many papers' code have it."""

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "The memory's padding mask is repeated head by head while scores are ordered sample by sample: samples swap masks."
CAUSE = (
    "In a batch heads get the padding mask of other samples: the mask is tiled (repeat) along the folded batch*heads axis "
    "where each sample's must be repeated for its heads (repeat_interleave)."
)


def make(spread):
    class CrossAttention(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.h = c.num_heads
            self.to_q = nn.Linear(c.d_model, c.d_model, bias=False)
            self.to_k = nn.Linear(c.d_model, c.d_model, bias=False)
            self.to_v = nn.Linear(c.d_model, c.d_model, bias=False)
            self.to_out = nn.Linear(c.d_model, c.d_model)

        def fold(self, t):
            b, n, d = t.shape
            return t.reshape(b, n, self.h, d // self.h).permute(0, 2, 1, 3).reshape(b * self.h, n, d // self.h)

        def forward(self, x, context, mask=None):
            b, n, d = x.shape
            q, k, v = self.fold(self.to_q(x)), self.fold(self.to_k(context)), self.fold(self.to_v(context))
            sim = torch.einsum("b i d, b j d -> b i j", q, k) * q.shape[-1] ** -0.5
            if mask is not None:
                sim = sim.masked_fill(~spread(mask, self.h)[:, None, :], -torch.finfo(sim.dtype).max)
            out = torch.einsum("b i j, b j d -> b i d", sim.softmax(dim=-1), v)
            return self.to_out(out.reshape(b, self.h, n, -1).permute(0, 2, 1, 3).reshape(b, n, d))

    return CrossAttention


def subject(spread):
    return Subject(
        kind="cross_attention",
        name="cross-attention",
        build=make(spread),
        forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    )


right = subject(lambda mask, h: mask.repeat_interleave(h, dim=0))
wrong = subject(lambda mask, h: mask.repeat(h, 1))
