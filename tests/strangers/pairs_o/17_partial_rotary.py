"""GPT-NeoX in short, layers one after the other: rotary positions on the first four channels of each head."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

ROTARY_DIM = 4

WHAT = "The frequencies of the rotated channels are spaced by the width of the head instead of by the rotated width."
CAUSE = (
    "Partial rotary positions compute inv_freq = base^(-2i/head_dim) where 2i/rotary_dim belongs in the exponent: the "
    "rotated part uses the first, fast frequencies of a full-width table only; the first pair is right, the others turn "
    "too fast."
)


def rotary_tables(length, spread_over, like):
    kept = torch.promote_types(like.dtype, torch.float32)
    exponents = torch.arange(0, ROTARY_DIM, 2, device=like.device, dtype=kept) / spread_over
    inv_freq = 10000.0**-exponents
    angles = torch.outer(torch.arange(length, device=like.device, dtype=kept), inv_freq)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate_some(x, cos, sin):
    turned, kept = x[..., :ROTARY_DIM], x[..., ROTARY_DIM:]
    a, b = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-b, a), dim=-1) * sin
    return torch.cat((turned, kept), dim=-1)


def neox_layer(width, heads, inner):
    return nn.ModuleDict(
        dict(
            input_layernorm=nn.LayerNorm(width),
            query_key_value=nn.Linear(width, 3 * width),
            dense=nn.Linear(width, width),
            post_attention_layernorm=nn.LayerNorm(width),
            dense_h_to_4h=nn.Linear(width, inner),
            dense_4h_to_h=nn.Linear(inner, width),
        )
    )


class NeoX(nn.Module):
    def __init__(self, vocab, width, heads, layers, inner, spread):
        super().__init__()
        if width // heads < ROTARY_DIM:
            raise ValueError(f"a head of {width // heads} channels has no {ROTARY_DIM} to rotate")
        self.heads, self.head_dim = heads, width // heads
        self.spread_over = spread(self.head_dim)
        self.embed_in = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList([neox_layer(width, heads, inner) for _ in range(layers)])
        self.final_layer_norm = nn.LayerNorm(width)
        self.embed_out = nn.Linear(width, vocab, bias=False)

    def attend(self, layer, x):
        batch, length, width = x.shape
        fused = layer["query_key_value"](x).view(batch, length, self.heads, 3 * self.head_dim)
        q, k, v = fused.transpose(1, 2).chunk(3, dim=-1)
        cos, sin = rotary_tables(length, self.spread_over, x)
        q, k = rotate_some(q, cos, sin), rotate_some(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return layer["dense"](y.transpose(1, 2).reshape(batch, length, width))

    def forward(self, tokens):
        x = self.embed_in(tokens)
        for layer in self.layers:
            x = x + self.attend(layer, layer["input_layernorm"](x))
            y = layer["dense_h_to_4h"](layer["post_attention_layernorm"](x))
            x = x + layer["dense_4h_to_h"](F.gelu(y))
        return self.embed_out(self.final_layer_norm(x))


def neox(spread):
    return Subject(
        kind="decoder",
        name="small NeoX",
        build=lambda c: NeoX(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, spread),
        forward=lambda m, tokens: m(tokens),
        domain={"d_model": (32, 48), "num_heads": (2, 4)},
        declares={"positions": "rotary", "rotary_dim": ROTARY_DIM, "layout": "halves", "base": 10000,
                  "norm_placement": "pre", "activation": "gelu"},
    )  # fmt: skip


right = neox(lambda head_dim: ROTARY_DIM)
wrong = neox(lambda head_dim: head_dim)
