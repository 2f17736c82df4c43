"""GPT for classification: causal, multi-query with rotary positions, reads the last real token wherever the padding is.
Unusual: it finds that token from the mask rather than taking -1; right on either side. Residual branches are scaled by
1/sqrt(2 N)."""
import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject


def rot(x):
    T, K = x.shape[-2:]
    a = torch.outer(torch.arange(T, dtype=torch.float64), 10000.0 ** (-torch.arange(0, K, 2, dtype=torch.float64) / K)).to(x.device)
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    turn = torch.complex(a.cos().to(x.dtype), a.sin().to(x.dtype))
    return torch.view_as_real(z * turn).flatten(-2)


class Block(nn.Module):
    def __init__(s, c):
        super().__init__()
        D, K = c.d_model, c.d_model // c.num_heads
        s.h, s.K, s.scale = c.num_heads, K, (2 * c.num_layers) ** -0.5
        s.qkv, s.o = nn.Linear(D, D + 2 * K, bias=False), nn.Linear(D, D, bias=False)
        s.w1, s.w3, s.w2 = nn.Linear(D, c.d_ff, bias=False), nn.Linear(D, c.d_ff, bias=False), nn.Linear(c.d_ff, D, bias=False)
        s.n1, s.n2 = nn.RMSNorm(D, eps=1e-6), nn.RMSNorm(D, eps=1e-6)

    def forward(s, x, keep):
        q, k, v = s.qkv(s.n1(x)).split((x.shape[-1], s.K, s.K), -1)
        q = rot(q.unflatten(-1, (s.h, s.K)).transpose(1, 2))
        k, v = rot(k[:, None]), v[:, None]
        w = (q @ k.mT * s.K**-0.5).masked_fill(~keep, -1e9).softmax(-1)
        x = x + s.scale * s.o((w @ v).transpose(1, 2).flatten(2))
        y = s.n2(x)
        return x + s.scale * s.w2(F.silu(s.w1(y)) * s.w3(y))


class Cls(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.emb, s.blocks = nn.Embedding(c.vocab_size, c.d_model), nn.ModuleList(Block(c) for _ in range(c.num_layers))
        s.norm, s.score = nn.RMSNorm(c.d_model, eps=1e-6), nn.Linear(c.d_model, c.num_classes, bias=False)

    def forward(s, tokens, mask=None):
        B, T = tokens.shape
        keep = torch.ones(T, T, dtype=torch.bool, device=tokens.device).tril()
        last = torch.full((B,), T - 1, device=tokens.device)
        if mask is not None:
            keep = keep & mask[:, None, None]
            last = (mask * torch.arange(T, device=tokens.device)).argmax(1)
        x = s.emb(tokens)
        for b in s.blocks:
            x = b(x, keep)
        return s.score(s.norm(x[torch.arange(B, device=tokens.device), last]))


args = dict(kind="classifier", build=Cls, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
            domain={"d_model": [16, 32], "num_heads": [2, 4]})
undeclared = Subject(**args)
declared = Subject(**args, declares={"causal": True, "positions": "rotary", "layout": "interleaved", "pooling": "last", "norm": "rms",
                                     "norm_placement": "pre", "final_norm": True, "activation": "swiglu", "bias": False, "output_bias": False,
                                     "padding_side": "both", "structure": "other"})
