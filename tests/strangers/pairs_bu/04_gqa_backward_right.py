import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class GroupedAttention(Function):
    @staticmethod
    def forward(ctx, q, k, v, allowed):
        rep = q.shape[1] // k.shape[1]
        scale = q.shape[-1] ** -0.5
        scores = (q @ k.repeat_interleave(rep, 1).mT) * scale
        scores = scores.masked_fill(~allowed, -torch.inf)
        top = scores.amax(-1, keepdim=True)
        weights = (scores - top.masked_fill(top.isinf(), 0.0)).exp()
        norm = weights.sum(-1, keepdim=True)
        weights = weights / norm.masked_fill(norm == 0, 1.0)
        ctx.save_for_backward(q, k, v, weights)
        ctx.rep, ctx.scale = rep, scale
        return weights @ v.repeat_interleave(rep, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        q, k, v, weights = ctx.saved_tensors
        rep = ctx.rep

        def fold(grad):  # [B, H, S, *] -> [B, G, S, *]
            B, H, S, E = grad.shape
            return grad.reshape(B, H // rep, rep, S, E).sum(2)

        dv = fold(weights.mT @ dy)
        dp = dy @ v.repeat_interleave(rep, 1).mT
        ds = weights * (dp - (dp * weights).sum(-1, keepdim=True)) * ctx.scale
        dq = ds @ k.repeat_interleave(rep, 1)
        dk = fold(ds.mT @ q)
        return dq, dk, dv, None


def attend(model, q, k, v, attention_mask=None, causal=False):
    T, S = q.shape[-2], k.shape[-2]
    allowed = torch.ones(T, S, dtype=torch.bool)
    if causal:
        allowed = allowed.tril(S - T)
    if attention_mask is not None:
        allowed = allowed & attention_mask
    return GroupedAttention.apply(q, k, v, allowed.expand(*q.shape[:2], T, S))


subject = Subject(
    kind="attention",
    forward=attend,
    mask_forms=("pairwise",),
    declares={
        "empty_row": "zeros",
        "causal_alignment": "bottom-right",
        "grouped_queries": True,
        "once_differentiable": True,
    },
)
