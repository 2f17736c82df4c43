"""Fine-tuning style: frozen q, k, v with low-rank adapters on q and v, a weight-normalised output projection. Unusual: most
weights take no gradient and the adapters' second factors start at zero; right, so LoRA starts at the frozen model."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from veriformer.properties import Subject


class LoRA(nn.Module):
    def __init__(s, base, r=2, alpha=4.0):
        super().__init__()
        s.base, s.scaling = base.requires_grad_(False), alpha / r
        s.A = nn.Parameter(torch.randn(r, base.in_features) * 0.1)
        s.B = nn.Parameter(torch.zeros(base.out_features, r))

    def forward(s, x):
        return s.base(x) + F.linear(F.linear(x, s.A), s.B) * s.scaling


class SelfAttention(nn.Module):
    def __init__(s, c):
        super().__init__()
        D = c.d_model
        s.h, s.q, s.k, s.v = c.num_heads, LoRA(nn.Linear(D, D)), nn.Linear(D, D).requires_grad_(False), LoRA(nn.Linear(D, D))
        s.o = weight_norm(nn.Linear(D, D))

    def forward(s, x, mask=None):
        q, k, v = (p(x).unflatten(-1, (s.h, -1)).transpose(1, 2) for p in (s.q, s.k, s.v))
        keep = None if mask is None else mask[:, None, None] | ~mask.any(1)[:, None, None, None]  # all padding: sees all
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        return s.o(y.transpose(1, 2).flatten(2))


args = dict(kind="self_attention", build=SelfAttention, forward=lambda m, x, attention_mask=None: m(x, attention_mask),
            mask_forms=("padding",))
undeclared = Subject(**args)
declared = Subject(**args, declares={"causal": False, "positions": "none", "bias": True, "structure": "other"})
