"""A ViT block. In inference (no gradients) sums go in place, to save two activations."""
import torch
from torch import nn

from veriformer.properties import Subject


class Attn(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, dim * 3, bias=True)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q * (C // self.heads) ** -0.5) @ k.transpose(-2, -1)
        if mask is not None:
            attn = attn.masked_fill(~mask[:, None, None, :], torch.finfo(attn.dtype).min)
        x = (attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attn(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x, mask=None):
        if torch.is_grad_enabled():
            x = x + self.attn(self.norm1(x), mask)
            return x + self.mlp(self.norm2(x))
        y = x.add_(self.attn(self.norm1(x), mask))
        return y.add_(self.mlp(self.norm2(y)))


subject = Subject(
    kind="layer",
    build=lambda c: Block(c.d_model, c.num_heads, c.d_ff),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": False, "norm_placement": "pre", "positions": "none", "activation": "gelu"},
)

WHAT = "Line 37: add_ in place of add: without gradients the block writes into the tensor it was given, so that the caller's input is changed (outputs are right)."
