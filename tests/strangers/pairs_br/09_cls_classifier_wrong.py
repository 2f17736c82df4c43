WHAT = "the mask is lengthened for the class token at the end instead of at the front: all of it is one off, the last real token is hidden and the last padding token visible (line 31)"
"""Sequence classifier on a learned class token that the model itself puts in front."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class ClsClassifier(nn.Module):
    def __init__(self, vocab_size, d_model, num_heads, num_layers, d_ff, max_len, num_classes):
        super().__init__()
        self.token = nn.Embedding(vocab_size, d_model)
        self.cls = nn.Parameter(torch.randn(1, 1, d_model))
        self.pos = nn.Parameter(0.5 * torch.randn(1, max_len + 1, d_model))
        self.qkv = nn.ModuleList(nn.Linear(d_model, 3 * d_model) for _ in range(num_layers))
        self.proj = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(num_layers))
        self.up = nn.ModuleList(nn.Linear(d_model, d_ff) for _ in range(num_layers))
        self.down = nn.ModuleList(nn.Linear(d_ff, d_model) for _ in range(num_layers))
        self.ln = nn.ModuleList(nn.LayerNorm(d_model) for _ in range(2 * num_layers))
        self.ln_out = nn.LayerNorm(d_model)
        self.fc = nn.Linear(d_model, num_classes)
        self.num_heads = num_heads

    def forward(self, tokens, attention_mask=None):
        B = tokens.shape[0]
        x = torch.cat([self.cls.expand(B, -1, -1), self.token(tokens)], dim=1)
        x = x + self.pos[:, : x.shape[1]]
        mask = None
        if attention_mask is not None:
            mask = F.pad(attention_mask, (0, 1), value=True)  # the class token is always visible
            mask = mask[:, None, None, :]
        for i in range(len(self.qkv)):
            q, k, v = self.qkv[i](self.ln[2 * i](x)).chunk(3, dim=-1)
            q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
            a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + self.proj[i](a.transpose(1, 2).flatten(2))
            x = x + self.down[i](F.gelu(self.up[i](self.ln[2 * i + 1](x))))
        return self.fc(self.ln_out(x)[:, 0])


subject = Subject(
    kind="classifier",
    name="cls classifier",
    build=lambda c: ClsClassifier(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "pooling": "cls",
        "extra_tokens": 1,
        "positions": "learned",
        "padding_side": "right",
        "norm_placement": "pre",
        "activation": "gelu",
    },
)
