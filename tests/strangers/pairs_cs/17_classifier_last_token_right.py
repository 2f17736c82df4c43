"""ForSequenceClassification on a causal trunk: the last real token is pooled, on whichever side the tokenizer pads."""
import torch
from torch import nn

from veriformer.properties import Subject


class Block(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ff = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x, allowed):
        B, T, D = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~allowed, -torch.inf)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D))
        return x + self.ff(self.norm_2(x))


class ForSequenceClassification(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList([Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.norm, self.score = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.num_classes, bias=False)

    def forward(self, tokens, attention_mask=None):
        B, T = tokens.shape
        real = torch.ones_like(tokens) if attention_mask is None else attention_mask.long()
        x = self.tokens(tokens) + self.positions((real.cumsum(1) - 1).clamp(min=0))
        square = torch.ones(T, T, dtype=torch.bool, device=tokens.device).tril()
        allowed = (square & real.bool()[:, None, None]) | torch.eye(T, dtype=torch.bool, device=tokens.device)
        for layer in self.layers:
            x = layer(x, allowed)
        last = (real * torch.arange(T, device=tokens.device)).argmax(-1)
        return self.score(self.norm(x)[torch.arange(B, device=tokens.device), last])


subject = Subject(
    kind="classifier",
    name="sequence classification, last token",
    build=ForSequenceClassification,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"pooling": "last", "padding_side": "both", "positions": "learned"},
)
