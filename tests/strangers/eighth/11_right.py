"""A small text classifier: fused QKV, torch's fused attention, the mean over real tokens."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class Attention(nn.Module):
    def __init__(self, dim, heads, drop):
        super().__init__()
        self.heads = heads
        self.drop = drop
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, mask):
        b, n, d = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.drop if self.training else 0.0)
        return self.proj(y.transpose(1, 2).reshape(b, n, d))


class Mlp(nn.Module):
    def __init__(self, dim, hidden, drop):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


class Block(nn.Module):
    def __init__(self, dim, heads, hidden, drop):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, heads, drop)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, hidden, drop)
        self.drop = nn.Dropout(drop)

    def forward(self, x, mask):
        x = x + self.drop(self.attn(self.norm1(x), mask))
        return x + self.mlp(self.norm2(x))


class TextClassifier(nn.Module):
    def __init__(self, vocab, dim, depth, heads, hidden, max_len, classes, drop):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(max_len, dim)
        self.drop = nn.Dropout(drop)
        self.blocks = nn.ModuleList([Block(dim, heads, hidden, drop) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, ids, mask=None):
        if mask is None:
            mask = torch.ones_like(ids, dtype=torch.bool)
        mask = mask.bool()
        x = self.tok(ids) + self.pos(torch.arange(ids.size(1), device=ids.device))
        x = self.drop(x)
        for blk in self.blocks:
            x = blk(x, mask[:, None, None, :])
        x = self.norm(x)
        real = mask.unsqueeze(-1).to(x.dtype)
        pooled = (x * real).sum(1) / real.sum(1).clamp(min=1.0)
        return self.head(pooled)


subject = Subject(
    kind="classifier",
    name="text classifier",
    build=lambda c: TextClassifier(
        c.vocab_size, c.d_model, c.num_layers, c.num_heads, c.d_ff, c.max_len, c.num_classes, c.dropout
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    loss=lambda m, tokens, labels: F.cross_entropy(m(tokens), labels),
    declares={
        "causal": False,
        "positions": "learned",
        "beyond_max_len": "error",
        "padding_side": "right",
        "pooling": "mean",
        "norm": "layer",
        "norm_placement": "pre",
        "norm_bias": True,
        "final_norm": True,
        "residual": True,
        "activation": "gelu",
        "bias": True,
        "output_bias": True,
        "attention_scale": "1/sqrt(d_head)",
        "init": "default",
        "embedding_scale": False,
        "shared_layers": False,
        "structure": "textbook",
    },
)
