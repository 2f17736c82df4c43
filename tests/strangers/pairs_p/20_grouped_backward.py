"""A kernel for grouped queries with a backward by hand: float32 inside, keys and values are never repeated in memory."""

import math

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


def ungroup_right(x, groups):
    """[B, H, S, K] -> [B, G, S, K]: what all query heads of a group send to their key-value head."""
    b, h, s, k = x.shape
    return x.reshape(b, groups, h // groups, s, k).sum(2)


def ungroup_wrong(x, groups):
    """[B, H, S, K] -> [B, G, S, K]: what all query heads of a group send to their key-value head."""
    b, h, s, k = x.shape
    return x.reshape(b, h // groups, groups, s, k).sum(1)


def probabilities(q, k, visible, scale):
    """q [B, G, R, T, K], k [B, G, S, K] -> [B, G, R, T, S]; rows without keys are zeros."""
    scores = torch.einsum("bgrtk,bgsk->bgrts", q, k) * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    peak = scores.amax(-1, keepdim=True)
    weights = (scores - peak.masked_fill(peak.isinf(), 0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1.0)


def make_kernel(ungroup):
    class GroupedAttention(Function):
        @staticmethod
        def forward(ctx, q, k, v, visible):
            wide = torch.promote_types(q.dtype, torch.float32)
            scale, groups = 1.0 / math.sqrt(q.shape[-1]), k.shape[1]
            q_, k_, v_ = q.to(wide).unflatten(1, (groups, -1)), k.to(wide), v.to(wide)
            p = probabilities(q_, k_, visible, scale)
            ctx.save_for_backward(q, k, v, p)
            ctx.scale = scale
            return torch.einsum("bgrts,bgse->bgrte", p, v_).flatten(1, 2).to(q.dtype)

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            q, k, v, p = ctx.saved_tensors
            groups = k.shape[1]
            g = grad.to(p.dtype).unflatten(1, (groups, -1))
            dp = torch.einsum("bgrte,bgse->bgrts", g, v.to(p.dtype))
            ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * ctx.scale
            q_ = q.to(p.dtype).unflatten(1, (groups, -1))
            dq = torch.einsum("bgrts,bgsk->bgrtk", ds, k.to(p.dtype)).flatten(1, 2)
            dk = torch.einsum("bgrts,bgrtk->bgrsk", ds, q_).flatten(1, 2)
            dv = torch.einsum("bgrts,bgrte->bgrse", p, g).flatten(1, 2)
            return dq.to(q.dtype), ungroup(dk, groups).to(k.dtype), ungroup(dv, groups).to(v.dtype), None

    def attend(model, q, k, v, attention_mask=None, causal=False):
        t, s, groups = q.shape[2], k.shape[2], k.shape[1]
        visible = torch.ones(t, s, dtype=torch.bool, device=q.device)
        if causal:  # the last query stands at the last key
            visible = visible.tril(s - t)
        visible = visible[None, None]
        if attention_mask is not None:
            visible = visible & attention_mask
        shape = q.shape[0], visible.shape[1], t, s
        visible = visible.expand(shape)
        if visible.shape[1] == 1:
            visible = visible[:, :, None]
        else:
            visible = visible.unflatten(1, (groups, -1))
        return GroupedAttention.apply(q, k, v, visible)

    return attend


def subject(name, ungroup):
    return Subject(
        kind="attention",
        name=name,
        forward=make_kernel(ungroup),
        mask_forms=("pairwise",),
        declares={"grouped_queries": True, "empty_row": "zeros", "causal_alignment": "bottom-right", "once_differentiable": True},
    )


right = subject("grouped kernel", ungroup_right)
wrong = subject("grouped kernel, turned groups", ungroup_wrong)

WHAT = "In the backward the heads' gradients of keys and values are summed as [R, G] though heads lie as [G, R] (key-value head first)."
CAUSE = (
    "The forward is right; dk and dv of several key-value heads are summed over the wrong query heads (h mod G instead of h div "
    "R), so a key-value head gets the gradient of queries that never read it. With one group, or without grouping, it is right."
)
