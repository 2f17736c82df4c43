"""Cross-encoder reranker: query and document in one sequence, parted by SEP; segments derived from the ids."""
import torch
from torch import nn

from veriformer.properties import Subject

SEP = 1


class Reranker(nn.Module):
    def __init__(self, vocab, d_model, nhead, num_layers, d_ff, max_len, num_labels):
        super().__init__()
        self.word = nn.Embedding(vocab, d_model)
        self.position = nn.Embedding(max_len, d_model)
        self.segment = nn.Embedding(2, d_model)
        self.norm = nn.LayerNorm(d_model)
        self.trunk = nn.ModuleList(
            [nn.TransformerEncoderLayer(d_model, nhead, d_ff, dropout=0.0, activation="relu", batch_first=True) for _ in range(num_layers)]
        )
        self.pooler = nn.Linear(d_model, d_model)
        self.score = nn.Linear(d_model, num_labels)

    @staticmethod
    def segments(ids):
        is_sep = (ids == SEP).long()
        before = is_sep.cumsum(dim=1) - is_sep  # a separator belongs to what it closes
        return before.clamp(max=1)

    def forward(self, ids, mask=None):
        positions = torch.arange(ids.size(1), device=ids.device).unsqueeze(0)
        h = self.norm(self.word(ids) + self.position(positions) + self.segment(self.segments(ids)))
        key_padding = None if mask is None else ~mask
        for layer in self.trunk:
            h = layer(h, src_key_padding_mask=key_padding)
        return self.score(torch.tanh(self.pooler(h[:, 0])))


subject = Subject(
    kind="classifier",
    name="cross-encoder",
    build=lambda c: Reranker(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "learned", "pooling": "cls", "norm": "layer", "norm_placement": "post",
              "activation": "relu", "padding_side": "right", "structure": "other"},
)
