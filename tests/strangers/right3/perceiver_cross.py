"""Cross-attention with a fused kv projection, zeros where the memory is all padding."""
import torch
from torch import nn
from veriformer.properties import Subject

class Cross(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h = c.num_heads
        self.to_q, self.to_kv = nn.Linear(c.d_model, c.d_model, bias=False), nn.Linear(c.d_model, 2 * c.d_model, bias=False)
        self.to_out = nn.Linear(c.d_model, c.d_model, bias=False)

    def forward(self, x, memory, mask=None):
        q = self.to_q(x).unflatten(-1, (self.h, -1))
        k, v = self.to_kv(memory).unflatten(-1, (2, self.h, -1)).unbind(2)
        sim = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
        if mask is not None:
            sim = sim.masked_fill(~mask[:, None, None], -torch.finfo(sim.dtype).max)
        attn = sim.softmax(-1)
        if mask is not None:
            attn = attn * mask[:, None, None]
        return self.to_out(torch.einsum("bhij,bjhd->bihd", attn, v).flatten(2))

common = dict(kind="cross_attention", build=Cross, forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask))
undeclared = Subject(**common)
declared = Subject(**common, declares={"cross_attention": True, "bias": False, "empty_row": "zeros", "positions": "none"})
