"""A stack of TransformerEncoderLayers after fairseq, with normalize_before."""

import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class SelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.in_proj = nn.Linear(dim, 3 * dim)
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        B, T, C = x.shape
        q, k, v = self.in_proj(x).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        if mask is not None:
            mask = mask[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out_proj(y.transpose(1, 2).reshape(B, T, C))


class TransformerEncoderLayer(nn.Module):
    def __init__(self, embed_dim, ffn_dim, heads, dropout, normalize_before=True):
        super().__init__()
        self.self_attn = SelfAttention(embed_dim, heads)
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.dropout = dropout
        self.normalize_before = normalize_before
        self.fc1 = nn.Linear(embed_dim, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, embed_dim)
        self.final_layer_norm = nn.LayerNorm(embed_dim)

    def maybe_layer_norm(self, layer_norm, x, before=False, after=False):
        assert before ^ after
        if after ^ self.normalize_before:
            return layer_norm(x)
        return x

    def forward(self, x, mask=None):
        residual = x
        x = self.maybe_layer_norm(self.self_attn_layer_norm, x, before=True)
        x = self.self_attn(x, mask)
        x = F.dropout(x, p=self.dropout, training=self.training)
        x = residual + x
        x = self.maybe_layer_norm(self.self_attn_layer_norm, x, after=True)

        residual = x
        x = self.maybe_layer_norm(self.final_layer_norm, x, before=True)
        x = F.relu(self.fc1(x))
        x = self.fc2(x)
        x = F.dropout(x, p=self.dropout, training=self.training)
        x = residual + x
        x = self.maybe_layer_norm(self.final_layer_norm, x, after=True)
        return x


class Stack(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.layers = nn.ModuleList(
            [TransformerEncoderLayer(c.d_model, c.d_ff, c.num_heads, c.dropout) for _ in range(c.num_layers)]
        )

    def forward(self, x, mask=None):
        for layer in self.layers:
            x = layer(x, mask)
        return x


subject = Subject(
    kind="layer",
    name="fairseq encoder layers",
    build=Stack,
    forward=lambda model, x, attention_mask=None: model(x, attention_mask),
    declares={
        "causal": False,
        "positions": "none",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": False,
        "activation": "relu",
        "residual": True,
        "bias": True,
    },
)
