"""Eager attention after the refactor that lets every model pass `soft_cap` (Gemma 2 style), grouped heads included."""
import torch

from veriformer.properties import Subject

SOFT_CAP = 4.0


def repeat_kv(states, n_rep):
    batch, groups, length, width = states.shape
    states = states[:, :, None].expand(batch, groups, n_rep, length, width)
    return states.reshape(batch, groups * n_rep, length, width)


def visible(q, k, attention_mask, causal):
    T, S = q.shape[-2], k.shape[-2]
    allowed = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril(S - T)
    if attention_mask is not None:
        allowed = allowed & attention_mask
    return allowed.expand(q.shape[0], q.shape[1], T, S)


def eager_attention(model, q, k, v, attention_mask=None, causal=False):
    n_rep = q.shape[1] // k.shape[1]
    k, v = repeat_kv(k, n_rep), repeat_kv(v, n_rep)
    allowed = visible(q, k, attention_mask, causal)
    scores = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    lowest = torch.finfo(scores.dtype).min
    scores = SOFT_CAP * torch.tanh(scores / SOFT_CAP)
    scores = scores.masked_fill(~allowed, lowest)
    weights = scores.softmax(-1)
    weights = weights.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    return torch.matmul(weights, v)


subject = Subject(
    kind="attention",
    name="eager attention with a soft cap",
    forward=eager_attention,
    mask_forms=("pairwise",),
    declares={"soft_cap": SOFT_CAP, "empty_row": "zeros", "causal_alignment": "bottom-right"},
)
