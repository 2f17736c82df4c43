"""Cross-attention; the additive form of the memory's mask is kept between the steps of a generation."""
import torch
from torch import nn

from veriformer.properties import Subject


class CrossAttention(nn.Module):
    def __init__(self, width, heads, groups):
        super().__init__()
        self.heads, self.groups, self.d = heads, groups, width // heads
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_kv = nn.Linear(width, 2 * groups * self.d, bias=False)
        self.to_out = nn.Linear(width, width)
        self.kept_mask, self.kept_bias = None, None

    def bias(self, memory_mask, dtype):
        kept = self.kept_mask
        same = kept is not None and kept.shape == memory_mask.shape and torch.equal(kept, memory_mask)
        if not same or self.kept_bias.dtype != dtype:
            self.kept_mask = memory_mask.clone()
            hidden = torch.zeros(memory_mask.shape, dtype=dtype, device=memory_mask.device)
            self.kept_bias = hidden.masked_fill(~memory_mask, torch.finfo(dtype).min / 2)[:, None, None]
        return self.kept_bias

    def forward(self, x, memory, memory_mask=None):
        B, T, D = x.shape
        S = memory.shape[1]
        q = self.to_q(x).view(B, T, self.heads, self.d).transpose(1, 2)
        k, v = self.to_kv(memory).view(B, S, 2, self.groups, self.d).permute(2, 0, 3, 1, 4)
        rep = self.heads // self.groups
        k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
        scores = q @ k.transpose(-1, -2) * self.d**-0.5
        if memory_mask is not None:
            scores = scores + self.bias(memory_mask, scores.dtype)
        return self.to_out((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D))


subject = Subject(
    kind="cross_attention",
    name="cross-attention with a kept bias",
    build=lambda c: CrossAttention(c.d_model, c.num_heads, c.num_key_value_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
)
