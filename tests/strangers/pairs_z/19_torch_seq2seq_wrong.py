WHAT = "the decoder is not given memory_key_padding_mask: the source's padding is hidden from the encoder and seen by the cross-attention (line 75)."
"""Translation with torch's own stacks, after the PyTorch tutorial."""
import math

import torch
from torch import Tensor, nn

from veriformer.properties import Subject


class PositionalEncoding(nn.Module):
    def __init__(self, emb_size: int, dropout: float, maxlen: int):
        super().__init__()
        if emb_size % 2:
            raise ValueError("emb_size must be even")
        den = torch.exp(-torch.arange(0, emb_size, 2, dtype=torch.float64) * math.log(10000) / emb_size)
        pos = torch.arange(0, maxlen, dtype=torch.float64).reshape(maxlen, 1)
        pos_embedding = torch.zeros((maxlen, emb_size), dtype=torch.float64)
        pos_embedding[:, 0::2] = torch.sin(pos * den)
        pos_embedding[:, 1::2] = torch.cos(pos * den)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("pos_embedding", pos_embedding)

    def forward(self, token_embedding: Tensor):
        pe = self.pos_embedding[: token_embedding.size(1)].to(token_embedding.dtype)
        return self.dropout(token_embedding + pe)


class TokenEmbedding(nn.Module):
    def __init__(self, vocab_size: int, emb_size: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, emb_size)
        self.emb_size = emb_size

    def forward(self, tokens: Tensor):
        return self.embedding(tokens.long()) * math.sqrt(self.emb_size)


def generate_square_subsequent_mask(sz, device):
    """True where a position may not be seen, as torch has it."""
    return torch.triu(torch.ones((sz, sz), device=device, dtype=torch.bool), diagonal=1)


def create_padding_mask(real):
    """From True = real to torch's True = padding."""
    return None if real is None else ~real.bool()


class Seq2SeqTransformer(nn.Module):
    def __init__(self, num_layers, emb_size, nhead, vocab_size, dim_feedforward, dropout, maxlen):
        super().__init__()
        options = dict(d_model=emb_size, nhead=nhead, dim_feedforward=dim_feedforward, dropout=dropout)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(**options, batch_first=True), num_layers, enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**options, batch_first=True), num_layers)
        self.generator = nn.Linear(emb_size, vocab_size)
        self.src_tok_emb = TokenEmbedding(vocab_size, emb_size)
        self.tgt_tok_emb = TokenEmbedding(vocab_size, emb_size)
        self.positional_encoding = PositionalEncoding(emb_size, dropout, maxlen)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.xavier_uniform_(p)

    def forward(self, src, trg, src_real=None, trg_real=None):
        src_padding, tgt_padding = create_padding_mask(src_real), create_padding_mask(trg_real)
        src_emb = self.positional_encoding(self.src_tok_emb(src))
        tgt_emb = self.positional_encoding(self.tgt_tok_emb(trg))
        memory = self.encoder(src_emb, src_key_padding_mask=src_padding)
        outs = self.decoder(
            tgt_emb,
            memory,
            tgt_mask=generate_square_subsequent_mask(trg.size(1), trg.device),
            tgt_key_padding_mask=tgt_padding,
        )
        return self.generator(outs)


subject = Subject(
    kind="encoder_decoder",
    name="Seq2SeqTransformer",
    build=lambda c: Seq2SeqTransformer(
        c.num_layers, c.d_model, c.num_heads, c.vocab_size, c.d_ff, c.dropout, c.max_len
    ),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(
        source, target, source_mask, target_mask
    ),
    declares={
        "causal": True,
        "positions": "sinusoidal",
        "layout": "interleaved",
        "embedding_scale": True,
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "activation": "relu",
        "bias": True,
        "output_bias": True,
        "tied": False,
        "padding_side": "right",
    },
)
