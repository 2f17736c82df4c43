"""ViT-22B block: attention and feed-forward in parallel from one projection, LayerNorm on queries and keys, LayerScale, the
activation a scripted function. Unusual: one fused map gives q, k, v and the hidden layer; right, they share their input."""
import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject


@torch.jit.script
def fused_gelu(x):
    return x * 0.5 * (1.0 + torch.erf(x * 0.7071067811865476))


class Parallel(nn.Module):
    def __init__(s, c):
        super().__init__()
        D, K = c.d_model, c.d_model // c.num_heads
        s.h, s.sizes = c.num_heads, (D, D, D, c.d_ff)
        s.norm, s.inp, s.out = nn.LayerNorm(D), nn.Linear(D, 3 * D + c.d_ff), nn.Linear(D + c.d_ff, D)
        s.qn, s.kn, s.scale = nn.LayerNorm(K), nn.LayerNorm(K), nn.Parameter(0.1 * torch.ones(D))

    def forward(s, x, mask=None):
        q, k, v, f = s.inp(s.norm(x)).split(s.sizes, -1)
        q, k, v = (t.unflatten(-1, (s.h, -1)).transpose(1, 2) for t in (q, k, v))
        bias = None
        if mask is not None:
            bias = torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill(~mask, torch.finfo(x.dtype).min)[:, None, None]
        a = F.scaled_dot_product_attention(s.qn(q), s.kn(k), v, attn_mask=bias)
        return x + s.scale * s.out(torch.cat((a.transpose(1, 2).flatten(2), fused_gelu(f)), -1))


args = dict(kind="layer", build=Parallel, forward=lambda m, x, attention_mask=None: m(x, attention_mask), mask_forms=("padding",))
undeclared = Subject(**args)
declared = Subject(**args, declares={"causal": False, "positions": "none", "query_key_norm": True, "norm": "layer", "norm_placement": "pre",
                                     "activation": "gelu", "cross_attention": False, "structure": "other"})
