"""Sentence classifier: transformer encoder + masked average pooling."""
import torch
from torch import nn, Tensor


class EncoderLayer(nn.Module):
    def __init__(self, d_model: int, n_heads: int, d_ff: int, dropout: float):
        super().__init__()
        self.attn = nn.MultiheadAttention(d_model, n_heads, dropout=dropout, batch_first=True)
        self.ff = nn.Sequential(
            nn.Linear(d_model, d_ff), nn.ReLU(), nn.Dropout(dropout), nn.Linear(d_ff, d_model)
        )
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        a, _ = self.attn(x, x, x, key_padding_mask=pad, need_weights=False)
        x = self.norm1(x + self.drop(a))
        x = self.norm2(x + self.drop(self.ff(x)))
        return x


class TextClassifier(nn.Module):
    """Tokens (batch, time) of ids, 0 is padding.  Returns (batch, n_classes)."""

    def __init__(
        self,
        vocab_size: int = 500,
        n_classes: int = 4,
        d_model: int = 48,
        n_heads: int = 4,
        n_layers: int = 2,
        d_ff: int = 96,
        max_len: int = 128,
        dropout: float = 0.1,
        pad_id: int = 0,
    ):
        super().__init__()
        self.pad_id = pad_id
        self.tok = nn.Embedding(vocab_size, d_model, padding_idx=pad_id)
        self.pos = nn.Parameter(torch.randn(1, max_len, d_model) * 0.02)
        self.layers = nn.ModuleList(
            EncoderLayer(d_model, n_heads, d_ff, dropout) for _ in range(n_layers)
        )
        self.head = nn.Sequential(nn.Linear(d_model, d_model), nn.Tanh(), nn.Linear(d_model, n_classes))

    def encode(self, tokens: Tensor) -> Tensor:
        pad = tokens == self.pad_id
        x = self.tok(tokens) + self.pos[:, : tokens.size(1)]
        for layer in self.layers:
            x = layer(x, pad)
        keep = (~pad).unsqueeze(-1).to(x.dtype)
        return (x * keep).sum(dim=1) / keep.sum(dim=1).clamp(min=1.0)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encode(tokens))
