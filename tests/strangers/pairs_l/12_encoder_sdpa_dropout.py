"""A text encoder with fused attention."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def encoder(rate):
    class FusedAttention(nn.Module):
        def __init__(self, width, heads, attention_dropout):
            super().__init__()
            self.heads, self.attention_dropout = heads, attention_dropout
            self.to_qkv = nn.Linear(width, 3 * width, bias=False)
            self.proj = nn.Linear(width, width)

        def forward(self, x, mask=None):
            b, n, w = x.shape
            q, k, v = self.to_qkv(x).reshape(b, n, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
            if mask is not None:
                mask = mask[:, None, None, :].expand(b, 1, n, n)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=rate(self))
            return self.proj(y.transpose(1, 2).reshape(b, n, w))

    class EncoderLayer(nn.Module):
        def __init__(self, width, heads, hidden, dropout):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.attn = FusedAttention(width, heads, dropout)
            self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
            self.drop = nn.Dropout(dropout)

        def forward(self, x, mask=None):
            x = x + self.drop(self.attn(self.norm1(x), mask))
            return x + self.drop(self.fc2(F.gelu(self.fc1(self.norm2(x)))))

    class TextEncoder(nn.Module):
        def __init__(self, vocab, length, width, heads, layers, hidden, dropout):
            super().__init__()
            self.token, self.position = nn.Embedding(vocab, width), nn.Embedding(length, width)
            self.layers = nn.ModuleList([EncoderLayer(width, heads, hidden, dropout) for _ in range(layers)])
            self.norm = nn.LayerNorm(width)

        def forward(self, ids, mask=None):
            x = self.token(ids) + self.position.weight[: ids.shape[1]]
            for layer in self.layers:
                x = layer(x, mask)
            return self.norm(x)

    return TextEncoder


def subject(cls):
    return Subject(
        kind="encoder",
        name="text encoder",
        build=lambda c: cls(c.vocab_size, c.max_len, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.dropout),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        domain={"dropout": [0.0, 0.1]},
        declares={"padding_side": "right"},
    )


right = subject(encoder(lambda m: m.attention_dropout if m.training else 0.0))
wrong = subject(encoder(lambda m: m.attention_dropout))
WHAT = "scaled_dot_product_attention gets dropout_p always: attention weights are dropped in eval mode too"
CAUSE = (
    "Attention dropout stays on in eval mode (dropout_p is passed whether or not the module is training), so two calls of "
    "the evaluated model differ where dropout > 0."
)
