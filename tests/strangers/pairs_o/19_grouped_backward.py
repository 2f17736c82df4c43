"""Grouped-query attention with a backward of its own: weights are computed once and kept, keys are not repeated twice."""

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject

WHAT = "The backward sums the gradients of keys and values over the wrong query heads where heads are grouped."
CAUSE = (
    "The forward repeats each key-value head for consecutive query heads (repeat_interleave); the backward folds the "
    "gradients as if the heads had been tiled (view (R, G) and sum over the first), so with more than one group each "
    "key-value head gets gradients of query heads that it does not serve."
)


def fold_consecutive(gradient, groups):
    """`[B, H, S, K]` to `[B, G, S, K]`: what repeat_interleave gave out comes back summed."""
    return gradient.unflatten(1, (groups, -1)).sum(dim=2)


def fold_tiled(gradient, groups):
    return gradient.unflatten(1, (-1, groups)).sum(dim=1)


def make(fold):
    class GroupedAttention(Function):
        @staticmethod
        def forward(ctx, q, k, v, allowed):
            dtype, kept = q.dtype, torch.promote_types(q.dtype, torch.float32)
            groups_of, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
            q, k, v = q.to(kept), k.to(kept), v.to(kept)
            wide_k, wide_v = (t.repeat_interleave(groups_of, dim=1) for t in (k, v))
            scores = (q @ wide_k.mT * scale).masked_fill(~allowed, torch.finfo(kept).min)
            weights = scores.softmax(dim=-1) * allowed
            ctx.save_for_backward(q, k, v, weights)
            ctx.groups_of, ctx.scale, ctx.dtype = groups_of, scale, dtype
            return (weights @ wide_v).to(dtype)

        @staticmethod
        @once_differentiable
        def backward(ctx, gradient):
            q, k, v, weights = ctx.saved_tensors
            gradient, groups = gradient.to(q.dtype), k.shape[1]
            wide_k, wide_v = (t.repeat_interleave(ctx.groups_of, dim=1) for t in (k, v))
            of_weights = gradient @ wide_v.mT
            of_scores = weights * (of_weights - (of_weights * weights).sum(dim=-1, keepdim=True)) * ctx.scale
            of_q = of_scores @ wide_k
            of_k = fold(of_scores.mT @ q, groups)
            of_v = fold(weights.mT @ gradient, groups)
            return of_q.to(ctx.dtype), of_k.to(ctx.dtype), of_v.to(ctx.dtype), None

    return GroupedAttention


def attention(fold):
    function = make(fold)

    def forward(model, q, k, v, attention_mask=None, causal=False):
        queries, keys = q.shape[2], k.shape[2]
        allowed = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
        if causal:
            allowed = allowed.tril(keys - queries)
        if attention_mask is not None:
            allowed = allowed & attention_mask
        return function.apply(q, k, v, allowed.expand(*q.shape[:2], queries, keys))

    return Subject(
        kind="attention",
        name="grouped attention",
        forward=forward,
        mask_forms=("pairwise",),
        declares={"grouped_queries": True, "once_differentiable": True, "empty_row": "zeros",
                  "causal_alignment": "bottom-right"},
    )  # fmt: skip


right = attention(fold_consecutive)
wrong = attention(fold_tiled)
