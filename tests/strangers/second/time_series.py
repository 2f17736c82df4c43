import math
import torch
from torch import nn


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, max_len=512):
        super().__init__()
        pe = torch.zeros(max_len, d_model)
        pos = torch.arange(max_len).unsqueeze(1)
        div = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe[:, 0::2], pe[:, 1::2] = torch.sin(pos * div), torch.cos(pos * div)[:, : d_model // 2]
        self.register_buffer("pe", pe.unsqueeze(0))

    def forward(self, x):
        return x + self.pe[:, : x.size(1)]


class TransformerBlockStack(nn.Module):
    def __init__(self, embed_dim, num_heads, ff_dim, num_blocks, dropout=0.1):
        super().__init__()
        self.pe = PositionalEncoding(embed_dim)
        layer = nn.TransformerEncoderLayer(embed_dim, num_heads, ff_dim, dropout, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, num_blocks, enable_nested_tensor=False)

    def forward(self, x):
        return self.blocks(self.pe(x))
