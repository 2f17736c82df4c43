"""A pre-LN layer whose activations are recomputed in the backward pass."""
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from veriformer.properties import Subject


class Attention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)

    def forward(self, x, mask):
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.h, D // self.h).permute(2, 0, 3, 1, 4).unbind(0)
        att = q @ k.transpose(-2, -1) * (D // self.h) ** -0.5
        if mask is not None:
            att = att.masked_fill(~mask[:, None, None, :], torch.finfo(att.dtype).min)
        return self.proj((att.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D))


class CheckpointedLayer(nn.Module):
    def __init__(self, d, h, f, p):
        super().__init__()
        self.norm1 = nn.LayerNorm(d)
        self.norm2 = nn.LayerNorm(d)
        self.attn = Attention(d, h)
        self.fc1 = nn.Linear(d, f)
        self.fc2 = nn.Linear(f, d)
        self.drop = nn.Dropout(p)

    def body(self, x, mask):
        x = x + self.drop(self.attn(self.norm1(x), mask))
        return x + self.drop(self.fc2(F.gelu(self.fc1(self.norm2(x)))))

    def forward(self, x, mask=None):
        if self.training and torch.is_grad_enabled():
            return checkpoint(self.body, x, mask, use_reentrant=False, preserve_rng_state=True)
        return self.body(x, mask)


subject = Subject(
    kind="layer",
    name="layer with checkpointing",
    build=lambda c: CheckpointedLayer(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={
        "causal": False,
        "positions": "none",
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "gelu",
        "bias": True,
    },
)
