"""Gemma 2 style: RMSNorm in float32 with gain (1 + w), norms before and after each sublayer, scaled tied embeddings,
grouped queries, scores and logits soft-capped, GeGLU. Unusual: every second layer is local (3 tokens); right, as layer 0 is
global, so that every output still sees its whole past."""
import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject


class RMS(nn.Module):
    def __init__(s, d):
        super().__init__()
        s.weight = nn.Parameter(torch.zeros(d))

    def forward(s, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (y * (1.0 + s.weight.float())).type_as(x)


def rope(x):
    T, K = x.shape[-2:]
    f = 10000.0 ** (-torch.arange(0, K, 2, dtype=torch.float64) / K)
    a = torch.outer(torch.arange(T, dtype=torch.float64), f).to(x.device)
    cos, sin = a.cos().to(x.dtype), a.sin().to(x.dtype)
    x1, x2 = x.chunk(2, -1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)


class Layer(nn.Module):
    def __init__(s, c, i):
        super().__init__()
        D, K = c.d_model, c.d_model // c.num_heads
        s.H, s.G, s.K, s.local = c.num_heads, c.num_key_value_heads or c.num_heads, K, i % 2 == 1
        s.q, s.kv, s.o = nn.Linear(D, D, bias=False), nn.Linear(D, 2 * s.G * K, bias=False), nn.Linear(D, D, bias=False)
        s.gate, s.up, s.down = nn.Linear(D, c.d_ff, bias=False), nn.Linear(D, c.d_ff, bias=False), nn.Linear(c.d_ff, D, bias=False)
        s.n1, s.n2, s.n3, s.n4 = (RMS(D) for _ in range(4))

    def attend(s, x, mask):
        B, T, _ = x.shape
        q = rope(s.q(x).view(B, T, s.H, s.K).transpose(1, 2))
        k, v = s.kv(x).view(B, T, 2, s.G, s.K).permute(2, 0, 3, 1, 4)
        k, v = (t.repeat_interleave(s.H // s.G, 1) for t in (rope(k), v))
        w = q @ k.mT * s.K**-0.5
        w = 5.0 * torch.tanh(w / 5.0)
        keep = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        if s.local:
            keep = keep.triu(-2)
        keep = keep if mask is None else keep & mask[:, None, None]
        w = w.masked_fill(~keep, torch.finfo(w.dtype).min).softmax(-1)
        return s.o((w @ v).transpose(1, 2).reshape(B, T, -1))

    def forward(s, x, mask):
        x = x + s.n2(s.attend(s.n1(x), mask))
        y = s.n3(x)
        return x + s.n4(s.down(F.gelu(s.gate(y), approximate="tanh") * s.up(y)))


class Gemma(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.emb, s.layers = nn.Embedding(c.vocab_size, c.d_model), nn.ModuleList(Layer(c, i) for i in range(c.num_layers))
        s.norm, s.d = RMS(c.d_model), c.d_model

    def forward(s, tokens, mask=None):
        x = s.emb(tokens) * s.d**0.5
        for layer in s.layers:
            x = layer(x, mask)
        return 30.0 * torch.tanh(s.norm(x) @ s.emb.weight.T / 30.0)


args = dict(kind="decoder", build=Gemma, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
            domain={"d_model": [16, 32], "num_heads": [2, 4]})
undeclared = Subject(**args)
declared = Subject(**args, declares={"causal": True, "positions": "rotary", "layout": "halves", "soft_cap": 5.0, "norm": "rms",
                                     "norm_placement": "other", "final_norm": True, "activation": "other", "bias": False,
                                     "output_bias": False, "tied": True, "embedding_scale": True, "structure": "other"})
