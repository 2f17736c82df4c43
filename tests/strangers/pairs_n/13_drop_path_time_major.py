"""A layer that works time-major inside ([T, B, D], as fairseq does) with stochastic depth on both sublayers."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

WHAT = "Stochastic depth draws one coin per time step instead of one per sample."
CAUSE = (
    "drop_path makes its mask of shape (x.shape[0], 1, 1), which is the batch only in batch-first tensors; here x is "
    "[T, B, D], so whole time steps (the same in every sample) lose the sublayer, and no sample is dropped as a whole."
)


class DropPath(nn.Module):
    """Drops the residual branch of some samples; x is [T, B, D]."""

    def __init__(self, drop_prob=0.0):
        super().__init__()
        self.drop_prob = drop_prob

    def shape(self, x):
        return (1, x.shape[1], 1)

    def forward(self, x):
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1.0 - self.drop_prob
        return x * x.new_empty(self.shape(x)).bernoulli_(keep).div_(keep)


class DropPathTimm(DropPath):
    """Drops the residual branch of some samples."""

    def shape(self, x):
        return (x.shape[0],) + (1,) * (x.ndim - 1)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.in_proj = nn.Linear(dim, 3 * dim)
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, x, key_padding=None):
        length, batch, dim = x.shape
        q, k, v = self.in_proj(x).view(length, batch, 3, self.heads, dim // self.heads).permute(2, 1, 3, 0, 4)
        scores = torch.matmul(q, k.transpose(-1, -2)) * (dim // self.heads) ** -0.5
        if key_padding is None:
            weights = F.softmax(scores, dim=-1)
        else:
            hidden = key_padding[:, None, None, :]
            weights = F.softmax(scores.masked_fill(hidden, torch.finfo(scores.dtype).min), dim=-1)
            weights = weights.masked_fill(hidden, 0.0)
        return self.out_proj(torch.matmul(weights, v).permute(2, 0, 1, 3).reshape(length, batch, dim))


class TransformerSentenceEncoderLayer(nn.Module):
    def __init__(self, dim, heads, ffn_dim, drop_path, path=DropPath):
        super().__init__()
        self.self_attn = Attention(dim, heads)
        self.self_attn_layer_norm = nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, ffn_dim), nn.Linear(ffn_dim, dim)
        self.final_layer_norm = nn.LayerNorm(dim)
        self.drop_path = path(drop_path)

    def forward(self, x, attention_mask=None):
        x = x.transpose(0, 1)  # B x T x C -> T x B x C
        padding = None if attention_mask is None else ~attention_mask
        x = x + self.drop_path(self.self_attn(self.self_attn_layer_norm(x), padding))
        x = x + self.drop_path(self.fc2(F.relu(self.fc1(self.final_layer_norm(x)))))
        return x.transpose(0, 1)


def subject(path):
    return Subject(
        kind="layer",
        name=f"layer with {path.__name__}",
        build=lambda c: TransformerSentenceEncoderLayer(c.d_model, c.num_heads, c.d_ff, c.dropout, path),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        mask_forms=("padding",),
    )


right = subject(DropPath)
wrong = subject(DropPathTimm)
