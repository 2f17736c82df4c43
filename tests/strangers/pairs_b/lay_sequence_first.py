"""A sequence-first layer behind a batch-first interface; torch.nn does the attention."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class Layer(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(c.d_model, c.num_heads, dropout=c.dropout)
        self.linear1, self.linear2 = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.drop = nn.Dropout(c.dropout)
        self.bad = bad

    def forward(self, x, attention_mask=None):
        b, t, d = x.shape
        x = x.transpose(0, 1)
        padding = None if attention_mask is None else ~attention_mask
        y, _ = self.self_attn(x, x, x, key_padding_mask=padding, need_weights=False)
        x = self.norm1(x + self.drop(y))
        x = self.norm2(x + self.drop(self.linear2(F.relu(self.linear1(x)))))
        return x.reshape(b, t, d) if self.bad else x.transpose(0, 1)


def subject(bad):
    return Subject(kind="layer", build=lambda c: Layer(c, bad), forward=lambda m, x, attention_mask=None: m(x, attention_mask), mask_forms=("padding",))


right, wrong = subject(False), subject(True)
WHAT = "The way back from sequence-first to batch-first is a reshape instead of a transpose, which scrambles positions and samples as soon as there are two of each."
PLACE = "output of the layer (layout)"
