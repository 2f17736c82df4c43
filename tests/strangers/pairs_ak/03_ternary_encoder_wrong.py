WHAT = "The straight-through estimator is detached the wrong way round (BitLinear.forward, line 18): forward uses the unrounded weight and the gradient goes through round(), so every linear weight gets gradient zero."
"""Encoder trained with ternary weights (b1.58): values -s, 0, s going forward, straight through going back."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def ternary(weight):
    scale = weight.detach().abs().mean().clamp(min=1e-5)
    return (weight / scale).round().clamp(-1, 1) * scale


class BitLinear(nn.Linear):
    def forward(self, x):
        rounded = ternary(self.weight)
        weight = rounded + (self.weight - rounded).detach()
        return F.linear(x, weight, self.bias)


class EncoderLayer(nn.Module):
    def __init__(self, d_model, num_heads, d_ff):
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.q_proj, self.k_proj = BitLinear(d_model, d_model), BitLinear(d_model, d_model)
        self.v_proj, self.o_proj = BitLinear(d_model, d_model), BitLinear(d_model, d_model)
        self.up, self.down = BitLinear(d_model, d_ff), BitLinear(d_ff, d_model)

    def forward(self, x, visible):
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if visible is not None:
            scores = scores.masked_fill(~visible[:, None, None, :], torch.finfo(scores.dtype).min)
        x = x + self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norm2(x))))


class BitEncoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(EncoderLayer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)

    def forward(self, tokens, visible=None):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, visible)
        return self.norm(x)


subject = Subject(
    kind="encoder",
    name="ternary encoder",
    build=BitEncoder,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False, "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
        "activation": "relu", "quantised": True, "padding_side": "right",
    },
)
