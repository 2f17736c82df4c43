"""Attention for key and value heads of different width (DeepSeek's MLA)."""
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


class Attention(nn.Module):
    def __init__(self, bad):
        super().__init__()
        self.bad = bad

    def forward(self, q, k, v, attention_mask=None, causal=False):
        b, h, t, _ = q.shape
        g = k.size(1)
        q = q.reshape(b, g, h // g, t, -1)
        width = v.size(-1) if self.bad else q.size(-1)
        s = torch.einsum("bgntk,bgsk->bgnts", q, k) / math.sqrt(width)
        allowed = visible(q, k, attention_mask, causal)
        if allowed is None:
            w = s.softmax(-1)
        else:
            if allowed.dim() == 4:
                allowed = allowed[:, None]
            w = s.masked_fill(~allowed, torch.finfo(s.dtype).min).softmax(-1).masked_fill(~allowed, 0.0)
        return torch.einsum("bgnts,bgse->bgnte", w, v).reshape(b, h, t, -1)


def subject(bad):
    return Subject(kind="attention", build=lambda c: Attention(bad), forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal), mask_forms=("pairwise",))


right, wrong = subject(False), subject(True)
WHAT = "The scores are divided by the square root of the width of the values instead of that of queries and keys, which shows where the two differ."
PLACE = "scale of the attention scores"
