"""Gemma-2 attention: grouped queries by reshaping, scores capped at 5 before the mask."""
import torch
from torch import nn
from veriformer.properties import Subject

CAP = 5.0

def attention(q, k, v, mask=None, causal=False):
    B, H, T, K = q.shape
    G, S = k.shape[1], k.shape[2]
    scores = torch.einsum("bgrtk,bgsk->bgrts", q.reshape(B, G, H // G, T, K), k)
    scores = CAP * torch.tanh(scores * K**-0.5 / CAP)
    allow = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        allow = allow.tril(S - T)
    allow = allow[None] if mask is None else allow[None] & mask[:, None, :]
    allow = allow[:, None, None]
    p = scores.masked_fill(~allow, torch.finfo(q.dtype).min).softmax(-1).masked_fill(~allow, 0.0)
    return torch.einsum("bgrts,bgse->bgrte", p, v).reshape(B, H, T, -1)

common = dict(kind="attention", build=lambda c: nn.Identity(), mask_forms=("padding",), forward=lambda m, q, k, v, attention_mask=None, causal=False: attention(q, k, v, attention_mask, causal))
undeclared = Subject(**common)
declared = Subject(**common, declares={"soft_cap": 5.0, "empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True})
