"""Attention computed for three queries at a time, checkpoint-free, causal aligned top-left."""
import math
import torch
from torch import nn
from veriformer.properties import Subject

def attention(q, k, v, mask=None, causal=False):
    rep, S = q.shape[1] // k.shape[1], k.shape[2]
    k, v, out = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1), []
    for start, part in zip(range(0, q.shape[2], 3), q.split(3, dim=2)):
        s = part.mul(q.shape[-1] ** -0.5) @ k.mT
        bad = torch.zeros(s.shape[-2], S, dtype=torch.bool, device=q.device)
        if causal:
            rows = torch.arange(start, start + part.shape[2], device=q.device)
            bad = torch.arange(S, device=q.device) > rows[:, None]
        if mask is not None:
            bad = bad | ~mask[:, None, None]
        s = s.masked_fill(bad, -math.inf)
        out.append(s.softmax(-1).masked_fill(bad.all(-1, keepdim=True), 0.0) @ v)
    return torch.cat(out, 2)

common = dict(kind="attention", build=lambda c: nn.Identity(), mask_forms=("padding",), forward=lambda m, q, k, v, attention_mask=None, causal=False: attention(q, k, v, attention_mask, causal))
undeclared = Subject(**common)
declared = Subject(**common, declares={"causal_alignment": "top-left", "empty_row": "zeros"})
