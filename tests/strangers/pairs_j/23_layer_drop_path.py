"""A pre-norm layer that computes time first, with stochastic depth."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "stochastic depth draws along the first axis, which is time here: it drops time steps, not samples"
CAUSE = (
    "Drop path draws one decision per time step for all samples (along axis 0 of a [T, B, D] tensor) instead of one "
    "per sample: the axes of batch and time are confused."
)


class DropPath(nn.Module):
    def __init__(self, rate, batch_dim=0):
        super().__init__()
        self.rate, self.batch_dim = rate, batch_dim

    def forward(self, x):
        if self.rate == 0.0 or not self.training:
            return x
        keep = 1 - self.rate
        shape = [1] * x.ndim
        shape[self.batch_dim] = x.shape[self.batch_dim]
        return x * x.new_empty(shape).bernoulli_(keep) / keep


class Layer(nn.Module):
    def __init__(self, dim, heads, hidden, drop_path):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.drop_path = drop_path

    def attend(self, x, mask):
        T, B, D = x.shape
        q, k, v = self.qkv(x).reshape(T, B, 3, self.heads, -1).permute(2, 1, 3, 0, 4)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
        return self.proj((scores.softmax(-1) @ v).permute(2, 0, 1, 3).reshape(T, B, D))

    def forward(self, x, mask=None):
        x = x.transpose(0, 1)
        x = x + self.drop_path(self.attend(self.norm1(x), mask))
        x = x + self.drop_path(self.fc2(F.gelu(self.fc1(self.norm2(x)))))
        return x.transpose(0, 1)


def subject(path):
    return Subject(
        kind="layer",
        name="layer, time first",
        build=lambda c: Layer(c.d_model, c.num_heads, c.d_ff, path(c.dropout)),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        mask_forms=("padding",),
        declares={
            "causal": False,
            "positions": "none",
            "norm": "layer",
            "norm_placement": "pre",
            "activation": "gelu",
            "residual": True,
            "drop_path_scaled": True,
        },
    )


right = subject(lambda rate: DropPath(rate, batch_dim=1))
wrong = subject(lambda rate: DropPath(rate))
