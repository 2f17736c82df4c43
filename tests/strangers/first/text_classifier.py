import math
import torch
import torch.nn as nn


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, vocab_size=5000, dropout=0.1):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        pe = torch.zeros(vocab_size, d_model)
        position = torch.arange(0, vocab_size, dtype=torch.float).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2).float() * (-math.log(10000.0) / d_model))
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe.unsqueeze(0))

    def forward(self, x):
        x = x + self.pe[:, : x.size(1), :]
        return self.dropout(x)


class SentimentClassifier(nn.Module):
    """Text classifier based on a pytorch TransformerEncoder."""

    def __init__(self, vocab_size, d_model, nhead=8, dim_feedforward=2048, num_layers=6, dropout=0.1, num_classes=2):
        super().__init__()
        assert d_model % nhead == 0, "nheads must divide evenly into d_model"
        self.emb = nn.Embedding(vocab_size, d_model)
        self.pos_encoder = PositionalEncoding(d_model=d_model, dropout=dropout)
        encoder_layer = nn.TransformerEncoderLayer(d_model=d_model, nhead=nhead, dim_feedforward=dim_feedforward,
                                                   dropout=dropout, batch_first=True)
        self.transformer_encoder = nn.TransformerEncoder(encoder_layer, num_layers=num_layers)
        self.classifier = nn.Linear(d_model, num_classes)
        self.d_model = d_model

    def forward(self, x, src_key_padding_mask=None):
        x = self.emb(x) * math.sqrt(self.d_model)
        x = self.pos_encoder(x)
        x = self.transformer_encoder(x, src_key_padding_mask=src_key_padding_mask)
        if src_key_padding_mask is not None:
            keep = (~src_key_padding_mask).unsqueeze(-1).to(x.dtype)
            x = (x * keep).sum(1) / keep.sum(1).clamp(min=1)
        else:
            x = x.mean(dim=1)
        return self.classifier(x)
