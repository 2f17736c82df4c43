"""Attention with grouped queries and a backward of its own, head by head as the kernel's grid has it."""

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject

WHAT = "In the hand-written backward each query head of a group stores its key gradient over that of the head before instead of adding to it."
CAUSE = (
    "Where several query heads share a key head, dK must be the sum over the heads of the group; the backward writes "
    "dK[g] = ... in place of dK[g] += ..., so only the last head of each group counts. dQ, dV and the forward are right."
)


def weights_of(q, k, allowed):
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~allowed, float("-inf"))
    top = scores.amax(-1, keepdim=True)
    exps = (scores - top.masked_fill(top.isinf(), 0.0)).exp()
    total = exps.sum(-1, keepdim=True)
    return exps / total.masked_fill(total == 0, 1.0)


def gradients_of_head(q, k, v, p, out_grad):
    """dQ, dK and dV of one query head."""
    dv = p.transpose(-1, -2) @ out_grad
    dp = out_grad @ v.transpose(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    return ds @ k, ds.transpose(-1, -2) @ q, dv


def forward_heads(q, k, v, allowed):
    work = torch.promote_types(q.dtype, torch.float32)
    share = q.shape[1] // k.shape[1]
    heads = []
    for h in range(q.shape[1]):
        p = weights_of(q[:, h].to(work), k[:, h // share].to(work), allowed[:, h])
        heads.append((p @ v[:, h // share].to(work)).to(q.dtype))
    return torch.stack(heads, 1)


def backward_heads(q, k, v, allowed, out_grad, accumulate):
    work = torch.promote_types(q.dtype, torch.float32)
    share = q.shape[1] // k.shape[1]
    dq = torch.zeros(q.shape, dtype=work, device=q.device)
    dk = torch.zeros(k.shape, dtype=work, device=q.device)
    dv = torch.zeros(v.shape, dtype=work, device=q.device)
    for h in range(q.shape[1]):
        g = h // share
        query, key, value = q[:, h].to(work), k[:, g].to(work), v[:, g].to(work)
        p = weights_of(query, key, allowed[:, h])
        dq[:, h], dk_h, dv_h = gradients_of_head(query, key, value, p, out_grad[:, h].to(work))
        if accumulate:
            dk[:, g] += dk_h
        else:
            dk[:, g] = dk_h
        dv[:, g] += dv_h
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


class Grouped(Function):
    @staticmethod
    def forward(ctx, q, k, v, allowed):
        ctx.save_for_backward(q, k, v, allowed)
        return forward_heads(q, k, v, allowed)

    @staticmethod
    @once_differentiable
    def backward(ctx, out_grad):
        return backward_heads(*ctx.saved_tensors, out_grad, True)


class GroupedStored(Function):
    @staticmethod
    def forward(ctx, q, k, v, allowed):
        ctx.save_for_backward(q, k, v, allowed)
        return forward_heads(q, k, v, allowed)

    @staticmethod
    @once_differentiable
    def backward(ctx, out_grad):
        return backward_heads(*ctx.saved_tensors, out_grad, False)


class Kernel(nn.Module):
    function = Grouped

    def forward(self, q, k, v, attention_mask=None, causal=False):
        length, keys = q.shape[-2], k.shape[-2]
        allowed = torch.ones(length, keys, dtype=torch.bool, device=q.device)
        if causal:
            allowed = allowed.tril(keys - length)
        if attention_mask is not None:
            allowed = allowed & attention_mask
        return self.function.apply(q, k, v, allowed.expand(q.shape[0], q.shape[1], length, keys))


class KernelStored(Kernel):
    function = GroupedStored


COMMON = dict(
    kind="attention",
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
    declares={
        "grouped_queries": True,
        "empty_row": "zeros",
        "causal_alignment": "bottom-right",
        "once_differentiable": True,
    },
)
right = Subject(name="grouped kernel", build=lambda c: Kernel(), **COMMON)
wrong = Subject(name="grouped kernel, stored", build=lambda c: KernelStored(), **COMMON)
