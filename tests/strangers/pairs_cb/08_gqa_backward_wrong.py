WHAT = "Hand-written backward of grouped-query attention: the gradients of a shared key and value head are averaged over the query heads of its group (`.mean(2)` in GroupedAttention.backward) rather than summed."
"""Grouped-query attention with a backward of its own (weights are computed again, not kept)."""
import torch
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


def weights_of(q, k, allowed, scale):
    s = torch.einsum("bgrtk,bgsk->bgrts", q, k) * scale
    s = s.masked_fill(~allowed, -torch.inf)
    top = s.amax(-1, keepdim=True)
    e = (s - top.masked_fill(top.isinf(), 0.0)).exp()
    z = e.sum(-1, keepdim=True)
    return e / z.masked_fill(z == 0, 1.0)


class GroupedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, allowed):
        ctx.scale = q.shape[-1] ** -0.5
        ctx.save_for_backward(q, k, v, allowed)
        return torch.einsum("bgrts,bgse->bgrte", weights_of(q, k, allowed, ctx.scale), v)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, allowed = ctx.saved_tensors
        p = weights_of(q, k, allowed, ctx.scale)
        dv = torch.einsum("bgrts,bgrte->bgrse", p, dout)
        dp = torch.einsum("bgrte,bgse->bgrts", dout, v)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * ctx.scale
        dq = torch.einsum("bgrts,bgsk->bgrtk", ds, k)
        dk = torch.einsum("bgrts,bgrtk->bgrsk", ds, q)
        return dq, dk.mean(2), dv.mean(2), None


def attend(model, q, k, v, attention_mask=None, causal=False):
    B, H, T, _ = q.shape
    G, S = k.shape[1], k.shape[2]
    allowed = torch.ones(T, S, dtype=torch.bool)
    if causal:
        allowed = allowed.tril(S - T)
    if attention_mask is not None:
        allowed = allowed & attention_mask
    allowed = allowed.expand(B, H, T, S).reshape(B, G, H // G, T, S)
    acc = torch.promote_types(q.dtype, torch.float32)
    out = GroupedAttention.apply(q.to(acc).unflatten(1, (G, H // G)), k.to(acc), v.to(acc), allowed)
    return out.flatten(1, 2).to(q.dtype)


subject = Subject(
    kind="attention",
    name="grouped kernel",
    forward=attend,
    mask_forms=("pairwise",),
    declares={"grouped_queries": True, "empty_row": "zeros", "causal_alignment": "bottom-right", "once_differentiable": True},
)
