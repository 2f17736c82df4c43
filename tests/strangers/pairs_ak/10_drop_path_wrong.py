WHAT = "DropPath draws one number per index of axis 0 (line 18), which in this [T, B, D] layout is time: positions are dropped for all samples at once, rather than samples."
"""Pre-LN layer with stochastic depth; inside, as in fairseq, time comes first: [T, B, D]."""
import torch
from torch import nn

from veriformer.properties import Subject


class DropPath(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, branch):
        if not self.training or self.p == 0.0:
            return branch
        keep = 1.0 - self.p
        shape = (branch.shape[0], 1, 1)
        return branch * branch.new_empty(shape).bernoulli_(keep).div_(keep)


class EncoderLayer(nn.Module):
    def __init__(self, embed_dim, heads, ffn_dim, drop_path):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(embed_dim, heads)
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.fc1, self.fc2 = nn.Linear(embed_dim, ffn_dim), nn.Linear(ffn_dim, embed_dim)
        self.final_layer_norm = nn.LayerNorm(embed_dim)
        self.activation_fn = nn.ReLU()
        self.drop_path = DropPath(drop_path)

    def forward(self, x, encoder_padding_mask=None):
        residual = x
        x = self.self_attn_layer_norm(x)
        x, _ = self.self_attn(x, x, x, key_padding_mask=encoder_padding_mask, need_weights=False)
        x = residual + self.drop_path(x)
        residual = x
        x = self.fc2(self.activation_fn(self.fc1(self.final_layer_norm(x))))
        return residual + self.drop_path(x)


def forward(model, x, attention_mask=None):
    padding = None if attention_mask is None else ~attention_mask
    return model(x.transpose(0, 1), padding).transpose(0, 1)


subject = Subject(
    kind="layer",
    name="layer with stochastic depth",
    build=lambda c: EncoderLayer(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=forward,
    declares={
        "causal": False, "norm": "layer", "norm_placement": "pre", "activation": "relu", "drop_path_scaled": True,
    },
)
