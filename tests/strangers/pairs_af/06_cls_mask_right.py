"""A classifier with a learned class token in front, on torch.nn's encoder layers."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class TextClassifier(nn.Module):
    def __init__(self, vocab_size, d_model, num_heads, num_layers, d_ff, max_len, num_classes, dropout):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, d_model)
        self.cls = nn.Parameter(torch.randn(1, 1, d_model) * 0.5)
        self.pos = nn.Parameter(torch.randn(1, max_len + 1, d_model) * 0.5)
        self.layers = nn.ModuleList(
            [
                nn.TransformerEncoderLayer(
                    d_model, num_heads, d_ff, dropout, activation="gelu", batch_first=True, norm_first=True
                )
                for _ in range(num_layers)
            ]
        )
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, num_classes)

    def forward(self, tokens, attention_mask=None):
        x = self.embed(tokens)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1)
        x = x + self.pos[:, : x.size(1)]
        hidden = None
        if attention_mask is not None:
            hidden = ~F.pad(attention_mask, (1, 0), value=True)  # the class token is always seen
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=hidden)
        return self.head(self.norm(x)[:, 0])


subject = Subject(
    kind="classifier",
    name="text classifier",
    build=lambda c: TextClassifier(
        c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes, c.dropout
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "pooling": "cls",
        "extra_tokens": 1,
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "padding_side": "right",
    },
)
