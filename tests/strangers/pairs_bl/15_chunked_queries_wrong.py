WHAT = "The keys that a causal chunk looks at are cut off at the chunk's last query without the offset S - T: with more keys than queries the last visible keys are lost (line 32)."
"""Attention in chunks of queries. With causal=True the keys that no query of a chunk can see are not touched at all."""

import torch

from veriformer.properties import Subject

CHUNK = 8


def attend_chunk(q, k, v, allowed):
    scores = torch.einsum("bgrtk,bgsk->bgrts", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, dim=-1)
    weights = weights.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    return torch.einsum("bgrts,bgse->bgrte", weights, v)


def attention(q, k, v, attention_mask=None, causal=False):
    B, H, T, K = q.shape
    G, S = k.shape[1:3]
    grouped = q.reshape(B, G, H // G, T, K)
    behind = S - T  # the last query stands at the last key
    rows = torch.arange(T, device=q.device) + behind
    columns = torch.arange(S, device=q.device)
    pieces = []
    for start in range(0, T, CHUNK):
        stop = min(start + CHUNK, T)
        seen = S
        allowed = torch.ones(stop - start, S, dtype=torch.bool, device=q.device)
        if causal:
            seen = max(stop, 1)
            allowed = columns <= rows[start:stop, None]
        if attention_mask is not None:
            mask = attention_mask.expand(B, H, T, S).reshape(B, G, H // G, T, S)
            allowed = allowed & mask[..., start:stop, :]
        pieces.append(attend_chunk(grouped[..., start:stop, :], k[:, :, :seen], v[:, :, :seen], allowed[..., :seen]))
    return torch.cat(pieces, dim=-2).reshape(B, H, T, -1)


subject = Subject(
    kind="attention",
    name="chunks of queries",
    forward=lambda m, q, k, v, attention_mask=None, causal=False: attention(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
    declares={"causal_alignment": "bottom-right", "grouped_queries": True, "empty_row": "zeros"},
)
