"""ViT with global average pooling (the 'better plain ViT' recipe), on patch embeddings."""

import torch
from torch import nn

from veriformer.properties import Subject


def vit(**options):
    class EncoderBlock(nn.Module):
        def __init__(self, hidden_dim, num_heads, mlp_dim, dropout):
            super().__init__()
            self.ln_1 = nn.LayerNorm(hidden_dim, eps=1e-6)
            self.self_attention = nn.MultiheadAttention(hidden_dim, num_heads, dropout=dropout, **options)
            self.ln_2 = nn.LayerNorm(hidden_dim, eps=1e-6)
            self.mlp = nn.Sequential(
                nn.Linear(hidden_dim, mlp_dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(mlp_dim, hidden_dim)
            )

        def forward(self, x):
            y = self.ln_1(x)
            y, _ = self.self_attention(y, y, y, need_weights=False)
            x = x + y
            return x + self.mlp(self.ln_2(x))

    class VisionTransformer(nn.Module):
        def __init__(self, seq_length, num_layers, num_heads, hidden_dim, mlp_dim, num_classes, dropout):
            super().__init__()
            self.pos_embedding = nn.Parameter(torch.empty(1, seq_length, hidden_dim).normal_(std=0.02))
            self.layers = nn.Sequential(
                *(EncoderBlock(hidden_dim, num_heads, mlp_dim, dropout) for _ in range(num_layers))
            )
            self.ln = nn.LayerNorm(hidden_dim, eps=1e-6)
            self.head = nn.Linear(hidden_dim, num_classes)

        def forward(self, patches):
            x = patches + self.pos_embedding[:, : patches.shape[1]]
            return self.head(self.ln(self.layers(x)).mean(dim=1))

    return VisionTransformer


def subject(cls):
    return Subject(
        kind="classifier",
        name="vit",
        inputs="embeddings",
        build=lambda c: cls(c.max_len, c.num_layers, c.num_heads, c.d_model, c.d_ff, c.num_classes, c.dropout),
        forward=lambda m, x: m(x),
    )


right = subject(vit(batch_first=True))
wrong = subject(vit())
WHAT = "nn.MultiheadAttention without batch_first=True gets [B, T, D]: attention runs over the images of the batch"
CAUSE = (
    "Batch and sequence axes are confused in attention (batch_first is missing): samples of a batch attend to one another "
    "and tokens of one image never do."
)
