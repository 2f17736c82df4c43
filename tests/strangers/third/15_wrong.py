# Intent tagger. Everything here is time major: (T, B) tokens -> (T, B, n_tags)
import math

import torch
import torch.nn as nn


class PosEnc(nn.Module):
    def __init__(self, ninp, max_len=256):
        super(PosEnc, self).__init__()
        pe = torch.zeros(max_len, ninp)
        position = torch.arange(0, max_len, dtype=torch.float).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, ninp, 2).float() * (-math.log(10000.0) / ninp))
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)
        self.register_buffer('pe', pe.unsqueeze(1))

    def forward(self, x):
        return x + self.pe[:x.size(0)]


class TaggerModel(nn.Module):
    def __init__(self, ntoken=300, ntag=9, ninp=32, nhead=4, nhid=64, nlayers=2, dropout=0.2, pad=1):
        super(TaggerModel, self).__init__()
        self.pad = pad
        self.ninp = ninp
        self.embed = nn.Embedding(ntoken, ninp, padding_idx=pad)
        self.pos = PosEnc(ninp)
        layer = nn.TransformerEncoderLayer(ninp, nhead, nhid, dropout)
        self.encoder = nn.TransformerEncoder(layer, nlayers, enable_nested_tensor=False)
        self.out = nn.Linear(ninp, ntag)

    def forward(self, src):
        key_padding = (src == self.pad).reshape(src.size(1), src.size(0))
        x = self.embed(src) * math.sqrt(self.ninp)
        x = self.encoder(self.pos(x), src_key_padding_mask=key_padding)
        return self.out(x)


model = TaggerModel()
