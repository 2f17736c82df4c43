"""Sandwich norms (CogView, Gemma 2): a norm before and a norm behind every sublayer, inside the skip. Flat lists of parts."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    """Gemma's: the gain is kept as its distance from 1."""

    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.gain, self.eps = nn.Parameter(torch.zeros(width)), eps

    def forward(self, x):
        wide = x if x.dtype == torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1 + self.gain)).to(x.dtype)


def each(make, number):
    return nn.ModuleList([make() for _ in range(number)])


def one(make, number):
    return nn.ModuleList([make()] * number)


class SandwichGPT(nn.Module):
    def __init__(self, c, closing):
        """`closing(make, number)` makes the list of norms behind the sublayers."""
        super().__init__()
        n, d = c.num_layers, c.d_model
        self.heads = c.num_heads
        self.embed, self.place = nn.Embedding(c.vocab_size, d), nn.Embedding(c.max_len, d)
        self.attn_in, self.mlp_in = each(lambda: RMSNorm(d), n), each(lambda: RMSNorm(d), n)
        self.attn_out, self.mlp_out = closing(lambda: RMSNorm(d), n), closing(lambda: RMSNorm(d), n)
        self.qkv = each(lambda: nn.Linear(d, 3 * d, bias=False), n)
        self.proj = each(lambda: nn.Linear(d, d, bias=False), n)
        self.gate_up = each(lambda: nn.Linear(d, 2 * c.d_ff, bias=False), n)
        self.down = each(lambda: nn.Linear(c.d_ff, d, bias=False), n)
        self.norm, self.head = RMSNorm(d), nn.Linear(d, c.vocab_size, bias=False)

    def attend(self, i, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv[i](x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj[i](y.transpose(1, 2).reshape(b, t, d))

    def feed(self, i, x):
        gate, up = self.gate_up[i](x).chunk(2, -1)
        return self.down[i](F.silu(gate) * up)

    def forward(self, tokens):
        where = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.place(where)
        for i in range(len(self.qkv)):
            x = x + self.attn_out[i](self.attend(i, self.attn_in[i](x)))
            x = x + self.mlp_out[i](self.feed(i, self.mlp_in[i](x)))
        return self.head(self.norm(x))


def subject(name, closing):
    return Subject(
        kind="decoder",
        name=name,
        build=lambda c: SandwichGPT(c, closing),
        forward=lambda m, tokens: m(tokens),
        declares={"causal": True, "norm_placement": "other", "norm": "rms", "activation": "swiglu", "bias": False,
                  "shared_layers": False, "structure": "other"},
    )


right = subject("sandwich", each)
wrong = subject("sandwich, one slice", one)

WHAT = "The lists of closing norms are made by [RMSNorm(d)] * n: all layers share one norm."
CAUSE = (
    "ModuleList([make()] * number) repeats one object: attn_out and mlp_out hold a single gain vector each, used in every layer, "
    "though layers are declared not to share parameters (n - 1 gains fewer than there should be)."
)
