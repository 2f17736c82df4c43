import math
import torch
import torch.nn as nn


class PositionalEncoding(nn.Module):
    """Adds sinusoidal positions to a batch-first sequence.

    Args:
        d_model: embedding width (even)
        dropout: applied to the sum
        max_len: longest supported sequence

    Shape:
        x: [batch_size, seq_len, d_model] -> same
    """

    def __init__(self, d_model: int = 32, dropout: float = 0.1, max_len: int = 1000):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)

        position = torch.arange(max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(max_len, 1, d_model)
        pe[:, 0, 0::2] = torch.sin(position * div_term)
        pe[:, 0, 1::2] = torch.cos(position * div_term)
        self.register_buffer('pe', pe)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.pe[:x.size(0)]
        return self.dropout(x)
