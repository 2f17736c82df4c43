"""A sentence classifier whose mean over the sequence is accumulated block by block, as a long-document server does."""
import torch
from torch import nn

from veriformer.properties import Subject

BLOCK = 4


class StreamedMean(nn.Module):
    def forward(self, hidden, mask):
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        mean, seen = hidden.new_zeros(hidden.size(0), hidden.size(2)), weight.new_zeros(hidden.size(0), 1)
        for h, w in zip(hidden.split(BLOCK, dim=1), weight.split(BLOCK, dim=1), strict=True):
            count = w.sum(dim=1)
            block_mean = (h * w).sum(dim=1) / count.clamp(min=1)
            seen = seen + count
            mean = mean + (block_mean - mean) * count / seen.clamp(min=1)
        return mean


class Classifier(nn.Module):
    def __init__(self, vocab_size, hidden, heads, layers, ff, max_len, labels):
        super().__init__()
        self.words = nn.Embedding(vocab_size, hidden)
        self.places = nn.Parameter(torch.randn(max_len, hidden) * 0.5)
        layer = nn.TransformerEncoderLayer(hidden, heads, ff, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(hidden), enable_nested_tensor=False)
        self.pool = StreamedMean()
        self.score = nn.Linear(hidden, labels)

    def forward(self, input_ids, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        attention_mask = attention_mask.bool()
        x = self.words(input_ids) + self.places[: input_ids.size(1)]
        x = self.encoder(x, src_key_padding_mask=~attention_mask)
        return self.score(self.pool(x, attention_mask))


subject = Subject(
    kind="classifier",
    name="streamed pool",
    build=lambda c: Classifier(
        c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "pooling": "mean",
        "padding_side": "right",
        "positions": "learned",
        "norm_placement": "pre",
        "activation": "relu",
    },
)
