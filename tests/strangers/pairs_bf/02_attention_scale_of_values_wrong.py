WHAT = 'The scale is taken from the width of the values (E) instead of that of the queries and keys (K), line 12: right as long as both are equal.'
"""Grouped-query attention in einsum; values may be wider or narrower than keys."""
import torch

from veriformer.properties import Subject


def sdpa(q, k, v, attention_mask=None, causal=False):
    B, H, T, _ = q.shape
    _, G, S, d_head = k.shape
    d_value = v.shape[-1]
    scale = d_value**-0.5
    q = q.unflatten(1, (G, H // G))  # query head g * r + i reads group g
    sim = torch.einsum("bgrtk,bgsk->bgrts", q * scale, k)
    allowed = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril(S - T)
    allowed = allowed.expand(B, H, T, S)
    if attention_mask is not None:
        allowed = allowed & attention_mask
    allowed = allowed.unflatten(1, (G, H // G))
    sim = sim.masked_fill(~allowed, torch.finfo(sim.dtype).min)
    attn = sim.softmax(-1).masked_fill(~allowed, 0.0)  # a query without keys gives zeros
    return torch.einsum("bgrts,bgse->bgrte", attn, v).reshape(B, H, T, d_value)


subject = Subject(
    kind="attention",
    name="einsum attention",
    forward=lambda m, q, k, v, attention_mask=None, causal=False: sdpa(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
    declares={"grouped_queries": True, "empty_row": "zeros", "causal_alignment": "bottom-right"},
)
