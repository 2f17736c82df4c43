"""Masked attention in plain torch; queries without a visible key give zeros."""

import torch
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "Empty rows are mended by nan_to_num behind the softmax: the output is zero, but gradients become NaN."
CAUSE = (
    "A row without visible keys makes the gradients NaN: softmax of a row of -inf is NaN and replacing it afterwards "
    "(nan_to_num) hides it in the forward alone."
)


def additive(allowed, like):
    return torch.zeros(allowed.shape, dtype=like.dtype, device=like.device).masked_fill(~allowed, -torch.inf)


def before(scores, allowed):
    empty = ~allowed.any(-1, keepdim=True)
    return F.softmax(scores + additive(allowed | empty, scores), dim=-1).masked_fill(empty, 0.0)


def behind(scores, allowed):
    return F.softmax(scores + additive(allowed, scores), dim=-1).nan_to_num(0.0)


def make(normalise):
    def attention(model, q, k, v, attention_mask=None, causal=False):
        heads, groups = q.shape[1], k.shape[1]
        k, v = k.repeat_interleave(heads // groups, 1), v.repeat_interleave(heads // groups, 1)
        T, S = q.shape[-2], k.shape[-2]
        allowed = torch.ones(T, S, dtype=torch.bool, device=q.device)
        if causal:
            allowed = allowed.tril(diagonal=S - T)
        if attention_mask is not None:
            allowed = allowed & (attention_mask.unsqueeze(1) if attention_mask.ndim == 3 else attention_mask)
        scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
        return torch.matmul(normalise(scores, allowed), v)

    return attention


def subject(normalise):
    return Subject(
        kind="attention",
        name="masked attention",
        forward=make(normalise),
        mask_forms=("pairwise",),
        declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True},
    )


right = subject(before)
wrong = subject(behind)
