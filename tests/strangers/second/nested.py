from dataclasses import dataclass, field
import torch
from torch import nn
import torch.nn.functional as F


@dataclass
class AttentionConfig:
    d_model: int = 256
    n_heads: int = 8
    dropout: float = 0.0


@dataclass
class GPTConfig:
    vocab_size: int = 1000
    seq_len: int = 128
    n_layers: int = 4
    attention: AttentionConfig = field(default_factory=AttentionConfig)


class Layer(nn.Module):
    def __init__(self, c: AttentionConfig):
        super().__init__()
        self.n_heads = c.n_heads
        self.ln = nn.LayerNorm(c.d_model)
        self.qkv = nn.Linear(c.d_model, 3 * c.d_model)
        self.out = nn.Linear(c.d_model, c.d_model)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln(x)).reshape(b, t, 3, self.n_heads, -1).unbind(2)
        s = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        s = s + torch.full((t, t), float("-inf")).triu(1)
        return x + self.out(torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v).reshape(b, t, d))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        d = config.attention.d_model
        self.tok, self.pos = nn.Embedding(config.vocab_size, d), nn.Embedding(config.seq_len, d)
        self.layers = nn.Sequential(*[Layer(config.attention) for _ in range(config.n_layers)])
        self.lm_head = nn.Linear(d, config.vocab_size)

    def forward(self, idx):
        x = self.tok(idx) + self.pos(torch.arange(idx.shape[1]))
        return self.lm_head(self.layers(x))
