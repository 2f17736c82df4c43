import torch

from veriformer.properties import Subject


def grouped_attention(q, k, v, attention_mask=None, causal=False):
    """No repeat of keys and values: the group is an axis of the einsum."""
    B, H, T, K = q.shape
    G, S = k.shape[1], k.shape[2]
    rep = H // G
    q = q.reshape(B, G, rep, T, K)
    scores = torch.einsum("bgrtk,bgsk->bgrts", q, k).div(K**0.5)
    if causal:
        ok = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
        scores = scores.masked_fill(~ok, -torch.inf)
    if attention_mask is not None:
        ok = attention_mask.expand(B, 1, T, S)[:, :, None]
        scores = scores.masked_fill(~ok, -torch.inf)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    out = torch.einsum("bgrts,bgse->bgrte", weights, v)
    return out.reshape(B, H, T, v.shape[-1])


subject = Subject(
    kind="attention",
    name="grouped attention",
    forward=lambda model, q, k, v, attention_mask=None, causal=False: grouped_attention(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
    declares={"grouped_queries": True, "empty_row": "zeros", "causal_alignment": "bottom-right"},
)
