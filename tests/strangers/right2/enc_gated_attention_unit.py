"""FLASH's gated attention unit: relu(qk + bias)^2 / n instead of softmax, queries and keys from one shared small vector,
a learned table of clipped distances. Unusual: rows do not sum to 1 and many weights are exactly 0 (hence sparse); right under padding as n counts the real keys only."""
import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject
CLIP = 8


class GAU(nn.Module):
    def __init__(s, c):
        super().__init__()
        D, E, s.S = c.d_model, c.d_ff, max(4, c.d_model // 2)
        s.ln, s.inp, s.out, s.E = nn.LayerNorm(D), nn.Linear(D, 2 * E + s.S), nn.Linear(E, D), E
        s.gamma, s.beta = nn.Parameter(torch.randn(2, s.S) * 0.3 + 1), nn.Parameter(torch.zeros(2, s.S))
        s.rel = nn.Embedding(2 * CLIP + 1, 1)

    def forward(s, x, mask):
        T = x.shape[1]
        u, v, z = F.silu(s.inp(s.ln(x))).split((s.E, s.E, s.S), -1)
        q, k = (z[..., None, :] * s.gamma + s.beta).unbind(-2)
        i = torch.arange(T, device=x.device)
        bias = s.rel((i[None] - i[:, None]).clamp(-CLIP, CLIP) + CLIP)[..., 0]
        a = F.relu(q @ k.mT / s.S**0.5 + bias) ** 2
        if mask is None:
            a = a / T
        else:
            a = a * mask[:, None].to(a.dtype) / mask.sum(1).clamp(min=1)[:, None, None].to(a.dtype)
        return x + s.out(u * (a @ v))


class Net(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.emb, s.gaus = nn.Embedding(c.vocab_size, c.d_model), nn.ModuleList(GAU(c) for _ in range(c.num_layers))
        s.norm = nn.LayerNorm(c.d_model)

    def forward(s, tokens, mask=None):
        x = s.emb(tokens)
        for g in s.gaus:
            x = g(x, mask)
        return s.norm(x)


args = dict(kind="encoder", build=Net, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask))
undeclared = Subject(**args)
declared = Subject(**args, declares={"causal": False, "sparse": True, "positions": "relative", "bidirectional": True, "norm": "layer", "norm_placement": "pre",
                                     "final_norm": True, "activation": "other", "padding_side": "both", "structure": "other"})
