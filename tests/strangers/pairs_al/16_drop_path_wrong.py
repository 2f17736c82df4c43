WHAT = 'Stochastic depth divides by the share kept out of place (div, not div_) and throws the result away: what is kept is not scaled in training (line 19)'
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject


class DropPath(nn.Module):
    def __init__(self, drop_prob=0.0, scale_by_keep=True):
        super().__init__()
        self.drop_prob, self.scale_by_keep = drop_prob, scale_by_keep

    def forward(self, x):
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep_prob = 1 - self.drop_prob
        random_tensor = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep_prob)
        if self.scale_by_keep and keep_prob > 0.0:
            random_tensor.div(keep_prob)
        return x * random_tensor


class TimmBlock(nn.Module):
    def __init__(self, dim, num_heads, hidden, drop_path):
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.drop_path1, self.drop_path2 = DropPath(drop_path), DropPath(drop_path)

    def attn(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C))

    def forward(self, x):
        x = x + self.drop_path1(self.attn(self.norm1(x)))
        return x + self.drop_path2(self.fc2(F.gelu(self.fc1(self.norm2(x)))))


subject = Subject(
    kind="layer", name="timm block", build=lambda c: TimmBlock(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=lambda m, x: m(x),
    declares={"causal": False, "norm": "layer", "norm_placement": "pre", "activation": "gelu", "drop_path_scaled": True},
)
