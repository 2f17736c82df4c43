WHAT = 'stochastic depth of the feed-forward sublayer drops the sum of stream and branch instead of the branch, so a dropped sample loses its residual stream in training (line 37)'
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def drop_path(x, p, training):
    if not training or p == 0.0:
        return x
    keep = 1.0 - p
    alive = torch.empty(x.shape[0], *[1] * (x.dim() - 1), dtype=x.dtype, device=x.device).bernoulli_(keep)
    return x * alive / keep


class Block(nn.Module):
    def __init__(self, dim, num_heads, hidden, drop):
        super().__init__()
        self.num_heads, self.drop = num_heads, drop
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def attn(self, x, mask):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        mask = None if mask is None else mask[:, None, None, :]
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))

    def mlp(self, x):
        return self.fc2(F.gelu(self.fc1(x)))

    def forward(self, x, mask=None):
        x = x + drop_path(self.attn(self.norm1(x), mask), self.drop, self.training)
        x = drop_path(x + self.mlp(self.norm2(x)), self.drop, self.training)
        return x


subject = Subject(
    kind="layer",
    build=lambda c: Block(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"norm_placement": "pre", "norm": "layer", "activation": "gelu", "residual": True, "positions": "none", "causal": False},
)
