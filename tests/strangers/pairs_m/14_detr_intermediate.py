"""zoo/PR 221: `return_intermediate` for the pre-norm encoder (auxiliary losses after every layer, DETR's way)."""

import copy
import math

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "The closing norm, meant for the copies that are collected, is assigned to the stream between the layers."
CAUSE = (
    "In the loop over the layers `output = self.norm(output)` replaces the residual stream instead of normalising only "
    "the copy for the list, so each further layer starts from a normalised stream: the pre-LN stack has one norm too "
    "many behind every layer but the last."
)


def sine_positions(length, d_model, like):
    position = torch.arange(length, dtype=torch.float64, device=like.device)[:, None]
    rate = torch.exp(torch.arange(0, d_model, 2, dtype=torch.float64, device=like.device) * (-math.log(10000.0) / d_model))
    table = torch.zeros(length, d_model, dtype=torch.float64, device=like.device)
    table[:, 0::2] = torch.sin(position * rate)
    table[:, 1::2] = torch.cos(position * rate[: d_model // 2])
    return table.to(like.dtype)


class EncoderLayer(nn.Module):
    def __init__(self, d_model, nhead, dim_feedforward, dropout):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(d_model, nhead, dropout=dropout, batch_first=True)
        self.linear1 = nn.Linear(d_model, dim_feedforward)
        self.linear2 = nn.Linear(dim_feedforward, d_model)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, src, key_padding_mask=None):
        src2 = self.norm1(src)
        src2 = self.self_attn(src2, src2, src2, key_padding_mask=key_padding_mask, need_weights=False)[0]
        src = src + self.dropout1(src2)
        src2 = self.linear2(torch.relu(self.linear1(self.norm2(src))))
        return src + self.dropout2(src2)


class Encoder(nn.Module):
    def __init__(self, make_layer, num_layers, norm):
        super().__init__()
        self.layers = nn.ModuleList([make_layer() for _ in range(num_layers)])
        self.norm = norm

    def forward(self, src, key_padding_mask=None):
        output, intermediate = src, []
        for layer in self.layers:
            output = layer(output, key_padding_mask)
            intermediate.append(self.norm(output))
        return intermediate


class EncoderInLine(Encoder):
    def forward(self, src, key_padding_mask=None):
        output, intermediate = src, []
        for layer in self.layers:
            output = layer(output, key_padding_mask)
            output = self.norm(output)
            intermediate.append(output)
        return intermediate


class TextDETR(nn.Module):
    def __init__(self, c, encoder):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.encoder = encoder(
            lambda: EncoderLayer(c.d_model, c.num_heads, c.d_ff, c.dropout), c.num_layers, nn.LayerNorm(c.d_model)
        )

    def forward(self, tokens, mask=None):
        x = self.embed(tokens)
        x = x + sine_positions(x.size(1), x.size(2), x)
        blocked = None
        if mask is not None:
            blocked = ~mask
            blocked = blocked & ~blocked.all(1, keepdim=True)  # a sample of padding alone looks at itself
        return self.encoder(x, blocked)[-1]


DECLARES = {
    "causal": False, "positions": "sinusoidal", "norm_placement": "pre", "norm": "layer", "final_norm": True,
    "activation": "relu", "padding_side": "right",
}  # fmt: skip


def subject(encoder):
    return Subject(
        kind="encoder",
        name=f"TextDETR({encoder.__name__})",
        build=lambda c: TextDETR(c, encoder),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares=copy.copy(DECLARES),
    )


right, wrong = subject(Encoder), subject(EncoderInLine)
