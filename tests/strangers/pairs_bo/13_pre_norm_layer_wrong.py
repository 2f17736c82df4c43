WHAT = "the second residual adds the layer's input x instead of h, so that the attention's output is not in the residual stream and reaches the output through the MLP alone (line 28)."
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class TransformerLayer(nn.Module):
    def __init__(self, dim, num_heads, hidden, dropout=0.0):
        super().__init__()
        self.num_heads = num_heads
        self.ln_attn = nn.LayerNorm(dim)
        self.ln_mlp = nn.LayerNorm(dim)
        self.in_proj = nn.Linear(dim, 3 * dim)
        self.out_proj = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
        self.drop = nn.Dropout(dropout)

    def self_attention(self, x, mask):
        q, k, v = self.in_proj(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mask = None if mask is None else mask[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out_proj(y.transpose(1, 2).flatten(2))

    def forward(self, x, mask=None):
        h = x + self.drop(self.self_attention(self.ln_attn(x), mask))
        return x + self.drop(self.mlp(self.ln_mlp(h)))


subject = Subject(
    kind="layer",
    name="pre-norm layer",
    build=lambda c: TransformerLayer(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    mask_forms=("padding",),
    declares={
        "causal": False,
        "norm": "layer",
        "norm_placement": "pre",
        "residual": True,
        "activation": "gelu",
        "positions": "none",
    },
)
