"""BLOOM's attention: heads folded into the batch, ALiBi and scale fused into one baddbmm."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


def alibi_slopes(heads):
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return torch.tensor(slopes, dtype=torch.float64)


class BloomAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.dense = nn.Linear(width, width)
        self.register_buffer("slopes", alibi_slopes(heads), persistent=False)

    def forward(self, x, attention_mask=None):
        B, T, D = x.shape
        fused = self.query_key_value(x).view(B, T, self.heads, 3, self.head_dim)
        q, k, v = (t.transpose(1, 2).reshape(B * self.heads, T, self.head_dim) for t in fused.unbind(3))
        slopes = self.slopes.to(x.dtype).repeat_interleave(B)
        alibi = slopes[:, None, None] * torch.arange(T, device=x.device, dtype=x.dtype)
        scores = torch.baddbmm(alibi.expand(-1, T, -1), q, k.transpose(1, 2), beta=1.0, alpha=self.head_dim**-0.5)
        allowed = torch.ones(T, T, dtype=torch.bool, device=x.device).tril().expand(B, T, T)
        if attention_mask is not None:
            allowed = (allowed & attention_mask[:, None]) | torch.eye(T, dtype=torch.bool, device=x.device)
        scores = scores.view(B, self.heads, T, T).masked_fill(~allowed[:, None], -torch.inf)
        context = torch.bmm(scores.softmax(-1).view(B * self.heads, T, T), v)
        return self.dense(context.view(B, self.heads, T, self.head_dim).transpose(1, 2).reshape(B, T, D))


subject = Subject(
    kind="self_attention",
    name="BLOOM attention",
    build=lambda c: BloomAttention(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": True, "positions": "alibi", "bias": True},
)

WHAT = (
    'The slopes are laid out head after head for a batch folded as sample after sample (line 29): with more than one sample heads get the slopes of other heads.'
)
