"""ModernBERT style: padding is taken out, the real tokens of all samples lie in one row of length N, and attention is
block-diagonal over samples. Unusual: samples share one softmax row and padded outputs are zero; right, other samples'
keys are hidden exactly, and rotary angles (base 160000) use the original column. RMSNorm, GeGLU, no biases."""
import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject


def rope(x, pos):  # N H K
    K = x.shape[-1]
    inv = 160000.0 ** (-torch.arange(0, K, 2, dtype=torch.float64, device=x.device) / K)
    a = (pos.double()[:, None] * inv)[:, None]
    cos, sin = a.cos().to(x.dtype), a.sin().to(x.dtype)
    p, q = x.chunk(2, -1)
    return torch.cat((p * cos - q * sin, q * cos + p * sin), -1)


class Layer(nn.Module):
    def __init__(s, c):
        super().__init__()
        D = c.d_model
        s.h, s.n1, s.n2 = c.num_heads, nn.RMSNorm(D, eps=1e-6), nn.RMSNorm(D, eps=1e-6)
        s.Wqkv, s.Wo = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        s.Wi, s.Wd = nn.Linear(D, 2 * c.d_ff, bias=False), nn.Linear(c.d_ff, D, bias=False)

    def forward(s, x, seq, pos):
        q, k, v = s.Wqkv(s.n1(x)).view(len(x), 3, s.h, x.shape[1] // s.h).unbind(1)
        q, k = rope(q, pos), rope(k, pos)
        w = torch.einsum("nhk,mhk->hnm", q, k) / q.shape[-1] ** 0.5
        w = w.masked_fill(seq[:, None] != seq[None], float("-inf")).softmax(-1)
        x = x + s.Wo(torch.einsum("hnm,mhk->nhk", w, v).flatten(1))
        a, g = s.Wi(s.n2(x)).chunk(2, -1)
        return x + s.Wd(F.gelu(a) * g)


class Modern(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.emb, s.layers = nn.Embedding(c.vocab_size, c.d_model), nn.ModuleList(Layer(c) for _ in range(c.num_layers))
        s.norm = nn.RMSNorm(c.d_model, eps=1e-6)

    def forward(s, tokens, mask=None):
        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        seq, pos = mask.nonzero(as_tuple=True)
        x = s.emb(tokens[seq, pos])
        for layer in s.layers:
            x = layer(x, seq, pos)
        x = s.norm(x)
        return x.new_zeros(*tokens.shape, x.shape[-1]).index_put((seq, pos), x)


args = dict(kind="encoder", build=Modern, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
            domain={"d_model": [16, 32], "num_heads": [2, 4]})
undeclared = Subject(**args)
declared = Subject(**args, declares={"causal": False, "positions": "rotary", "base": 160000.0, "layout": "halves", "norm": "rms",
                                     "norm_placement": "pre", "final_norm": True, "activation": "other", "bias": False,
                                     "padding_side": "both", "structure": "other", "batch_coupled": False})
