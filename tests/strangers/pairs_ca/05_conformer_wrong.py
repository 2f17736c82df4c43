WHAT = 'In the convolution module padding is zeroed before the pointwise convolution, whose bias fills it again, instead of after the GLU: padded frames reach real ones through the depthwise convolution.'
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class FeedForward(nn.Sequential):
    def __init__(self, d, hidden):
        super().__init__(nn.LayerNorm(d), nn.Linear(d, hidden), nn.SiLU(), nn.Linear(hidden, d))


class ConvModule(nn.Module):
    def __init__(self, d, kernel=3):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.pointwise1 = nn.Conv1d(d, 2 * d, 1)
        self.depthwise = nn.Conv1d(d, d, kernel, padding=kernel // 2, groups=d)
        self.mid = nn.LayerNorm(d)
        self.pointwise2 = nn.Conv1d(d, d, 1)

    def forward(self, x, keep):
        y = self.norm(x).transpose(1, 2)
        y = y.masked_fill(~keep[:, None], 0.0)
        y = F.glu(self.pointwise1(y), dim=1)
        y = self.depthwise(y)
        y = F.silu(self.mid(y.transpose(1, 2))).transpose(1, 2)
        return self.pointwise2(y).transpose(1, 2)


class SelfAttention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x, keep):
        x = self.norm(x)
        split = lambda z: z.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(
            split(self.q(x)), split(self.k(x)), split(self.v(x)), attn_mask=keep[:, None, None, :]
        )
        return self.o(y.transpose(1, 2).flatten(2))


class ConformerLayer(nn.Module):
    def __init__(self, d, heads, hidden):
        super().__init__()
        self.ff1, self.ff2 = FeedForward(d, hidden), FeedForward(d, hidden)
        self.attention, self.conv = SelfAttention(d, heads), ConvModule(d)
        self.norm = nn.LayerNorm(d)

    def forward(self, x, keep):
        x = x + 0.5 * self.ff1(x)
        x = x + self.attention(x, keep)
        x = x + self.conv(x, keep)
        x = x + 0.5 * self.ff2(x)
        return self.norm(x)


class Conformer(nn.Module):
    def __init__(self, d, heads, hidden, layers):
        super().__init__()
        self.layers = nn.ModuleList(ConformerLayer(d, heads, hidden) for _ in range(layers))

    def forward(self, x, keep=None):
        if keep is None:
            keep = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        for layer in self.layers:
            x = layer(x, keep)
        return x


subject = Subject(
    kind="layer",
    name="Conformer",
    build=lambda c: Conformer(c.d_model, c.num_heads, c.d_ff, c.num_layers),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": False, "positions": "other", "norm": "layer", "norm_placement": "other",
              "activation": "other", "structure": "other"},
)
