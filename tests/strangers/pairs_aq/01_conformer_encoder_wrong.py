WHAT = 'Conformer convolution module: padded frames are set to zero before the pointwise convolution instead of after the GLU, so that its bias makes them non-zero again and the depthwise convolution carries them into the real frames at the border (line 46: x = self.norm(x).transpose(1, 2).masked_fill(hide, 0.0))'
"""Conformer encoder over acoustic codes (HuBERT units): half feed-forward, attention, convolution, half feed-forward."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class FeedForwardModule(nn.Module):
    def __init__(self, d, hidden):
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, hidden), nn.SiLU(), nn.Linear(hidden, d))

    def forward(self, x):
        return self.net(x)


class AttentionModule(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.h = heads
        self.norm = nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x, mask):
        B, T, D = x.shape
        x = self.norm(x)
        q, k, v = (f(x).view(B, T, self.h, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        s = q @ k.transpose(-1, -2) * (D // self.h) ** -0.5
        s = s.masked_fill(~mask[:, None, None, :], torch.finfo(s.dtype).min)
        return self.o((s.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D))


class ConvolutionModule(nn.Module):
    def __init__(self, d, kernel=5):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.pointwise_in = nn.Conv1d(d, 2 * d, 1)
        self.depthwise = nn.Conv1d(d, d, kernel, padding=kernel // 2, groups=d)
        self.mid_norm = nn.LayerNorm(d)
        self.pointwise_out = nn.Conv1d(d, d, 1)

    def forward(self, x, mask):
        hide = ~mask[:, None, :]
        x = self.norm(x).transpose(1, 2).masked_fill(hide, 0.0)
        x = F.glu(self.pointwise_in(x), dim=1)
        x = self.depthwise(x)
        x = F.silu(self.mid_norm(x.transpose(1, 2))).transpose(1, 2)
        return self.pointwise_out(x).transpose(1, 2)


class ConformerBlock(nn.Module):
    def __init__(self, d, heads, hidden):
        super().__init__()
        self.ff1, self.ff2 = FeedForwardModule(d, hidden), FeedForwardModule(d, hidden)
        self.attn, self.conv, self.norm = AttentionModule(d, heads), ConvolutionModule(d), nn.LayerNorm(d)

    def forward(self, x, mask):
        x = x + 0.5 * self.ff1(x)
        x = x + self.attn(x, mask)
        x = x + self.conv(x, mask)
        return self.norm(x + 0.5 * self.ff2(x))


class Conformer(nn.Module):
    def __init__(self, vocab, d, heads, layers, hidden):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList([ConformerBlock(d, heads, hidden) for _ in range(layers)])

    def forward(self, codes, mask=None):
        if mask is None:
            mask = torch.ones_like(codes, dtype=torch.bool)
        x = self.embed(codes)
        for block in self.blocks:
            x = block(x, mask)
        return x


subject = Subject(
    kind="encoder",
    name="conformer",
    build=lambda c: Conformer(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "other", "norm": "layer", "structure": "other", "padding_side": "both"},
)
