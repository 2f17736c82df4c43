WHAT = "The null slot stands before the memory but its True is put behind the mask, so that the mask is off by one: the last padding is seen and the first token decides about the null slot (line 37)."

"""Cross-attention to a memory that may say nothing: a learned null slot stands before the memory and is always seen."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class NullCrossAttention(nn.Module):
    """The null slot has a key and a value for every head, shared by all samples."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_k = nn.Linear(width, width, bias=False)
        self.to_v = nn.Linear(width, width, bias=False)
        self.to_out = nn.Linear(width, width)
        self.null_k = nn.Parameter(torch.randn(heads, 1, self.head_width))
        self.null_v = nn.Parameter(torch.randn(heads, 1, self.head_width))

    def split(self, x):
        return x.unflatten(-1, (self.heads, self.head_width)).transpose(1, 2)

    def with_null(self, null, x):
        return torch.cat([null.expand(x.shape[0], -1, -1, -1), x], dim=2)

    def forward(self, x, memory, memory_mask=None):
        q = self.split(self.to_q(x))
        k = self.with_null(self.null_k, self.split(self.to_k(memory)))
        v = self.with_null(self.null_v, self.split(self.to_v(memory)))
        allowed = None
        if memory_mask is not None:
            allowed = F.pad(memory_mask, (0, 1), value=True)[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.to_out(y.transpose(1, 2).flatten(2))


def forward(model, x, memory, memory_mask=None):
    return model(x, memory, memory_mask)


subject = Subject(
    kind="cross_attention",
    name="cross-attention with a null slot",
    build=lambda c: NullCrossAttention(c.d_model, c.num_heads),
    forward=forward,
    declares={"structure": "other"},
)
