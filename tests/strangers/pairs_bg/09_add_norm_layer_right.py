"""A pre-norm block with "add and norm" as one function, as inference engines have it."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def add_norm(update, residual, gain, bias, eps=1e-5):
    """Returns the norm of the sum and the sum: the new residual."""
    total = update + residual
    mean = total.mean(-1, keepdim=True)
    centred = total.sub(mean)
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return centred * rstd * gain + bias, total


class Block(nn.Module):
    def __init__(self, d, n_head, d_ff):
        super().__init__()
        self.n_head = n_head
        self.ln_1 = nn.LayerNorm(d)
        self.ln_2 = nn.LayerNorm(d)
        self.attn_in = nn.Linear(d, 3 * d)
        self.attn_out = nn.Linear(d, d)
        self.fc = nn.Linear(d, d_ff)
        self.fc_out = nn.Linear(d_ff, d)

    def attend(self, h):
        B, T, C = h.shape
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.attn_in(h).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attn_out(y.transpose(1, 2).reshape(B, T, C))

    def forward(self, x):
        update = self.attend(self.ln_1(x))
        h, x = add_norm(update, x, self.ln_2.weight, self.ln_2.bias, self.ln_2.eps)
        return x + self.fc_out(F.gelu(self.fc(h)))


subject = Subject(
    kind="layer",
    name="add-and-norm block",
    build=lambda c: Block(c.d_model, c.num_heads, c.d_ff),
    forward=lambda m, x: m(x),
    declares={
        "causal": True,
        "positions": "none",
        "norm": "layer",
        "norm_placement": "pre",
        "residual": True,
        "activation": "gelu",
        "bias": True,
    },
)
