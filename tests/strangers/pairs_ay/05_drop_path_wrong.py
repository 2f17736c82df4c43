WHAT = "Stochastic depth draws one number for each entry of axis 0, which is time in this layout: branches are dropped for time steps (of all samples alike) and not for samples, line 16."
"""Encoder in fairseq's layout (time first) with stochastic depth."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def drop_path(x, rate, training):
    """Leaves out the whole branch for some samples of x, time x batch x channels."""
    if rate == 0.0 or not training:
        return x
    keep = 1.0 - rate
    shape = (x.size(0),) + (1,) * (x.dim() - 1)
    return x * x.new_empty(shape).bernoulli_(keep).div_(keep)


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads, ffn_dim, rate):
        super().__init__()
        self.rate = rate
        self.self_attn = nn.MultiheadAttention(dim, heads)
        self.self_attn_layer_norm = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, dim)
        self.final_layer_norm = nn.LayerNorm(dim)

    def attend(self, x, padding_mask):
        y = self.self_attn_layer_norm(x)
        return self.self_attn(y, y, y, key_padding_mask=padding_mask, need_weights=False)[0]

    def feed(self, x):
        return self.fc2(F.relu(self.fc1(self.final_layer_norm(x))))

    def forward(self, x, padding_mask=None):
        x = x + drop_path(self.attend(x, padding_mask), self.rate, self.training)
        return x + drop_path(self.feed(x), self.rate, self.training)


class Encoder(nn.Module):
    def __init__(self, vocab, dim, heads, layers, ffn_dim, max_len, rate):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.embed_positions = nn.Embedding(max_len, dim)
        self.layers = nn.ModuleList([EncoderLayer(dim, heads, ffn_dim, rate) for _ in range(layers)])
        self.layer_norm = nn.LayerNorm(dim)

    def forward(self, src_tokens, padding_mask=None):
        positions = torch.arange(src_tokens.size(1), device=src_tokens.device)
        x = self.embed_tokens(src_tokens) + self.embed_positions(positions)
        x = x.transpose(0, 1)
        for layer in self.layers:
            x = layer(x, padding_mask)
        return self.layer_norm(x).transpose(0, 1)


subject = Subject(
    kind="encoder",
    name="encoder with stochastic depth",
    build=lambda c: Encoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.dropout),
    forward=lambda m, tokens, attention_mask=None: m(tokens, None if attention_mask is None else ~attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "padding_side": "right",
        "drop_path_scaled": True,
    },
)
