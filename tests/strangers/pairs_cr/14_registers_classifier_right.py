"""Classifier with a class token and two registers in front (Darcet et al. 2024)."""
import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject

REGISTERS = 2


class Block(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.h = h
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, f), nn.GELU(), nn.Linear(f, d))

    def forward(self, x, mask):
        B, N, D = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(B, N, 3, self.h, D // self.h).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None if mask is None else mask[:, None, None, :])
        x = x + self.proj(y.transpose(1, 2).reshape(B, N, D))
        return x + self.mlp(self.norm2(x))


class RegisterClassifier(nn.Module):
    def __init__(self, vocab, d, h, f, depth, max_len, classes):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.pos = nn.Parameter(torch.randn(max_len, d) * 0.02)
        self.prefix = nn.Parameter(torch.randn(1 + REGISTERS, d) * 0.02)
        self.blocks = nn.ModuleList([Block(d, h, f) for _ in range(depth)])
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, classes)

    def forward(self, tokens, mask=None):
        B, T = tokens.shape
        x = self.embed(tokens) + self.pos[:T]
        x = torch.cat((self.prefix.expand(B, -1, -1), x), dim=1)
        if mask is not None:
            mask = F.pad(mask, (1 + REGISTERS, 0), value=True)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x)[:, 0])


subject = Subject(
    kind="classifier",
    build=lambda c: RegisterClassifier(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers, c.max_len, c.num_classes),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"pooling": "cls", "positions": "learned", "padding_side": "right", "extra_tokens": 1 + REGISTERS},
)
