"""Transformer-XL's attention as a small decoder, after Dai et al. 2019, appendix B; plain functions where possible."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def sinusoid(places, width, like):
    rates = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64, device=like.device) / width)
    angles = places.to(torch.float64)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], -1)[:, :width].to(like.dtype)


def rel_shift(scores):
    """[B, H, T, T], column c belongs to the c-th row of the table: pad one, reshape, cut; O(T^2) without a gather."""
    b, h, t, _ = scores.shape
    return F.pad(scores, (1, 0)).view(b, h, t + 1, t)[:, :, 1:]


def ladder_down(length, device):
    return torch.arange(length - 1, -1, -1, device=device)


def ladder_up(length, device):
    return torch.arange(length, device=device)


class RelAttention(nn.Module):
    def __init__(self, d_model, n_head, ladder):
        super().__init__()
        self.n_head, self.ladder = n_head, ladder
        self.qkv_net = nn.Linear(d_model, 3 * d_model, bias=False)
        self.r_net = nn.Linear(d_model, d_model, bias=False)
        self.o_net = nn.Linear(d_model, d_model, bias=False)
        self.r_w_bias = nn.Parameter(0.3 * torch.randn(n_head, d_model // n_head))
        self.r_r_bias = nn.Parameter(0.3 * torch.randn(n_head, d_model // n_head))

    def forward(self, w, visible):
        b, t, d = w.shape
        q, k, v = (z.view(b, t, self.n_head, -1) for z in self.qkv_net(w).chunk(3, -1))
        r = self.r_net(sinusoid(self.ladder(t, w.device), d, w)).view(t, self.n_head, -1)
        ac = torch.einsum("binh,bjnh->bnij", q + self.r_w_bias, k)
        bd = rel_shift(torch.einsum("binh,jnh->bnij", q + self.r_r_bias, r))
        scores = (ac + bd) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        out = torch.einsum("bnij,bjnh->binh", scores.softmax(-1), v)
        return self.o_net(out.reshape(b, t, d))


class Layer(nn.Module):
    def __init__(self, d_model, n_head, d_inner, ladder):
        super().__init__()
        self.ln_a, self.ln_f = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.dec_attn = RelAttention(d_model, n_head, ladder)
        self.pos_ff = nn.Sequential(nn.Linear(d_model, d_inner), nn.ReLU(), nn.Linear(d_inner, d_model))

    def forward(self, w, visible):
        w = w + self.dec_attn(self.ln_a(w), visible)
        return w + self.pos_ff(self.ln_f(w))


class MiniXL(nn.Module):
    def __init__(self, c, ladder):
        super().__init__()
        self.word_emb = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList([Layer(c.d_model, c.num_heads, c.d_ff, ladder) for _ in range(c.num_layers)])
        self.ln = nn.LayerNorm(c.d_model)
        self.crit = nn.Linear(c.d_model, c.vocab_size)

    def forward(self, tokens, attention_mask=None):
        t = tokens.shape[1]
        visible = torch.ones(t, t, dtype=torch.bool, device=tokens.device).tril()[None, None]
        if attention_mask is not None:  # every token sees itself, so that no row is empty
            visible = (visible & attention_mask.bool()[:, None, None]) | torch.eye(t, dtype=torch.bool, device=tokens.device)
        w = self.word_emb(tokens)
        for layer in self.layers:
            w = layer(w, visible)
        return self.crit(self.ln(w))


def subject(name, ladder):
    return Subject(
        kind="decoder",
        name=name,
        build=lambda c: MiniXL(c, ladder),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"causal": True, "positions": "relative", "norm_placement": "pre", "norm": "layer", "activation": "relu"},
    )


right = subject("mini XL", ladder_down)
wrong = subject("mini XL, other ladder", ladder_up)

WHAT = "The table of relative encodings is laid out in ascending order (0 .. T-1) though the relative shift expects it descending."
CAUSE = (
    "In RelAttention the distance i-j is scored with the encoding of T-1-(i-j): positions are counted from the end of the "
    "current sequence, so the same prefix gets other outputs once more tokens follow it."
)
