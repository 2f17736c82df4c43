import torch
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'Queries are processed in chunks of 4 and the causal mask is built for a chunk as if it were the last '
    "rows of the sequence (aligned with the chunk's own length), so all chunks but the last see future "
    'keys.'
)
PLACE = 'causal mask of query-chunked attention, row offset of the chunk'


def grow(x, heads):
    return x if x.size(1) == heads else x.repeat_interleave(heads // x.size(1), 1)


class ChunkedAttention(nn.Module):
    """Memory grows with T, not T * T: one chunk of queries at a time."""

    chunk = 4

    def forward(self, q, k, v, attention_mask=None, causal=False):
        k, v = grow(k, q.size(1)), grow(v, q.size(1))
        T, S = q.size(2), k.size(2)
        mask = attention_mask
        if mask is not None:
            mask = mask[None, None] if mask.dim() == 2 else mask[:, None]
        outs = []
        for start in range(0, T, self.chunk):
            part = q[:, :, start : start + self.chunk]
            n = part.size(2)
            allowed = None if mask is None else mask[..., start : start + n, :]
            if causal:
                past = torch.ones(n, S, dtype=torch.bool, device=q.device).tril(start + S - T)
                allowed = past if allowed is None else allowed & past
            scores = part @ k.transpose(-1, -2) * q.size(-1) ** -0.5
            if allowed is not None:
                scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
            weights = scores.softmax(-1)
            if allowed is not None:
                weights = weights.masked_fill(~allowed, 0.0)
            outs.append(weights @ v)
        return torch.cat(outs, 2)


class ChunkedAttention2(nn.Module):
    """Memory grows with T, not T * T: one chunk of queries at a time."""

    chunk = 4

    def forward(self, q, k, v, attention_mask=None, causal=False):
        k, v = grow(k, q.size(1)), grow(v, q.size(1))
        T, S = q.size(2), k.size(2)
        mask = attention_mask
        if mask is not None:
            mask = mask[None, None] if mask.dim() == 2 else mask[:, None]
        outs = []
        for start in range(0, T, self.chunk):
            part = q[:, :, start : start + self.chunk]
            n = part.size(2)
            allowed = None if mask is None else mask[..., start : start + n, :]
            if causal:
                past = torch.ones(n, S, dtype=torch.bool, device=q.device).tril(S - n)
                allowed = past if allowed is None else allowed & past
            scores = part @ k.transpose(-1, -2) * q.size(-1) ** -0.5
            if allowed is not None:
                scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
            weights = scores.softmax(-1)
            if allowed is not None:
                weights = weights.masked_fill(~allowed, 0.0)
            outs.append(weights @ v)
        return torch.cat(outs, 2)


right = Subject(
    kind="attention",
    build=lambda c: ChunkedAttention(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)

wrong = Subject(
    kind="attention",
    build=lambda c: ChunkedAttention2(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)
