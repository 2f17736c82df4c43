"""Transformer-XL without recurrence (Dai et al. 2019): content bias u, position bias v, and the relative shift."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


def sinusoid(position, width):
    inverse = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64, device=position.device) / width)
    angle = position.double()[:, None] * inverse
    return torch.cat([angle.sin(), angle.cos()], dim=-1)[:, :width]


def rel_shift(x):
    """[B, H, T, R]: row i moves left by T - 1 - i, the trick of the appendix (pad, reshape, cut)."""
    B, H, T, R = x.shape
    x = torch.cat([x.new_zeros(B, H, T, 1), x], dim=-1)
    return x.reshape(B, H, R + 1, T)[:, :, 1:].reshape(B, H, T, R)


class RelAttention(nn.Module):
    def __init__(self, d_model, n_head):
        super().__init__()
        self.n_head, self.d_head = n_head, d_model // n_head
        self.q, self.k, self.v, self.r, self.o = (nn.Linear(d_model, d_model, bias=False) for _ in range(5))
        self.u_bias = nn.Parameter(0.1 * torch.randn(n_head, self.d_head))
        self.v_bias = nn.Parameter(0.1 * torch.randn(n_head, self.d_head))

    def forward(self, h, r):
        B, T, D = h.shape
        split = lambda z: z.reshape(*z.shape[:-1], self.n_head, self.d_head)
        q, k, v = split(self.q(h)), split(self.k(h)), split(self.v(h))
        rel = split(self.r(r))
        ac = torch.einsum("bihd,bjhd->bhij", q + self.u_bias, k)
        bd = rel_shift(torch.einsum("bihd,jhd->bhij", q + self.v_bias, rel))
        score = (ac + bd) / math.sqrt(self.d_head)
        future = torch.ones(T, T, dtype=torch.bool, device=h.device).triu(1)
        prob = score.masked_fill(future, -torch.inf).softmax(-1)
        return self.o(torch.einsum("bhij,bjhd->bihd", prob, v).reshape(B, T, D))


class Layer(nn.Module):
    def __init__(self, d_model, n_head, d_inner):
        super().__init__()
        self.attn = RelAttention(d_model, n_head)
        self.ff = nn.Sequential(nn.Linear(d_model, d_inner), nn.ReLU(), nn.Linear(d_inner, d_model))
        self.ln1, self.ln2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, h, r):
        h = self.ln1(h + self.attn(h, r))
        return self.ln2(h + self.ff(h))


class TransformerXL(nn.Module):
    def __init__(self, n_token, d_model, n_head, d_inner, n_layer):
        super().__init__()
        self.d_model = d_model
        self.emb = nn.Embedding(n_token, d_model)
        self.layers = nn.ModuleList(Layer(d_model, n_head, d_inner) for _ in range(n_layer))
        self.out = nn.Linear(d_model, n_token)

    def forward(self, tokens):
        h = self.emb(tokens)
        T = tokens.shape[1]
        pos_seq = torch.arange(T - 1, -1, -1, device=tokens.device)
        r = sinusoid(pos_seq, self.d_model).to(h.dtype)
        for layer in self.layers:
            h = layer(h, r)
        return self.out(h)


subject = Subject(
    kind="decoder",
    build=lambda c: TransformerXL(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers),
    forward=lambda m, tokens: m(tokens),
    declares={"positions": "relative", "norm": "layer", "norm_placement": "post", "activation": "relu"},
)
