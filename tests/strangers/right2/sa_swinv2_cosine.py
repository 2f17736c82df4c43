"""Swin v2 attention over a sequence: cosine of queries and keys times a learned, clamped temperature per head. Unusual: no
1/sqrt(d) and scores that do not grow with the input; right, that is cosine attention (query_key_norm). Keys have no bias."""
import math
import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject


class Cosine(nn.Module):
    def __init__(s, c):
        super().__init__()
        D = c.d_model
        s.h, s.qkv, s.proj = c.num_heads, nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D)
        s.q_bias, s.v_bias = nn.Parameter(torch.zeros(D)), nn.Parameter(torch.zeros(D))
        s.logit_scale = nn.Parameter(torch.full((c.num_heads, 1, 1), math.log(10.0)))

    def forward(s, x, mask=None, want=False):
        B, T, D = x.shape
        bias = torch.cat((s.q_bias, torch.zeros_like(s.q_bias), s.v_bias))
        q, k, v = F.linear(x, s.qkv.weight, bias).reshape(B, T, 3, s.h, -1).permute(2, 0, 3, 1, 4)
        w = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * s.logit_scale.clamp(max=math.log(100.0)).exp()
        if mask is not None:
            w = w.masked_fill(~mask[:, None, None], torch.finfo(w.dtype).min)
        w = w.softmax(-1)
        return w if want else s.proj((w @ v).transpose(1, 2).reshape(B, T, D))


args = dict(kind="self_attention", build=Cosine, forward=lambda m, x, attention_mask=None: m(x, attention_mask),
            weights=lambda m, x, attention_mask=None: m(x, attention_mask, True), mask_forms=("padding",))
undeclared = Subject(**args)
declared = Subject(**args, declares={"causal": False, "positions": "none", "query_key_norm": True, "empty_row": "mean"})
