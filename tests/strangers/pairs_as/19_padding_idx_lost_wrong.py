WHAT = 'the scaled lookup goes through F.embedding without padding_idx: the row of the padding token is zero at first but gets gradients and is trained (line 48).'
import math
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject


def sinusoids(length, dim, like):
    pos = torch.arange(length, dtype=torch.float64, device=like.device)[:, None]
    freq = torch.exp(torch.arange(0, dim, 2, dtype=torch.float64, device=like.device) * (-math.log(10000.0) / dim))
    return torch.stack([(pos * freq).sin(), (pos * freq).cos()], -1).flatten(1).to(like.dtype)


class EncoderLayer(nn.Module):
    def __init__(self, d, h, f, p):
        super().__init__()
        self.h = h
        self.linear_q, self.linear_k = nn.Linear(d, d), nn.Linear(d, d)
        self.linear_v, self.linear_o = nn.Linear(d, d), nn.Linear(d, d)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.linear1, self.linear2 = nn.Linear(d, f), nn.Linear(f, d)
        self.dropout = nn.Dropout(p)

    def forward(self, x, bias):
        b, t, d = x.shape
        q = self.linear_q(x).view(b, t, self.h, -1).transpose(1, 2)
        k = self.linear_k(x).view(b, t, self.h, -1).permute(0, 2, 3, 1)
        v = self.linear_v(x).view(b, t, self.h, -1).transpose(1, 2)
        w = torch.softmax(q @ k / math.sqrt(d // self.h) + bias, -1)
        x = self.norm1(x + self.dropout(self.linear_o((w @ v).transpose(1, 2).flatten(2))))
        return self.norm2(x + self.dropout(self.linear2(torch.relu(self.linear1(x)))))


class Encoder(nn.Module):
    def __init__(self, vocab, d, h, n, f, p):
        super().__init__()
        self.embed = nn.Embedding(vocab, d, padding_idx=0)
        nn.init.normal_(self.embed.weight, std=d ** -0.5)
        with torch.no_grad():
            self.embed.weight[0].zero_()
        self.scale = math.sqrt(d)
        self.layers = nn.ModuleList(EncoderLayer(d, h, f, p) for _ in range(n))
        self.dropout = nn.Dropout(p)

    def forward(self, tokens, attention_mask=None):
        table = self.embed.weight * self.scale
        x = F.embedding(tokens, table)
        x = self.dropout(x + sinusoids(tokens.shape[1], x.shape[-1], x))
        bias = x.new_zeros(tokens.shape[0], 1, 1, tokens.shape[1])
        if attention_mask is not None:
            bias = bias.masked_fill(~attention_mask[:, None, None, :], torch.finfo(x.dtype).min)
        for layer in self.layers:
            x = layer(x, bias)
        return x


subject = Subject(
    kind="encoder",
    build=lambda c: Encoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.dropout),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    domain={"d_model": [8, 12, 16]},
    mask_forms=("padding",),
    declares={"causal": False, "positions": "sinusoidal", "layout": "interleaved", "base": 10000,
              "embedding_scale": True, "padding_idx": 0, "norm": "layer", "norm_placement": "post",
              "final_norm": False, "residual": True, "activation": "relu", "bias": True, "padding_side": "right"},
)
