"""Music Transformer: relative attention with the memory-efficient skew."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class RelativeGlobalAttention(nn.Module):
    """Row max_len - 1 - r of `Er` belongs to distance r."""

    def __init__(self, d_model, num_heads, max_len):
        super().__init__()
        self.num_heads, self.max_len = num_heads, max_len
        self.key, self.value, self.query, self.out = (nn.Linear(d_model, d_model) for _ in range(4))
        self.Er = nn.Parameter(torch.randn(max_len, d_model // num_heads))

    def skew(self, QEr):
        B, H, T, _ = QEr.shape
        return F.pad(QEr, (1, 0)).reshape(B, H, T + 1, T)[:, :, 1:, :]

    def forward(self, x):
        B, T, D = x.shape
        if T > self.max_len:
            raise ValueError("sequence length exceeds model capacity")
        q = self.query(x).reshape(B, T, self.num_heads, -1).transpose(1, 2)
        k_t = self.key(x).reshape(B, T, self.num_heads, -1).permute(0, 2, 3, 1)
        v = self.value(x).reshape(B, T, self.num_heads, -1).transpose(1, 2)
        start = self.max_len - T
        Er_t = self.Er[start : start + T].transpose(0, 1)
        Srel = self.skew(torch.matmul(q, Er_t))
        attn = (torch.matmul(q, k_t) + Srel) / q.size(-1) ** 0.5
        future = torch.triu(torch.ones(T, T, dtype=torch.bool, device=x.device), diagonal=1)
        attn = F.softmax(attn.masked_fill(future, float("-inf")), dim=-1)
        return self.out(torch.matmul(attn, v).transpose(1, 2).reshape(B, T, D))


class Layer(nn.Module):
    def __init__(self, d_model, num_heads, d_ff, max_len):
        super().__init__()
        self.rga = RelativeGlobalAttention(d_model, num_heads, max_len)
        self.ffn = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x):
        x = self.norm1(x + self.rga(x))
        return self.norm2(x + self.ffn(x))


class MusicTransformer(nn.Module):
    def __init__(self, events, d_model, num_heads, num_layers, d_ff, max_len):
        super().__init__()
        self.embedding = nn.Embedding(events, d_model)
        self.layers = nn.ModuleList([Layer(d_model, num_heads, d_ff, max_len) for _ in range(num_layers)])
        self.fc = nn.Linear(d_model, events)

    def forward(self, events):
        x = self.embedding(events)
        for layer in self.layers:
            x = layer(x)
        return self.fc(x)


subject = Subject(
    kind="decoder",
    name="Music Transformer",
    build=lambda c: MusicTransformer(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens: m(tokens),
    declares={"causal": True, "positions": "relative", "norm": "layer", "norm_placement": "post", "activation": "relu",
              "output_bias": True},
)
