"""A classifier that pools over padding too: known, wanted, and declared with its reason in deviations.toml."""

import torch
from torch import nn

from veriformer.properties import Subject


class Pooled(nn.Module):
    def __init__(self, vocab_size: int, d_model: int, num_heads: int, num_classes: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, d_model)
        self.layer = nn.TransformerEncoderLayer(d_model, num_heads, 4 * d_model, dropout=0.0, batch_first=True)
        self.head = nn.Linear(d_model, num_classes)

    def forward(self, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden = None if attention_mask is None else ~attention_mask
        return self.head(self.layer(self.tokens(tokens), src_key_padding_mask=hidden).mean(1))


pooled = Subject(
    kind="classifier",
    name="pooled",
    build=lambda c: Pooled(c.vocab_size, c.d_model, c.num_heads, c.num_classes),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={"positions": "none", "structure": "other"},  # a bag of words, and its mean is no textbook's, on purpose
)
