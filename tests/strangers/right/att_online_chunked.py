"""Memory-efficient attention (Rabe & Staats): keys in chunks of 4 with a running maximum and a running sum.

Unusual: no matrix of scores for all keys ever exists, so the largest intermediate tensor grows linearly with the length. The
causal mask is aligned at the bottom right, as with a key-value cache. A query without any key gives zeros.
"""

import torch
from torch import nn

from veriformer.properties import Subject

CHUNK = 4


class MemoryEfficientAttention(nn.Module):
    def forward(self, q, k, v, attention_mask=None, causal=False):
        b, h, t, d = q.shape
        s = k.size(2)
        repeat = h // k.size(1)
        rows = torch.arange(t, device=q.device)[:, None] + (s - t)
        q = q * d**-0.5
        peak = q.new_full((b, h, t, 1), float("-inf"))
        total = q.new_zeros((b, h, t, 1))
        mixed = q.new_zeros((b, h, t, v.size(-1)))
        for start in range(0, s, CHUNK):
            stop = min(start + CHUNK, s)
            keys = k[:, :, start:stop].repeat_interleave(repeat, dim=1)
            values = v[:, :, start:stop].repeat_interleave(repeat, dim=1)
            scores = torch.einsum("bhtd,bhsd->bhts", q, keys).to(q.dtype)
            if causal:
                columns = torch.arange(start, stop, device=q.device)[None, :]
                scores = scores.masked_fill(columns > rows, float("-inf"))
            if attention_mask is not None:
                part = attention_mask[..., start:stop]
                part = part.unsqueeze(1) if part.dim() == 3 else part
                scores = scores.masked_fill(~part, float("-inf"))
            new_peak = torch.maximum(peak, scores.detach().amax(dim=-1, keepdim=True))
            shift = new_peak.masked_fill(new_peak.isneginf(), 0.0)  # nothing seen yet: exp(-inf - 0) = 0
            powers = torch.exp(scores - shift)
            decay = torch.exp(peak - shift)
            total = total * decay + powers.sum(dim=-1, keepdim=True)
            mixed = mixed * decay + torch.einsum("bhts,bhse->bhte", powers, values).to(q.dtype)
            peak = new_peak
        return torch.where(total > 0, mixed / total.masked_fill(total == 0, 1.0), 0.0)


COMMON = dict(
    kind="attention",
    build=lambda c: MemoryEfficientAttention(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "memory": "linear",
        "empty_row": "zeros",
        "causal_alignment": "bottom-right",
        "attention_scale": "1/sqrt(d_head)",
        "grouped_queries": True,
    },
)
