"""Cross-attention as early TensorFlow code had it: heads are split off and concatenated along the batch axis."""

import torch
from torch import nn

from veriformer.properties import Subject


class CrossAttention(nn.Module):
    def __init__(self, num_units, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.Q = nn.Linear(num_units, num_units, bias=False)
        self.K = nn.Linear(num_units, num_units, bias=False)
        self.V = nn.Linear(num_units, num_units, bias=False)
        self.O = nn.Linear(num_units, num_units, bias=False)

    def forward(self, queries, memory, memory_mask=None):
        n = queries.size(0)
        # (h*N, T, C/h)
        Q_ = torch.cat(self.Q(queries).chunk(self.num_heads, dim=2), dim=0)
        K_ = torch.cat(self.K(memory).chunk(self.num_heads, dim=2), dim=0)
        V_ = torch.cat(self.V(memory).chunk(self.num_heads, dim=2), dim=0)
        outputs = torch.bmm(Q_, K_.transpose(1, 2)) / K_.size(-1) ** 0.5
        if memory_mask is not None:
            key_masks = memory_mask.repeat_interleave(self.num_heads, dim=0)  # (h*N, T_k)
            key_masks = key_masks[:, None, :].expand_as(outputs)
            outputs = outputs.masked_fill(~key_masks, torch.finfo(outputs.dtype).min)
            weights = outputs.softmax(-1) * key_masks
        else:
            weights = outputs.softmax(-1)
        outputs = torch.bmm(weights, V_)
        return self.O(torch.cat(outputs.split(n, dim=0), dim=2))


subject = Subject(
    kind="cross_attention",
    build=lambda c: CrossAttention(c.d_model, c.num_heads),
    forward=lambda model, x, memory, memory_mask=None: model(x, memory, memory_mask),
    declares={"bias": False, "attention_scale": "1/sqrt(d_head)"},
)

WHAT = "Line 26: Heads are the outer half of the merged batch axis, but the mask is repeated with samples as the outer half: sample and head are mixed up, and heads see the padding of other samples' masks."
