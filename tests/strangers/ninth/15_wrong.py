"""Translation model on nn.Transformer with padding.

`tgt` begins with <bos>; the logits at position t are the prediction of token t + 1. `labels`, if given,
are the target sentence itself (pass `labels=tgt`): the shift by one happens in here, and padding
is left out of the loss.
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class TokenEmbedding(nn.Module):
    def __init__(self, vocab_size, emb_size, pad_idx):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, emb_size, padding_idx=pad_idx)
        self.emb_size = emb_size

    def forward(self, tokens):
        return self.embedding(tokens.long()) * math.sqrt(self.emb_size)


class PositionalEncoding(nn.Module):
    def __init__(self, emb_size, dropout, maxlen=256):
        super().__init__()
        den = torch.exp(-torch.arange(0, emb_size, 2) * math.log(10000) / emb_size)
        pos = torch.arange(0, maxlen).reshape(maxlen, 1)
        pos_embedding = torch.zeros((maxlen, emb_size))
        pos_embedding[:, 0::2] = torch.sin(pos * den)
        pos_embedding[:, 1::2] = torch.cos(pos * den)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("pos_embedding", pos_embedding)

    def forward(self, token_embedding):
        return self.dropout(token_embedding + self.pos_embedding[: token_embedding.size(1)])


class Seq2SeqTransformer(nn.Module):
    def __init__(
        self,
        src_vocab_size=70,
        tgt_vocab_size=80,
        emb_size=48,
        nhead=4,
        num_encoder_layers=2,
        num_decoder_layers=2,
        dim_feedforward=96,
        dropout=0.1,
        pad_idx=1,
    ):
        super().__init__()
        self.pad_idx = pad_idx
        self.transformer = nn.Transformer(
            d_model=emb_size,
            nhead=nhead,
            num_encoder_layers=num_encoder_layers,
            num_decoder_layers=num_decoder_layers,
            dim_feedforward=dim_feedforward,
            dropout=dropout,
            batch_first=True,
        )
        self.src_tok_emb = TokenEmbedding(src_vocab_size, emb_size, pad_idx)
        self.tgt_tok_emb = TokenEmbedding(tgt_vocab_size, emb_size, pad_idx)
        self.positional_encoding = PositionalEncoding(emb_size, dropout)
        self.generator = nn.Linear(emb_size, tgt_vocab_size)

    def forward(self, src, tgt, labels=None):
        src_padding_mask = src == self.pad_idx
        tgt_padding_mask = tgt == self.pad_idx
        size = tgt.size(1)
        tgt_mask = torch.triu(torch.ones(size, size, dtype=torch.bool, device=tgt.device), diagonal=1)
        outs = self.transformer(
            self.positional_encoding(self.src_tok_emb(src)),
            self.positional_encoding(self.tgt_tok_emb(tgt)),
            tgt_mask=tgt_mask,
            src_key_padding_mask=src_padding_mask,
            tgt_key_padding_mask=tgt_padding_mask,
            memory_key_padding_mask=src_padding_mask,
        )
        logits = self.generator(outs)
        if labels is None:
            return logits
        shift_logits = logits[:, 1:, :]
        shift_labels = labels[:, :-1]
        loss = F.cross_entropy(
            shift_logits.reshape(-1, shift_logits.size(-1)), shift_labels.reshape(-1), ignore_index=self.pad_idx
        )
        return logits, loss
