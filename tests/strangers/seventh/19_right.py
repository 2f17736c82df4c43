"""Text classifier that reads its answer off a class token of its own, put before the words."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Layer(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))

    def attend(self, x, mask):
        q, k, v = (w(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        if mask is not None:
            mask = mask[:, None, None, :].expand(-1, 1, x.shape[1], -1)
        return self.wo(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))

    def forward(self, x, mask):
        x = x + self.attend(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class ClassTokenClassifier(nn.Module):
    def __init__(self, vocab_size, width, heads, layers, hidden, classes, max_len):
        super().__init__()
        self.words = nn.Embedding(vocab_size, width)
        self.places = nn.Embedding(max_len, width)
        self.cls = nn.Parameter(torch.randn(1, 1, width))
        self.layers = nn.ModuleList([Layer(width, heads, hidden) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens, mask=None):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1)
        if mask is not None:
            mask = F.pad(mask, (1, 0), value=True)  # the class token is always seen
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x[:, 0]))


subject = Subject(
    kind="classifier",
    name="class token",
    build=lambda c: ClassTokenClassifier(
        c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.num_classes, c.max_len
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    loss=lambda m, tokens, labels: F.cross_entropy(m(tokens), labels),
    declares={
        "causal": False,
        "positions": "learned",
        "beyond_max_len": "error",
        "extra_tokens": 1,
        "pooling": "cls",
        "embedding_scale": False,
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "residual": True,
        "activation": "relu",
        "bias": True,
        "output_bias": True,
        "plain_loss": True,
        "padding_side": "right",
        "structure": "other",
    },
)
