"""Attention as an autograd.Function with its backward written by hand (once differentiable). Rows without keys give zeros;
causal is top-left, as torch's is_causal. Right: gradcheck agrees."""
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from veriformer.properties import Subject


class Core(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, keep):
        w = q @ k.mT * q.shape[-1] ** -0.5
        if keep is None:
            p = w.softmax(-1)
        else:
            p = w.masked_fill(~keep, torch.finfo(w.dtype).min).softmax(-1).masked_fill(~keep, 0.0)
        ctx.save_for_backward(q, k, v, p)
        return p @ v

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        q, k, v, p = ctx.saved_tensors
        dp = g @ v.mT
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        return ds @ k, ds.mT @ q, p.mT @ g, None


class Attention(nn.Module):
    def forward(s, q, k, v, mask=None, causal=False):
        T, S = q.shape[2], k.shape[2]
        keep = None
        if mask is not None:
            keep = (mask[:, None] if mask.dim() == 3 else mask[None, None]).expand(q.shape[0], 1, T, S)
        if causal:
            tri = torch.ones(T, S, dtype=torch.bool, device=q.device).tril()
            keep = tri if keep is None else keep & tri
        return Core.apply(q, k, v, keep)


args = dict(kind="attention", build=lambda c: Attention(), mask_forms=("pairwise",),
            forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal))
undeclared = Subject(**args)
declared = Subject(**args, declares={"empty_row": "zeros", "causal_alignment": "top-left", "once_differentiable": True})
