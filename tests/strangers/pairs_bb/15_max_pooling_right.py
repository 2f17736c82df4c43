"""Text classifier on torch's own encoder layers, maximum over time, one linear head."""
import torch
from torch import nn

from veriformer.properties import Subject


class MaxPoolClassifier(nn.Module):
    def __init__(self, vocab_size, d_model, num_heads, num_layers, d_ff, max_len, num_classes):
        super().__init__()
        self.words = nn.Embedding(vocab_size, d_model)
        self.places = nn.Embedding(max_len, d_model)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                d_model, num_heads, d_ff, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(d_model)
        self.classify = nn.Linear(d_model, num_classes)

    def forward(self, tokens, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(tokens, dtype=torch.bool)
        states = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            states = layer(states, src_key_padding_mask=~attention_mask)
        states = self.norm(states)
        real = attention_mask.unsqueeze(-1)
        pooled = states.masked_fill(~real, torch.finfo(states.dtype).min).amax(dim=1)
        return self.classify(pooled)


subject = Subject(
    kind="classifier",
    name="maximum over time",
    build=lambda c: MaxPoolClassifier(
        c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes
    ),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "pooling": "max",
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "padding_side": "right",
        "causal": False,
    },
)
