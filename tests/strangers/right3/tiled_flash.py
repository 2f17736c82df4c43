"""A tiled attention with running maximum and sum over key blocks of four."""
import math
import torch
from torch import nn
from veriformer.properties import Subject

BLOCK = 4

def attention(q, k, v, mask=None, causal=False):
    B, H, T, K = q.shape
    S = k.shape[2]
    k, v = (t.repeat_interleave(H // t.shape[1], 1) for t in (k, v))
    top = q.new_full((B, H, T, 1), -math.inf)
    norm, acc = q.new_zeros(B, H, T, 1), q.new_zeros(B, H, T, v.shape[-1])
    row = torch.arange(T, device=q.device)[:, None] + (S - T)
    for s in range(0, S, BLOCK):
        kb, vb = k[:, :, s : s + BLOCK], v[:, :, s : s + BLOCK]
        x = q @ kb.transpose(-1, -2) / math.sqrt(K)
        if causal:
            x = x.masked_fill(torch.arange(s, s + kb.shape[2], device=q.device) > row, -math.inf)
        if mask is not None:
            x = x.masked_fill(~mask[:, None, None, s : s + BLOCK], -math.inf)
        new = torch.maximum(top, x.detach().amax(-1, keepdim=True))
        safe = new.masked_fill(new == -math.inf, 0.0)
        p, old = torch.exp(x - safe), torch.exp(top - safe)
        norm, acc, top = norm * old + p.sum(-1, keepdim=True), acc * old + p @ vb, new
    return acc / norm.masked_fill(norm == 0, 1.0)

common = dict(kind="attention", build=lambda c: nn.Identity(), mask_forms=("padding",), forward=lambda m, q, k, v, attention_mask=None, causal=False: attention(q, k, v, attention_mask, causal))
undeclared = Subject(**common)
declared = Subject(**common, declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True, "attention_scale": "1/sqrt(d_head)"})
