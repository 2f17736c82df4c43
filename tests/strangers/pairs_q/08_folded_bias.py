"""A classifier with learned relative biases, in the manner of small vision transformers that are deployed in eval mode."""

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "In eval mode attention uses a copy of the relative bias that was taken when eval() was called."
CAUSE = (
    "train(False) stores the gathered bias as a non-persistent buffer under no_grad: weights that are loaded or changed after eval() "
    "do not reach attention (the bias is stale), and in eval mode the bias table gets no gradient. Train mode is right."
)


class RelativeAttention(nn.Module):
    def __init__(self, dim, heads, length):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.attention_biases = nn.Parameter(torch.randn(heads, 2 * length - 1) * 0.5)
        at = torch.arange(length)
        self.register_buffer("bias_index", at[:, None] - at[None, :] + length - 1, persistent=False)

    def bias(self):
        return self.attention_biases[:, self.bias_index]

    def forward(self, x, mask):
        B, T, C = x.shape
        q, k, v = self.qkv(x).reshape(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        attn = q @ k.transpose(-2, -1) * (C // self.heads) ** -0.5 + self.bias()[:, :T, :T]
        attn = attn.masked_fill(~mask[:, None, None, :], torch.finfo(attn.dtype).min).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B, T, C))


class DeployedAttention(RelativeAttention):
    def __init__(self, dim, heads, length):
        super().__init__(dim, heads, length)
        self.register_buffer("ab", None, persistent=False)

    @torch.no_grad()
    def train(self, mode=True):
        super().train(mode)
        self.ab = None if mode else self.attention_biases[:, self.bias_index]
        return self

    def bias(self):
        return super().bias() if self.ab is None else self.ab


class Layer(nn.Module):
    def __init__(self, c, attention):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.attn = attention(c.d_model, c.num_heads, c.max_len)
        self.mlp = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model))
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x, mask):
        x = x + self.drop(self.attn(self.norm1(x), mask))
        return x + self.drop(self.mlp(self.norm2(x)))


class Classifier(nn.Module):
    def __init__(self, c, attention):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList([Layer(c, attention) for _ in range(c.num_layers)])
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.num_classes)

    def forward(self, tokens, mask=None):
        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        real = mask[..., None].to(x.dtype)
        return self.head((self.norm(x) * real).sum(1) / real.sum(1).clamp(min=1))


def make(attention):
    return Subject(
        kind="classifier",
        name="relative classifier",
        build=lambda c: Classifier(c, attention),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"positions": "relative", "pooling": "mean", "padding_side": "both", "norm_placement": "pre"},
    )


right = make(RelativeAttention)
wrong = make(DeployedAttention)
