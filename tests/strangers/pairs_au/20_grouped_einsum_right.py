"""Grouped-query attention without repeating keys and values: query head h reads key-value head h // r."""
import torch

from veriformer.properties import Subject


def grouped_attention(q, k, v, attention_mask=None, causal=False):
    B, H, T, K = q.shape
    G, S, E = k.shape[1], k.shape[2], v.shape[3]
    if H % G:
        raise ValueError("heads must be a multiple of key-value heads")
    q = q.reshape(B, G, H // G, T, K) * K**-0.5
    scores = torch.einsum("bgrtk,bgsk->bgrts", q, k)

    allowed = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril(S - T)
    if attention_mask is not None:
        allowed = allowed & attention_mask  # B, 1, T, S
        allowed = allowed.unsqueeze(2)
    scores = scores.masked_fill(~allowed, float("-inf"))
    weights = torch.softmax(scores, dim=-1).masked_fill(~allowed, 0.0)  # zeros where nothing is visible
    out = torch.einsum("bgrts,bgse->bgrte", weights, v)
    return out.reshape(B, H, T, E)


subject = Subject(
    kind="attention",
    name="grouped einsum attention",
    forward=lambda model, q, k, v, attention_mask=None, causal=False: grouped_attention(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
    declares={"grouped_queries": True, "empty_row": "zeros", "causal_alignment": "bottom-right"},
)
