"""Prefix language model (the first 3 positions see one another both ways) with DeepNorm: LayerNorm(alpha x + f(x)) after
each sublayer, sinusoidal positions, scaled embeddings. Unusual: the prefix and a residual weight beside 1."""
import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject
PREFIX = 3


def sinusoids(T, D, like):
    a = torch.arange(T, dtype=torch.float64)[:, None] / 10000 ** (torch.arange(0, D, 2, dtype=torch.float64) / D)
    return torch.stack((a.sin(), a.cos()), -1).flatten(1).to(like)


class Layer(nn.Module):
    def __init__(s, c):
        super().__init__()
        D = c.d_model
        s.h, s.alpha = c.num_heads, (2 * c.num_layers) ** 0.25
        s.q, s.k, s.v, s.o = (nn.Linear(D, D) for _ in range(4))
        s.w1, s.w2, s.n1, s.n2 = nn.Linear(D, c.d_ff), nn.Linear(c.d_ff, D), nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(s, x, keep):
        q, k, v = (p(x).unflatten(-1, (s.h, -1)).transpose(1, 2) for p in (s.q, s.k, s.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        x = s.n1(s.alpha * x + s.o(y.transpose(1, 2).flatten(2)))
        return s.n2(s.alpha * x + s.w2(F.relu(s.w1(x))))


class PrefixLM(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.emb, s.layers = nn.Embedding(c.vocab_size, c.d_model), nn.ModuleList(Layer(c) for _ in range(c.num_layers))
        s.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(s, tokens, mask=None):
        T = tokens.shape[1]
        x = s.emb(tokens) * s.emb.embedding_dim**0.5
        x = x + sinusoids(T, x.shape[-1], x)
        i = torch.arange(T, device=x.device)
        keep = (i[None] <= i[:, None]) | ((i < PREFIX)[None] & (i < PREFIX)[:, None])
        if mask is not None:
            keep = keep & mask[:, None, None] | torch.eye(T, dtype=torch.bool, device=x.device)
        for layer in s.layers:
            x = layer(x, keep)
        return s.head(x)


args = dict(kind="decoder", build=PrefixLM, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask))
undeclared = Subject(**args)
declared = Subject(**args, declares={"causal": True, "prefix": PREFIX, "positions": "sinusoidal", "layout": "interleaved", "norm": "layer",
                                     "norm_placement": "post", "final_norm": False, "activation": "relu", "embedding_scale": True,
                                     "tied": False, "output_bias": False, "padding_side": "right", "structure": "other"})
