WHAT = 'In the hand-written backward the gradients of k and v are summed over the query heads of a group with the head axis read as (rep, G) (line 18: `view(B, rep, G, S, -1).sum(1)`), while the forward repeats them as (G, rep): with several groups every key-value head gets the gradient of others.'
"""Grouped-query attention with a backward of its own (saves the probabilities, not the repeated keys)."""
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


def repeat_kv(x, rep):
    return x if rep == 1 else x.repeat_interleave(rep, dim=1)


def reduce_kv(grad, G):
    """Back from one gradient a query head to one a key-value head."""
    B, H, S, _ = grad.shape
    rep = H // G
    return grad.view(B, rep, G, S, -1).sum(1)


class GroupedQueryAttention(Function):
    @staticmethod
    def forward(ctx, q, k, v, bias, scale):
        rep = q.shape[1] // k.shape[1]
        scores = torch.einsum("bhtk,bhsk->bhts", q, repeat_kv(k, rep)) * scale + bias
        p = scores.softmax(-1)
        ctx.save_for_backward(q, k, v, p)
        ctx.scale, ctx.rep = scale, rep
        return torch.einsum("bhts,bhse->bhte", p, repeat_kv(v, rep))

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, p = ctx.saved_tensors
        G = k.shape[1]
        dv = torch.einsum("bhts,bhte->bhse", p, do)
        dp = torch.einsum("bhte,bhse->bhts", do, repeat_kv(v, ctx.rep))
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * ctx.scale
        dq = torch.einsum("bhts,bhsk->bhtk", ds, repeat_kv(k, ctx.rep))
        dk = torch.einsum("bhts,bhtk->bhsk", ds, q)
        return dq, reduce_kv(dk, G), reduce_kv(dv, G), None, None


def gqa(model, q, k, v, attention_mask=None, causal=False):
    T, S = q.shape[2], k.shape[2]
    allowed = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril()
    if attention_mask is not None:
        allowed = allowed & attention_mask
    bias = torch.zeros(allowed.shape, dtype=q.dtype, device=q.device).masked_fill(~allowed, float("-inf"))
    return GroupedQueryAttention.apply(q, k, v, bias, q.shape[-1] ** -0.5)


subject = Subject(
    kind="attention",
    name="GQA kernel",
    forward=gqa,
    mask_forms=("pairwise",),
    declares={"grouped_queries": True, "empty_row": "nan", "causal_alignment": "top-left", "once_differentiable": True},
)
