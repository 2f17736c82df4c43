"""Pre-norm layer with activation checkpointing in training."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from veriformer.properties import Subject


class CheckpointedLayer(nn.Module):
    def __init__(self, dim, heads, hidden, dropout):
        super().__init__()
        self.heads = heads
        self.attn_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)
        self.drop = nn.Dropout(dropout)

    def attend(self, x, mask):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / (d // self.heads) ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
        y = scores.softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(b, t, d))

    def run(self, x, mask):
        x = x + self.drop(self.attend(self.attn_norm(x), mask))
        return x + self.drop(self.down(F.gelu(self.up(self.mlp_norm(x)))))

    def forward(self, x, attention_mask=None):
        if self.training and torch.is_grad_enabled():
            return checkpoint(self.run, x, attention_mask, use_reentrant=False)
        return self.run(x, attention_mask)


subject = Subject(
    kind="layer",
    name="checkpointed layer",
    build=lambda c: CheckpointedLayer(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=lambda model, x, attention_mask=None: model(x, attention_mask),
    declares={
        "causal": False,
        "positions": "none",
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "gelu",
        "residual": True,
        "bias": True,
    },
)
