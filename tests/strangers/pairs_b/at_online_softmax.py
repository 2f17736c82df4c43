"""Attention block by block with a running maximum, as in FlashAttention, in plain torch."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


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


class BlockwiseAttention(nn.Module):
    def __init__(self, bad, block=4):
        super().__init__()
        self.block, self.bad = block, bad

    def forward(self, q, k, v, attention_mask=None, causal=False):
        n = q.size(1) // k.size(1)
        k, v = k.repeat_interleave(n, 1), v.repeat_interleave(n, 1)
        allowed = visible(q, k, attention_mask, causal)
        low = torch.finfo(q.dtype).min
        top = q.new_full((*q.shape[:-1], 1), low)
        total = torch.zeros_like(top)
        out = q.new_zeros(*q.shape[:-1], v.size(-1))
        for i in range(0, k.size(-2), self.block):
            s = q @ k[..., i : i + self.block, :].transpose(-2, -1) * q.size(-1) ** -0.5
            here = None if allowed is None else allowed[..., i : i + self.block]
            if here is not None:
                s = s.masked_fill(~here, low)
            new = torch.maximum(top, s.amax(-1, keepdim=True)).detach()
            p = torch.exp(s - new)
            if here is not None:
                p = p.masked_fill(~here, 0.0)
            fade = torch.exp(top - new)
            total = (total if self.bad else total * fade) + p.sum(-1, keepdim=True)
            out = out * fade + p @ v[..., i : i + self.block, :]
            top = new
        return out / total.clamp(min=torch.finfo(q.dtype).tiny)


def subject(bad):
    return Subject(kind="attention", build=lambda c: BlockwiseAttention(bad), forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal), mask_forms=("pairwise",))


right, wrong = subject(False), subject(True)
WHAT = "When the running maximum rises in a later block of keys, the output so far is rescaled but the sum of the weights (the denominator) is not; with more than four keys the weights no longer sum to one."
PLACE = "online softmax (running denominator)"
