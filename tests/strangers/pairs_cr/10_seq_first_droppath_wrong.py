"""Pre-norm block with stochastic depth and LayerScale, time first inside (a port of a speech encoder)."""
import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject


class DropPath(nn.Module):
    """Drops the branch of whole samples."""

    def __init__(self, rate):
        super().__init__()
        self.keep = 1.0 - rate

    def forward(self, x):  # [T, B, D]
        if not self.training or self.keep == 1.0:
            return x
        alive = x.new_empty(x.shape[0], 1, 1).bernoulli_(self.keep)
        return x * alive / self.keep


class Block(nn.Module):
    def __init__(self, d, h, f, drop_path):
        super().__init__()
        self.h = h
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.fc1, self.fc2 = nn.Linear(d, f), nn.Linear(f, d)
        self.gamma1, self.gamma2 = nn.Parameter(0.5 * torch.ones(d)), nn.Parameter(0.5 * torch.ones(d))
        self.drop_path = DropPath(drop_path)

    def attend(self, x, mask):
        T, B, D = x.shape
        q, k, v = self.qkv(x).view(T, B, 3, self.h, D // self.h).permute(2, 1, 3, 0, 4)
        s = q @ k.transpose(-1, -2) * (D // self.h) ** -0.5
        if mask is not None:
            s = s.masked_fill(~mask[:, None, None, :], torch.finfo(s.dtype).min)
        y = s.softmax(-1) @ v  # [B, H, T, dh]
        return self.proj(y.permute(2, 0, 1, 3).reshape(T, B, D))

    def forward(self, x, mask=None):  # batch first outside
        x = x.transpose(0, 1)
        x = x + self.drop_path(self.gamma1 * self.attend(self.norm1(x), mask))
        x = x + self.drop_path(self.gamma2 * self.fc2(F.gelu(self.fc1(self.norm2(x)))))
        return x.transpose(0, 1)


subject = Subject(
    kind="layer",
    build=lambda c: Block(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": False, "norm_placement": "pre", "norm": "layer", "activation": "gelu", "structure": "other"},
)

WHAT = 'Line 18: stochastic depth draws over the first axis, which is time here: single positions are dropped, the same in all samples, rather than whole samples.'
