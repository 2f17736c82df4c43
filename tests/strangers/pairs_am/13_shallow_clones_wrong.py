WHAT = 'The layers are cloned with copy.copy, which is shallow: all of them hold the very same submodules, so the stack is one layer applied num_layers times (line 12).'
import copy
import math

import torch
from torch import nn

from veriformer.properties import Subject


def _get_clones(module, n):
    return nn.ModuleList([copy.copy(module) for _ in range(n)])


class EncoderLayer(nn.Module):
    def __init__(self, d_model, nhead, dim_feedforward, dropout):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(d_model, nhead, dropout=dropout, batch_first=True)
        self.linear1 = nn.Linear(d_model, dim_feedforward)
        self.linear2 = nn.Linear(dim_feedforward, d_model)
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, src, key_padding_mask=None):
        attended = self.self_attn(src, src, src, key_padding_mask=key_padding_mask, need_weights=False)[0]
        src = self.norm1(src + self.dropout(attended))
        hidden = self.linear2(torch.relu(self.linear1(src)))
        return self.norm2(src + self.dropout(hidden))


class Encoder(nn.Module):
    def __init__(self, vocab, d_model, nhead, num_layers, d_ff, dropout):
        super().__init__()
        self.d_model = d_model
        self.embed = nn.Embedding(vocab, d_model)
        self.layers = _get_clones(EncoderLayer(d_model, nhead, d_ff, dropout), num_layers)

    def positions(self, length, like):
        p = torch.arange(length, device=like.device, dtype=torch.float32)[:, None]
        i = torch.arange(0, self.d_model, 2, device=like.device, dtype=torch.float32)
        angle = p * torch.exp(-i / self.d_model * math.log(10000.0))
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, : self.d_model].to(like.dtype)

    def forward(self, tokens, attention_mask=None):
        x = self.embed(tokens) * math.sqrt(self.d_model)
        x = x + self.positions(tokens.shape[1], x)
        hidden = None
        if attention_mask is not None:  # samples without a single token would give NaN
            hidden = ~attention_mask & attention_mask.any(1, keepdim=True)
        for layer in self.layers:
            x = layer(x, hidden)
        return x


subject = Subject(
    kind="encoder",
    name="cloned encoder",
    build=lambda c: Encoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.dropout),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "sinusoidal",
        "embedding_scale": True,
        "norm_placement": "post",
        "activation": "relu",
        "stacked": True,
        "shared_layers": False,
    },
)
