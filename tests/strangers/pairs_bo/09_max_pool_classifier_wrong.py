WHAT = "padding is zeroed before the max instead of being set to the lowest number, so that wherever all real features are negative a padded sequence's pooled feature is 0 (line 44)."
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class EncoderBlock(nn.Module):
    def __init__(self, d_model, heads, d_ff):
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d_model, d_model) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.fc1, self.fc2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, keep):
        h = self.norm1(x)
        q, k, v = self.split(self.wq(h)), self.split(self.wk(h)), self.split(self.wv(h))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None, :])
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        return x + self.fc2(F.relu(self.fc1(self.norm2(x))))


class SentimentClassifier(nn.Module):
    def __init__(self, vocab, d_model, heads, d_ff, layers, max_len, classes):
        super().__init__()
        self.tok = nn.Embedding(vocab, d_model)
        self.pos = nn.Embedding(max_len, d_model)
        self.blocks = nn.ModuleList(EncoderBlock(d_model, heads, d_ff) for _ in range(layers))
        self.norm = nn.LayerNorm(d_model)
        self.fc = nn.Linear(d_model, classes)

    def forward(self, tokens, keep=None):
        if keep is None:
            keep = torch.ones_like(tokens, dtype=torch.bool)
        x = self.tok(tokens) + self.pos.weight[: tokens.size(1)]
        for block in self.blocks:
            x = block(x, keep)
        x = self.norm(x)
        x = x * keep[..., None]
        pooled, _ = x.max(dim=1)
        return self.fc(pooled)


subject = Subject(
    kind="classifier",
    name="max-pooled classifier",
    build=lambda c: SentimentClassifier(
        c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers, c.max_len, c.num_classes
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    mask_forms=("padding",),
    declares={
        "pooling": "max",
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "padding_side": "right",
    },
)
