"""Cross-attention of a vision-language adapter: tanh gate, a zero key and value to attend to nothing, padded memories."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class GatedCross(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.kv = nn.Linear(dim, dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.gate = nn.Parameter(torch.tensor(0.7))

    def forward(self, x, memory, memory_mask=None):
        B, T, D = x.shape
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(memory).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        k, v = F.pad(k, (0, 0, 1, 0)), F.pad(v, (0, 0, 1, 0))  # key 0 is nothing
        if memory_mask is not None:
            memory_mask = F.pad(memory_mask, (1, 0), value=True)[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=memory_mask)
        return self.gate.tanh() * self.o(y.transpose(1, 2).reshape(B, T, D))


subject = Subject(
    kind="cross_attention",
    name="gated cross",
    build=lambda c: GatedCross(c.d_model, c.num_heads),
    forward=lambda model, x, memory, memory_mask=None: model(x, memory, memory_mask),
    declares={"sink": True, "bias": False},
)
