"""T5 encoder: no scale on the scores, one bucketed bias computed by the first layer and used by all, RMSNorm, ReLU, no
biases. Unusual: inner width of attention is not d_model (2 wider heads); right, T5's d_kv is free of d_model / heads."""
import math
import torch
from torch import nn
from veriformer.properties import Subject
NB, MD = 16, 32


def buckets(T):
    rel = torch.arange(T)[None] - torch.arange(T)[:, None]
    n = NB // 2
    side, dist, exact = (rel > 0).long() * n, rel.abs(), n // 2
    large = exact + (torch.log(dist.clamp(min=1).double() / exact) / math.log(MD / exact) * (n - exact)).long()
    return side + torch.where(dist < exact, dist, large.clamp(max=n - 1))


class Norm(nn.Module):
    def __init__(s, d):
        super().__init__()
        s.weight = nn.Parameter(torch.ones(d))

    def forward(s, x):
        return s.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Layer(nn.Module):
    def __init__(s, c, first):
        super().__init__()
        D, inner = c.d_model, c.num_heads * (c.d_model // c.num_heads + 2)
        s.h, s.n1, s.n2 = c.num_heads, Norm(D), Norm(D)
        s.q, s.k, s.v, s.o = *(nn.Linear(D, inner, bias=False) for _ in range(3)), nn.Linear(inner, D, bias=False)
        s.wi, s.wo = nn.Linear(D, c.d_ff, bias=False), nn.Linear(c.d_ff, D, bias=False)
        s.rel = nn.Embedding(NB, c.num_heads) if first else None

    def forward(s, x, bias, mask):
        if bias is None:
            bias = s.rel(buckets(x.shape[1]).to(x.device)).permute(2, 0, 1)[None]
            if mask is not None:
                bias = bias + torch.zeros_like(x[..., 0]).masked_fill(~mask, torch.finfo(x.dtype).min)[:, None, None]
        y = s.n1(x)
        q, k, v = (p(y).unflatten(-1, (s.h, -1)).transpose(1, 2) for p in (s.q, s.k, s.v))
        w = (q @ k.mT + bias).softmax(-1)
        x = x + s.o((w @ v).transpose(1, 2).flatten(2))
        return x + s.wo(s.wi(s.n2(x)).relu()), bias


class T5(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.emb, s.layers = nn.Embedding(c.vocab_size, c.d_model), nn.ModuleList(Layer(c, i == 0) for i in range(c.num_layers))
        s.norm = Norm(c.d_model)

    def forward(s, tokens, mask=None):
        x, bias = s.emb(tokens), None
        for layer in s.layers:
            x, bias = layer(x, bias, mask)
        return s.norm(x)


args = dict(kind="encoder", build=T5, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask))
undeclared = Subject(**args)
declared = Subject(**args, declares={"causal": False, "positions": "t5", "num_buckets": NB, "max_distance": MD, "bidirectional": True,
                                     "attention_scale": 1, "norm": "rms", "norm_placement": "pre", "final_norm": True, "activation": "relu",
                                     "bias": False, "padding_side": "both", "structure": "other"})
