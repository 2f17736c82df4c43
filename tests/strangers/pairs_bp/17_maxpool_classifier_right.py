import torch
from torch import nn

from veriformer.properties import Subject


class SentenceClassifier(nn.Module):
    """RoBERTa-like encoder from torch.nn's own layers; a sentence is the maximum over its tokens, channel by channel."""

    def __init__(self, c):
        super().__init__()
        self.token = nn.Embedding(c.vocab_size, c.d_model)
        self.position = nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(
            [
                nn.TransformerEncoderLayer(
                    c.d_model, c.num_heads, c.d_ff, dropout=c.dropout, activation="gelu", batch_first=True, norm_first=True
                )
                for _ in range(c.num_layers)
            ]
        )
        self.norm = nn.LayerNorm(c.d_model)
        self.classifier = nn.Linear(c.d_model, c.num_classes)

    def pool(self, states, mask):
        if mask is not None:
            states = states.masked_fill(~mask.unsqueeze(-1), float("-inf"))
        return states.max(dim=1).values

    def forward(self, tokens, attention_mask=None):
        x = self.token(tokens) + self.position(torch.arange(tokens.size(1), device=tokens.device))
        hidden = None if attention_mask is None else ~attention_mask
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=hidden)
        return self.classifier(self.pool(self.norm(x), attention_mask))


subject = Subject(
    kind="classifier",
    name="max-pooled sentence classifier",
    build=SentenceClassifier,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "pooling": "max",
        "positions": "learned",
        "padding_side": "right",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "causal": False,
    },
)
