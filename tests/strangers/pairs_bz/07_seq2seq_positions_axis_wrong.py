WHAT = "The target goes batch first into the positional encoding, which expects time first, so each sample gets the vector of its place in the batch and no token a position (line 54)"
"""Sequence to sequence with torch.nn layers, batch first; PositionalEncoding as in the PyTorch tutorial (time first)."""
import math

import torch
from torch import Tensor, nn

from veriformer.properties import Subject


class PositionalEncoding(nn.Module):
    def __init__(self, d_model: int, dropout: float, maxlen: int):
        super().__init__()
        den = torch.exp(-torch.arange(0, d_model, 2) * math.log(10000) / d_model)
        pos = torch.arange(0, maxlen).reshape(maxlen, 1)
        table = torch.zeros((maxlen, d_model))
        table[:, 0::2] = torch.sin(pos * den)
        table[:, 1::2] = torch.cos(pos * den)[:, : d_model // 2]
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("table", table.unsqueeze(-2))

    def forward(self, x: Tensor) -> Tensor:
        """x: [length, batch, channels]"""
        return self.dropout(x + self.table[: x.size(0)])


class Seq2Seq(nn.Module):
    def __init__(self, vocab, d_model, nhead, num_layers, dim_feedforward, maxlen, dropout):
        super().__init__()
        self.d_model = d_model
        self.src_tok_emb, self.tgt_tok_emb = nn.Embedding(vocab, d_model), nn.Embedding(vocab, d_model)
        self.positional_encoding = PositionalEncoding(d_model, dropout, maxlen)
        self.encoder_layers = nn.ModuleList(
            nn.TransformerEncoderLayer(d_model, nhead, dim_feedforward, dropout, batch_first=True)
            for _ in range(num_layers)
        )
        self.decoder_layers = nn.ModuleList(
            nn.TransformerDecoderLayer(d_model, nhead, dim_feedforward, dropout, batch_first=True)
            for _ in range(num_layers)
        )
        self.generator = nn.Linear(d_model, vocab)

    def encode(self, src, src_mask):
        x = self.src_tok_emb(src) * math.sqrt(self.d_model)
        x = self.positional_encoding(x.transpose(0, 1)).transpose(0, 1)
        for layer in self.encoder_layers:
            x = layer(x, src_key_padding_mask=None if src_mask is None else ~src_mask)
        return x

    def decode(self, tgt, memory, tgt_mask, src_mask):
        length = tgt.size(1)
        future = torch.ones(length, length, dtype=torch.bool, device=tgt.device).triu(1)
        y = self.tgt_tok_emb(tgt) * math.sqrt(self.d_model)
        y = self.positional_encoding(y)
        for layer in self.decoder_layers:
            y = layer(
                y, memory, tgt_mask=future,
                tgt_key_padding_mask=None if tgt_mask is None else ~tgt_mask,
                memory_key_padding_mask=None if src_mask is None else ~src_mask,
            )
        return y

    def forward(self, src, tgt, src_mask=None, tgt_mask=None):
        return self.generator(self.decode(tgt, self.encode(src, src_mask), tgt_mask, src_mask))


subject = Subject(
    kind="encoder_decoder",
    name="seq2seq",
    build=lambda c: Seq2Seq(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.dropout),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={"positions": "sinusoidal", "embedding_scale": True, "norm": "layer", "norm_placement": "post",
              "activation": "relu", "padding_side": "right"},
)
