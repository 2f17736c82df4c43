"""Self-attention with Shaw's relative positions: learned vectors for distances clipped at 5, added to keys and to values.

Unusual: positions reach the output by two ways, through the scores and through the mixed values. Written out in the
tensor2tensor manner, with distances gathered as [T, T, d]. Separate projections without biases.
"""

import torch
from torch import nn
import torch.nn.functional as F

from veriformer.properties import Subject

CLIP = 5


class RelativeSelfAttention(nn.Module):
    def __init__(self, d_model, num_heads, dropout):
        super().__init__()
        self.num_heads = num_heads
        self.depth = d_model // num_heads
        self.linear_q = nn.Linear(d_model, d_model, bias=False)
        self.linear_k = nn.Linear(d_model, d_model, bias=False)
        self.linear_v = nn.Linear(d_model, d_model, bias=False)
        self.linear_o = nn.Linear(d_model, d_model, bias=False)
        self.relative_keys = nn.Parameter(torch.randn(2 * CLIP + 1, self.depth) * 0.1)
        self.relative_values = nn.Parameter(torch.randn(2 * CLIP + 1, self.depth) * 0.1)
        self.dropout = dropout

    def split_heads(self, x):
        return x.reshape(x.shape[0], x.shape[1], self.num_heads, self.depth).permute(0, 2, 1, 3)

    @staticmethod
    def distances(length, device):
        range_vec = torch.arange(length, device=device)
        return (range_vec[None, :] - range_vec[:, None]).clamp_(-CLIP, CLIP) + CLIP

    def attend(self, x, attention_mask=None):
        q, k = self.split_heads(self.linear_q(x)), self.split_heads(self.linear_k(x))
        keys = self.relative_keys[self.distances(x.shape[1], x.device)]  # [t, s, d]
        logits = torch.einsum("bhtd,bhsd->bhts", q, k) + torch.einsum("bhtd,tsd->bhts", q, keys)
        logits = logits / self.depth**0.5
        if attention_mask is None:
            return F.softmax(logits, dim=-1)
        hidden = ~attention_mask[:, None, None, :]
        logits = logits.masked_fill(hidden, torch.finfo(logits.dtype).min)
        return F.softmax(logits, dim=-1).masked_fill(hidden, 0)

    def forward(self, x, attention_mask=None):
        weights = F.dropout(self.attend(x, attention_mask), self.dropout, self.training)
        values = self.relative_values[self.distances(x.shape[1], x.device)]
        out = torch.einsum("bhts,bhsd->bhtd", weights, self.split_heads(self.linear_v(x)))
        out = out + torch.einsum("bhts,tsd->bhtd", weights, values)
        return self.linear_o(out.permute(0, 2, 1, 3).flatten(2))


COMMON = dict(
    kind="self_attention",
    build=lambda c: RelativeSelfAttention(c.d_model, c.num_heads, c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    weights=lambda m, x, attention_mask=None: m.attend(x, attention_mask),
    projections=lambda m: {
        "q": m.linear_q.weight,
        "k": m.linear_k.weight,
        "v": m.linear_v.weight,
        "o": m.linear_o.weight,
    },
    mask_forms=("padding",),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "causal": False,
        "positions": "relative",
        "bidirectional": True,
        "padding_side": "both",
        "bias": False,
        "empty_row": "zeros",
    },
)
