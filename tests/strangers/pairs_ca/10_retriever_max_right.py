import torch
from torch import nn

from veriformer.properties import Subject


class RetrievalEncoder(nn.Module):
    """A query/document tower: Transformer encoder, max over tokens, projection."""

    def __init__(self, vocab_size, hidden_size, heads, layers, ff, max_len, out):
        super().__init__()
        self.word = nn.Embedding(vocab_size, hidden_size)
        self.position = nn.Embedding(max_len, hidden_size)
        layer = nn.TransformerEncoderLayer(hidden_size, heads, ff, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.projection = nn.Linear(hidden_size, out)

    @staticmethod
    def pool(hidden, attention_mask):
        return hidden.masked_fill(~attention_mask.unsqueeze(-1), float("-inf")).amax(dim=1)

    def forward(self, input_ids, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids, dtype=torch.bool)
        h = self.word(input_ids) + self.position.weight[: input_ids.shape[1]]
        h = self.encoder(h, src_key_padding_mask=~attention_mask)
        return self.projection(self.pool(h, attention_mask))


subject = Subject(
    kind="classifier",
    name="retriever",
    build=lambda c: RetrievalEncoder(
        c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "learned", "pooling": "max", "norm": "layer", "norm_placement": "post",
              "activation": "gelu", "padding_side": "right"},
)
