WHAT = 'Only the queries are normalised: keys and values are projected from the residual stream itself, which in a pre-norm layer no sublayer reads without its norm (line 21: attn(h, x, x)).'
from torch import nn

from veriformer.properties import Subject


class EncoderBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, d_model, n_heads, d_ff, dropout=0.0):
        super().__init__()
        self.norm1 = nn.LayerNorm(d_model)
        self.attn = nn.MultiheadAttention(d_model, n_heads, dropout=dropout, batch_first=True)
        self.norm2 = nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Dropout(dropout), nn.Linear(d_ff, d_model))
        self.drop = nn.Dropout(dropout)

    def forward(self, x, mask=None):
        ignored = None if mask is None else ~mask
        h = self.norm1(x)
        h, _ = self.attn(h, x, x, key_padding_mask=ignored, need_weights=False)
        x = x + self.drop(h)
        return x + self.drop(self.mlp(self.norm2(x)))


subject = Subject(
    kind="layer",
    name="pre-norm block on nn.MultiheadAttention",
    build=lambda c: EncoderBlock(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"norm_placement": "pre", "norm": "layer", "activation": "relu", "causal": False, "positions": "none"},
)
