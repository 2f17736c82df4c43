"""Attention with "softmax off by one" (exp(x) / (1 + sum exp(x))), computed sample by sample with baddbmm.

Unusual: a row of weights sums to less than one, by design: a head may attend to nothing. The 1 is exp(0 - max) after the
shift by max(0, largest score). The loop over samples keeps the memory of one sample at a time; the queries of a group stand
below one another in one product with their key head.
"""

import torch
from torch import nn

from veriformer.properties import Subject


def softmax_one(x):
    top = x.detach().amax(dim=-1, keepdim=True).clamp(min=0)
    e = torch.exp(x - top)
    return e / (torch.exp(-top) + e.sum(dim=-1, keepdim=True))


class QuietAttention(nn.Module):
    def one(self, q, k, v, bias):  # q [h, t, d], k [g, s, d], v [g, s, e], bias [t, s] or None
        h, t, d = q.shape
        g, s, _ = k.shape
        stacked = (q * d**-0.5).reshape(g, h // g * t, d)
        if bias is None:
            scores = torch.bmm(stacked, k.transpose(1, 2))
        else:
            tall = bias.to(q.dtype).repeat(h // g, 1).expand(g, -1, -1)
            scores = torch.baddbmm(tall, stacked, k.transpose(1, 2))
        weights = softmax_one(scores)
        return torch.bmm(weights.to(v.dtype), v).reshape(h, t, v.size(-1)), weights.reshape(h, t, s)

    def forward(self, q, k, v, attention_mask=None, causal=False):
        t, s = q.size(2), k.size(2)
        outs, maps = [], []
        for n in range(q.size(0)):
            bias = None
            if causal:
                rows = torch.arange(t, device=q.device).unsqueeze(1)
                late = torch.arange(s, device=q.device).unsqueeze(0) > rows
                bias = torch.zeros(t, s, dtype=q.dtype, device=q.device).masked_fill(late, float("-inf"))
            if attention_mask is not None:
                mine = attention_mask if attention_mask.dim() == 2 else attention_mask[n]
                if bias is None:
                    bias = torch.zeros(t, s, dtype=q.dtype, device=q.device)
                bias = bias.masked_fill(~mine, float("-inf"))
            out, weights = self.one(q[n], k[n], v[n], bias)
            outs.append(out)
            maps.append(weights)
        return torch.stack(outs), torch.stack(maps)


COMMON = dict(
    kind="attention",
    build=lambda c: QuietAttention(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal)[0],
    weights=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal)[1],
    mask_forms=("pairwise",),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "sink": True,
        "empty_row": "zeros",
        "causal_alignment": "top-left",
        "attention_scale": "1/sqrt(d_head)",
        "grouped_queries": True,
    },
)
