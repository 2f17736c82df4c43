WHAT = "the forward repeats each key-value head for n_rep neighbouring query heads, the backward sums gradients as if the repeats were tiled (view(B, n_rep, G) instead of (B, G, n_rep), lines 41 and the next): heads get one another's gradients where 1 < G < H"
"""Grouped-query attention with a backward of its own: probabilities are kept, nothing else is."""

import torch
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class GroupedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, allowed):
        n_rep = q.size(1) // k.size(1)
        k_all = torch.repeat_interleave(k, n_rep, dim=1)
        v_all = torch.repeat_interleave(v, n_rep, dim=1)
        ctx.scale = q.size(-1) ** -0.5
        scores = torch.matmul(q, k_all.mT).mul_(ctx.scale)
        scores.masked_fill_(~allowed, float("-inf"))
        probs = torch.nan_to_num(torch.softmax(scores, dim=-1), nan=0.0)  # a row that sees nothing gives zeros
        ctx.save_for_backward(q, k, v, probs)
        return torch.matmul(probs, v_all)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        q, k, v, probs = ctx.saved_tensors
        B, H, T, D = q.shape
        G, S = k.size(1), k.size(2)
        n_rep = H // G
        k_all = torch.repeat_interleave(k, n_rep, dim=1)
        v_all = torch.repeat_interleave(v, n_rep, dim=1)

        grad_v_all = torch.matmul(probs.mT, grad_out)
        grad_probs = torch.matmul(grad_out, v_all.mT)
        delta = (grad_probs * probs).sum(-1, keepdim=True)
        grad_scores = probs * (grad_probs - delta) * ctx.scale
        grad_q = torch.matmul(grad_scores, k_all)
        grad_k_all = torch.matmul(grad_scores.mT, q)

        # a key-value head gets the gradients of all query heads that share it
        grad_k = grad_k_all.view(B, n_rep, G, S, D).sum(1)
        grad_v = grad_v_all.view(B, n_rep, G, S, v.size(-1)).sum(1)
        return grad_q, grad_k, grad_v, None


def gqa(q, k, v, attention_mask=None, causal=False):
    T, S = q.size(2), k.size(2)
    allowed = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        allowed = torch.tril(allowed, diagonal=S - T)
    if attention_mask is not None:
        allowed = allowed & attention_mask
    return GroupedAttention.apply(q, k, v, allowed)


subject = Subject(
    kind="attention",
    name="GroupedAttention",
    forward=lambda model, q, k, v, attention_mask=None, causal=False: gqa(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
    declares={
        "empty_row": "zeros",
        "causal_alignment": "bottom-right",
        "grouped_queries": True,
        "once_differentiable": True,
    },
)
