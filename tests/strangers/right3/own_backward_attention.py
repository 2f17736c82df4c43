"""Attention as an autograd Function with a hand-written backward that recomputes the weights."""
import torch
from torch import nn
from veriformer.properties import Subject

class Attend(torch.autograd.Function):
    @staticmethod
    def probs(q, k, bad):
        p = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(bad, torch.finfo(q.dtype).min).softmax(-1)
        return p.masked_fill(bad, 0.0)

    @staticmethod
    def forward(ctx, q, k, v, bad):
        ctx.save_for_backward(q, k, v, bad)
        return Attend.probs(q, k, bad) @ v

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        q, k, v, bad = ctx.saved_tensors
        p, c = Attend.probs(q, k, bad), q.shape[-1] ** -0.5
        dp = g @ v.mT
        ds = p * (dp - (dp * p).sum(-1, keepdim=True))
        return ds @ k * c, ds.mT @ q * c, p.mT @ g, None

def attention(q, k, v, mask=None, causal=False):
    T, S, rep = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    bad = torch.zeros(T, S, dtype=torch.bool, device=q.device)
    if causal:
        bad = torch.ones_like(bad).triu(1 + S - T)
    if mask is not None:
        bad = bad | ~mask[:, None, None]
    return Attend.apply(q, k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1), bad)

common = dict(kind="attention", build=lambda c: nn.Identity(), mask_forms=("padding",), forward=lambda m, q, k, v, attention_mask=None, causal=False: attention(q, k, v, attention_mask, causal))
undeclared = Subject(**common)
declared = Subject(**common, declares={"once_differentiable": True, "empty_row": "zeros", "causal_alignment": "bottom-right"})
