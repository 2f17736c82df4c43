"""StreamingLLM self-attention in Megatron's layout: one matrix, the channels of a head lie together as q, k, v ([H, 3, d]).

Unusual: a query sees the last five tokens and, besides, the first two real ones ("sink tokens"), counted by the mask, so padding
may stand on the left as well. The scale is divided evenly, each of q and k is multiplied by d^(-1/4) before the product, which
is the same 1/sqrt(d) with smaller intermediate numbers. Weights are returned on request.
"""

import torch
from torch import nn

from veriformer.properties import Subject

WINDOW = 5
SINK_TOKENS = 2


class ParallelSelfAttention(nn.Module):
    def __init__(self, hidden_size, num_attention_heads, attention_dropout):
        super().__init__()
        self.np = num_attention_heads
        self.hn = hidden_size // num_attention_heads
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.attention_dropout = nn.Dropout(attention_dropout)
        self.coeff = self.hn**-0.25

    @staticmethod
    def hidden_pairs(pad):  # [b, s] -> [b, 1, s, s], True where a key is out of a query's sight
        real = ~pad
        place = torch.arange(pad.size(1), device=pad.device)
        back = place[:, None] - place[None, :]
        sink = real & (real.long().cumsum(dim=1) <= SINK_TOKENS)
        near = (back < WINDOW) | sink[:, None, :]
        return ~((back >= 0) & near & real[:, None, :]).unsqueeze(1)

    def forward(self, hidden_states, pad=None, return_weights=False):
        b, s, h = hidden_states.shape
        mixed = self.query_key_value(hidden_states).reshape(b, s, self.np, 3 * self.hn)
        q, k, v = torch.tensor_split(mixed.transpose(1, 2), 3, dim=3)
        scores = torch.matmul(q * self.coeff, (k * self.coeff).transpose(2, 3))
        if pad is None:
            pad = torch.zeros(b, s, dtype=torch.bool, device=scores.device)
        hidden = self.hidden_pairs(pad)
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        probs = scores.softmax(-1).masked_fill(hidden, 0.0)
        if return_weights:
            return probs
        context = torch.matmul(self.attention_dropout(probs), v)
        return self.dense(context.transpose(1, 2).reshape(b, s, h))


def forward(m, x, attention_mask=None):
    return m(x, None if attention_mask is None else ~attention_mask)


def weights(m, x, attention_mask=None):
    return m(x, None if attention_mask is None else ~attention_mask, return_weights=True)


COMMON = dict(
    kind="self_attention",
    build=lambda c: ParallelSelfAttention(c.d_model, c.num_heads, c.dropout),
    forward=forward,
    weights=weights,
    mask_forms=("padding",),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "causal": True,
        "window": WINDOW,
        "sink_tokens": SINK_TOKENS,
        "positions": "none",
        "padding_side": "both",
        "bias": True,
        "empty_row": "zeros",
    },
)
