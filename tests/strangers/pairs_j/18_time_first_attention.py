"""Self-attention that computes with time first and is called with the batch first."""

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "[B, T, D] is brought to [T, B, D] by a reshape, which mixes samples and time"
CAUSE = (
    "The input is reshaped from [B, T, D] to [T, B, D] (and back) instead of transposed, so that samples of a batch and "
    "positions are mixed; with a batch of one nothing is wrong."
)


class TimeFirst(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.in_proj = nn.Linear(dim, 3 * dim)
        self.out_proj = nn.Linear(dim, dim)

    def swap(self, x):
        return x.transpose(0, 1)

    def forward(self, x, attention_mask=None):
        x = self.swap(x)
        T, B, D = x.shape
        q, k, v = self.in_proj(x).chunk(3, dim=-1)
        q, k, v = (t.reshape(T, B, self.heads, D // self.heads) for t in (q, k, v))
        scores = torch.einsum("tbhk,sbhk->bhts", q, k) / (D // self.heads) ** 0.5
        if attention_mask is not None:
            scores = scores.masked_fill(~attention_mask[:, None, None, :], torch.finfo(scores.dtype).min)
        y = torch.einsum("bhts,sbhk->tbhk", scores.softmax(-1), v).reshape(T, B, D)
        return self.swap(self.out_proj(y))


class LengthFirst(TimeFirst):
    def swap(self, x):
        return x.reshape(x.shape[1], x.shape[0], x.shape[2])


def subject(model):
    return Subject(
        kind="self_attention",
        name="time first",
        build=lambda c: model(c.d_model, c.num_heads),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        mask_forms=("padding",),
    )


right = subject(TimeFirst)
wrong = subject(LengthFirst)
