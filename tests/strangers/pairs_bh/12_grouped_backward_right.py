"""Grouped-query attention with a backward by hand, which recomputes the weights from the row's log-sum-exp."""
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


def _weights(q, k, allowed, scale, lse):
    s = torch.einsum("bgrtk,bgsk->bgrts", q, k) * scale
    return torch.exp(s.masked_fill(~allowed, float("-inf")) - lse)


class GroupedAttention(Function):
    @staticmethod
    def forward(ctx, q, k, v, allowed, scale):
        """q [B,G,R,T,K], k [B,G,S,K], v [B,G,S,E], allowed [B,G,R,T,S]."""
        s = torch.einsum("bgrtk,bgsk->bgrts", q, k) * scale
        lse = s.masked_fill(~allowed, float("-inf")).logsumexp(-1, keepdim=True)
        lse = torch.where(lse.isinf(), torch.zeros_like(lse), lse)  # a row without keys gives zeros
        out = torch.einsum("bgrts,bgse->bgrte", _weights(q, k, allowed, scale, lse), v)
        ctx.save_for_backward(q, k, v, allowed, lse, out)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, allowed, lse, out = ctx.saved_tensors
        p = _weights(q, k, allowed, ctx.scale, lse)
        dv = torch.einsum("bgrts,bgrte->bgrse", p, do).sum(2)
        dp = torch.einsum("bgrte,bgse->bgrts", do, v)
        ds = p * (dp - (do * out).sum(-1, keepdim=True)) * ctx.scale
        dq = torch.einsum("bgrts,bgsk->bgrtk", ds, k)
        dk = torch.einsum("bgrts,bgrtk->bgrsk", ds, q).sum(2)
        return dq, dk, dv, None, None


def attend(model, q, k, v, attention_mask=None, causal=False):
    B, H, T, K = q.shape
    G, S = k.shape[1:3]
    allowed = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril(S - T)
    allowed = allowed.expand(B, H, T, S)
    if attention_mask is not None:
        allowed = allowed & attention_mask
    out = GroupedAttention.apply(
        q.reshape(B, G, H // G, T, K), k, v, allowed.reshape(B, G, H // G, T, S), K**-0.5
    )
    return out.reshape(B, H, T, v.shape[-1])


subject = Subject(
    kind="attention",
    name="grouped attention with its own backward",
    forward=attend,
    mask_forms=("pairwise",),
    declares={
        "grouped_queries": True, "empty_row": "zeros", "causal_alignment": "bottom-right",
        "once_differentiable": True,
    },
)
