"""ALBERT as a decoder: one layer applied num_layers times, embeddings factorised through a narrow width, tied both ways.
Unusual: ALiBi's bias is slope * key index, without the query index; right, as softmax does not feel what is constant in a
row. The vocabulary is padded to a multiple of 8 and the padding cut off the logits."""
import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject


class Albert(nn.Module):
    def __init__(s, c):
        super().__init__()
        D, E = c.d_model, max(2, c.d_model // 2)
        s.V, s.N, s.h = c.vocab_size, c.num_layers, c.num_heads
        s.table, s.lift = nn.Embedding(-(-c.vocab_size // 8) * 8, E), nn.Linear(E, D, bias=False)
        s.n1, s.n2, s.nf = nn.LayerNorm(D), nn.LayerNorm(D), nn.LayerNorm(D)
        s.qkv, s.o, s.up, s.down = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Linear(D, c.d_ff), nn.Linear(c.d_ff, D)
        s.register_buffer("slopes", 2.0 ** (-8.0 * torch.arange(1, s.h + 1) / s.h))

    def forward(s, tokens, mask=None):
        x = s.lift(s.table(tokens))
        B, T, D = x.shape
        bias = s.slopes[:, None, None] * torch.arange(T, device=x.device).to(x.dtype)
        hide = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        if mask is not None:
            hide = hide | ~mask[:, None, None]
        for _ in range(s.N):
            q, k, v = s.qkv(s.n1(x)).view(B, T, 3, s.h, D // s.h).permute(2, 0, 3, 1, 4)
            w = ((q * (D // s.h) ** -0.5) @ k.mT + bias).masked_fill(hide, torch.finfo(x.dtype).min).softmax(-1)
            x = x + s.o((w @ v).transpose(1, 2).flatten(2))
            x = x + s.down(F.gelu(s.up(s.n2(x))))
        return (s.nf(x) @ s.lift.weight @ s.table.weight.T)[..., : s.V]


args = dict(kind="decoder", build=Albert, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask))
undeclared = Subject(**args)
declared = Subject(**args, declares={"causal": True, "positions": "alibi", "shared_layers": True, "norm": "layer", "norm_placement": "pre",
                                     "final_norm": True, "activation": "gelu", "tied": True, "output_bias": False, "structure": "other",
                                     "padding_side": "both"})
