WHAT = 'memory_key_padding_mask is not passed (the call before line 44): the encoder hides the padding of the source, the cross-attention reads it'
"""Translation with torch.nn's encoder and decoder."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


class Embedder(nn.Module):
    def __init__(self, vocab, width, max_len):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.places = nn.Embedding(max_len, width)

    def forward(self, ids):
        places = self.places(torch.arange(ids.shape[1], device=ids.device))
        return self.tokens(ids) * math.sqrt(self.tokens.embedding_dim) + places


class Translator(nn.Module):
    def __init__(self, vocab, width, heads, layers, hidden, max_len, dropout):
        super().__init__()
        options = dict(dim_feedforward=hidden, dropout=dropout, batch_first=True)
        self.source, self.target = Embedder(vocab, width, max_len), Embedder(vocab, width, max_len)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, heads, **options), layers, enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(width, heads, **options), layers)
        self.head = nn.Linear(width, vocab)

    def encode(self, source, source_padding):
        return self.encoder(self.source(source), src_key_padding_mask=source_padding)

    def decode(self, target, memory, target_padding, source_padding):
        length = target.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        states = self.decoder(
            self.target(target),
            memory,
            tgt_mask=future,
            tgt_key_padding_mask=target_padding,
        )
        return self.head(states)

    def forward(self, source, target, source_padding=None, target_padding=None):
        memory = self.encode(source, source_padding)
        return self.decode(target, memory, target_padding, source_padding)


def padding(mask):
    return None if mask is None else ~mask


subject = Subject(
    kind="encoder_decoder",
    name="Translator",
    build=lambda c: Translator(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.dropout),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(
        source, target, padding(source_mask), padding(target_mask)
    ),
    declares={
        "positions": "learned", "embedding_scale": True, "norm": "layer", "norm_placement": "post",
        "final_norm": False, "activation": "relu", "padding_side": "right",
    },
)
