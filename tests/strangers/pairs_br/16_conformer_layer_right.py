"""A Conformer layer (Gulati et al. 2020), LayerNorm in place of BatchNorm in its convolution module."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class FeedForwardModule(nn.Sequential):
    def __init__(self, d, hidden):
        super().__init__(nn.LayerNorm(d), nn.Linear(d, hidden), nn.SiLU(), nn.Linear(hidden, d))


class SelfAttentionModule(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, mask):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / (d // self.heads) ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))


class ConvolutionModule(nn.Module):
    def __init__(self, d, kernel_size=3):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.pointwise_in = nn.Linear(d, 2 * d)
        self.depthwise = nn.Conv1d(d, d, kernel_size, padding=kernel_size // 2, groups=d)
        self.norm_inner = nn.LayerNorm(d)
        self.pointwise_out = nn.Linear(d, d)

    def forward(self, x, mask):
        x = self.norm(x)
        x = F.glu(self.pointwise_in(x), dim=-1)
        if mask is not None:
            x = x.masked_fill(~mask[:, :, None], 0.0)  # what the kernel reads beyond the end is zero
        x = self.depthwise(x.transpose(1, 2)).transpose(1, 2)
        return self.pointwise_out(F.silu(self.norm_inner(x)))


class ConformerLayer(nn.Module):
    def __init__(self, d, heads, hidden):
        super().__init__()
        self.ff1, self.ff2 = FeedForwardModule(d, hidden), FeedForwardModule(d, hidden)
        self.attention = SelfAttentionModule(d, heads)
        self.convolution = ConvolutionModule(d)
        self.norm = nn.LayerNorm(d)

    def forward(self, x, mask=None):
        x = x + 0.5 * self.ff1(x)
        x = x + self.attention(x, mask)
        x = x + self.convolution(x, mask)
        x = x + 0.5 * self.ff2(x)
        return self.norm(x)


subject = Subject(
    kind="layer",
    name="Conformer layer",
    build=lambda c: ConformerLayer(c.d_model, c.num_heads, c.d_ff),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={
        "causal": False,
        "positions": "other",
        "norm": "layer",
        "norm_placement": "other",
        "activation": "other",
        "structure": "other",
        "padding_side": "both",
    },
)
