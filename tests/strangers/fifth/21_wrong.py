"""An encoder in the manner of the tutorial: time first, sinusoidal positions, pre-LN layers and a norm behind them."""

import math

import torch
from torch import nn

from veriformer.properties import Subject


class PositionalEncoding(nn.Module):
    def __init__(self, d_model: int, dropout: float = 0.1):
        super().__init__()
        self.d_model = d_model
        self.dropout = nn.Dropout(p=dropout)

    def forward(self, x):
        """x: [seq_len, batch_size, embedding_dim]"""
        position = torch.arange(x.size(0), device=x.device, dtype=torch.float64).unsqueeze(1)
        even = torch.arange(0, self.d_model, 2, device=x.device, dtype=torch.float64)
        div_term = torch.exp(even * (-math.log(10000.0) / self.d_model))
        pe = torch.zeros(x.size(0), 1, self.d_model, device=x.device, dtype=torch.float64)
        pe[:, 0, 0::2] = torch.sin(position * div_term)
        pe[:, 0, 1::2] = torch.cos(position * div_term)[:, : self.d_model // 2]
        return self.dropout(x + pe.to(x.dtype))


class EncoderLayer(nn.Module):
    def __init__(self, d_model: int, nhead: int, d_hid: int, dropout: float):
        super().__init__()
        self.nhead = nhead
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.in_proj = nn.Linear(d_model, 3 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.linear1 = nn.Linear(d_model, d_hid)
        self.linear2 = nn.Linear(d_hid, d_model)
        self.dropout = nn.Dropout(dropout)

    def attend(self, x, key_padding_mask):
        length, batch, width = x.shape
        q, k, v = (
            part.reshape(length, batch, self.nhead, width // self.nhead) for part in self.in_proj(x).chunk(3, dim=-1)
        )
        scores = torch.einsum("tbhd,sbhd->bhts", q, k) / math.sqrt(width // self.nhead)
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None, :], torch.finfo(scores.dtype).min)
        weights = self.dropout(scores.softmax(dim=-1))
        return self.out_proj(torch.einsum("bhts,sbhd->tbhd", weights, v).reshape(length, batch, width))

    def forward(self, x, key_padding_mask=None):
        x = x + self.dropout(self.attend(self.norm1(x), key_padding_mask))
        x = x + self.dropout(self.linear2(torch.relu(self.linear1(self.norm2(x)))))
        return x


class TransformerModel(nn.Module):
    def __init__(self, ntoken: int, d_model: int, nhead: int, d_hid: int, nlayers: int, dropout: float = 0.5):
        super().__init__()
        self.d_model = d_model
        self.embedding = nn.Embedding(ntoken, d_model)
        self.pos_encoder = PositionalEncoding(d_model, dropout)
        self.layers = nn.ModuleList([EncoderLayer(d_model, nhead, d_hid, dropout) for _ in range(nlayers)])
        self.norm = nn.LayerNorm(d_model)

    def forward(self, src, src_key_padding_mask=None):
        """src: [seq_len, batch_size], gives [seq_len, batch_size, d_model]"""
        x = self.pos_encoder(self.embedding(src))
        x = x * math.sqrt(self.d_model)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask)
        return self.norm(x)


def forward(model, tokens, attention_mask=None):
    hidden = None if attention_mask is None else ~attention_mask
    return model(tokens.t(), hidden).transpose(0, 1)


subject = Subject(
    kind="encoder",
    name="tutorial encoder",
    build=lambda c: TransformerModel(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers, c.dropout),
    forward=forward,
    mask_forms=("padding",),
    declares={
        "causal": False,
        "positions": "sinusoidal",
        "layout": "interleaved",
        "base": 10000,
        "embedding_scale": True,
        "norm": "layer",
        "norm_placement": "pre",
        "norm_bias": True,
        "final_norm": True,
        "residual": True,
        "activation": "relu",
        "bias": True,
        "attention_scale": "1/sqrt(d_head)",
        "padding_side": "right",
        "beyond_max_len": "works",
        "stacked": True,
    },
)
