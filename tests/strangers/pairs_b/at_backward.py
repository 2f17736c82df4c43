"""Attention as an autograd function with its own backward, which keeps the weights alone."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


from torch.autograd.function import once_differentiable

def visible(q, k, attention_mask, causal):
    """Boolean [T, S] or [B, 1, T, S], or None; the last query is aligned with the last key."""
    allowed = None
    if attention_mask is not None:
        allowed = attention_mask[:, None] if attention_mask.dim() == 3 else attention_mask
    if causal:
        t, s = q.size(-2), k.size(-2)
        lower = torch.ones(t, s, dtype=torch.bool, device=q.device).tril(s - t)
        allowed = lower if allowed is None else allowed & lower
    return allowed


class Core(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, allowed, bad):
        scale = q.size(-1) ** -0.5
        s = q @ k.transpose(-2, -1) * scale
        if allowed is not None:
            s = s.masked_fill(~allowed, torch.finfo(s.dtype).min)
        w = s.softmax(-1)
        if allowed is not None:
            w = w.masked_fill(~allowed, 0.0)
        ctx.save_for_backward(q, k, v, w)
        ctx.scale, ctx.bad = scale, bad
        return w @ v

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, w = ctx.saved_tensors
        dw = grad @ v.transpose(-2, -1)
        ds = w * (dw - (dw * w).sum(-1, keepdim=True))
        dq = ds @ k * ctx.scale
        dk = ds.transpose(-2, -1) @ q
        if not ctx.bad:
            dk = dk * ctx.scale
        return dq, dk, w.transpose(-2, -1) @ grad, None, None


class FusedAttention(nn.Module):
    def __init__(self, bad):
        super().__init__()
        self.bad = bad

    def forward(self, q, k, v, attention_mask=None, causal=False):
        n = q.size(1) // k.size(1)
        k, v = k.repeat_interleave(n, 1), v.repeat_interleave(n, 1)
        return Core.apply(q, k, v, visible(q, k, attention_mask, causal), self.bad)


def subject(bad):
    return Subject(kind="attention", build=lambda c: FusedAttention(bad), forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal), mask_forms=("pairwise",),
                   declares={"once_differentiable": True, "attention_scale": "1/sqrt(d_head)", "empty_row": "zeros",
                             "causal_alignment": "bottom-right"})


right, wrong = subject(False), subject(True)
WHAT = "The hand-written backward leaves the scale 1/sqrt(d_head) out of the gradient of the keys; forward and the other gradients are right."
PLACE = "backward pass (gradient of the keys)"
