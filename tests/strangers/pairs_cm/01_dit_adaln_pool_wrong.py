"""A DiT block whose adaLN condition is the set itself: the pooled tokens modulate every sublayer (style token free)."""
import torch
from torch import nn

from veriformer.properties import Subject


def modulate(h, shift, scale):
    return h * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class SelfConditionedDiTBlock(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def condition(self, x, keep):
        if keep is None:
            return x.mean(1)
        alive = keep.unsqueeze(-1)
        x = x.masked_fill(~alive, 0.0)
        return x.mean(1)

    def attend(self, x, keep):
        B, N, D = x.shape
        q, k, v = self.qkv(x).view(B, N, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * (D // self.heads) ** -0.5
        if keep is not None:
            hidden = ~keep[:, None, None, :]
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
            weights = scores.softmax(-1).masked_fill(hidden, 0.0)
        else:
            weights = scores.softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(B, N, D))

    def forward(self, x, keep=None):
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.ada(self.condition(x, keep)).chunk(6, dim=-1)
        x = x + gate_a.unsqueeze(1) * self.attend(modulate(self.norm1(x), shift_a, scale_a), keep)
        h = self.fc2(nn.functional.gelu(self.fc1(modulate(self.norm2(x), shift_m, scale_m)), approximate="tanh"))
        return x + gate_m.unsqueeze(1) * h


subject = Subject(
    kind="layer",
    build=lambda c: SelfConditionedDiTBlock(c.d_model, c.num_heads, c.d_ff),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": False, "positions": "none", "norm_placement": "pre"},
)

WHAT = 'The pooled condition of adaLN divides the sum over the real tokens by the padded length, so that the modulation shrinks with every padding token (line 28).'
