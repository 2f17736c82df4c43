"""A text classifier that reads its answer off a class token."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class Attention(nn.Module):
    def __init__(self, dim, n_heads, p):
        super().__init__()
        self.n_heads = n_heads
        self.p = p
        self.in_proj = nn.Linear(dim, 3 * dim)
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, x, attn_mask):
        b, n, d = x.shape
        q, k, v = self.in_proj(x).chunk(3, dim=-1)
        q, k, v = (t.reshape(b, n, self.n_heads, d // self.n_heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=self.p if self.training else 0.0)
        return self.out_proj(y.transpose(1, 2).reshape(b, n, d))


class Layer(nn.Module):
    def __init__(self, dim, n_heads, hidden, p):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, n_heads, p)
        self.norm2 = nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Dropout(p), nn.Linear(hidden, dim))
        self.drop = nn.Dropout(p)

    def forward(self, x, attn_mask=None):
        x = x + self.drop(self.attn(self.norm1(x), attn_mask))
        return x + self.drop(self.ff(self.norm2(x)))


class TextClassifier(nn.Module):
    def __init__(self, vocab, classes, dim, n_layers, n_heads, hidden, max_len, p=0.1):
        super().__init__()
        self.max_len = max_len
        self.tok = nn.Embedding(vocab, dim)
        self.cls = nn.Parameter(torch.empty(1, 1, dim))
        self.pos = nn.Parameter(torch.empty(1, max_len + 1, dim))
        self.drop = nn.Dropout(p)
        self.layers = nn.ModuleList(Layer(dim, n_heads, hidden, p) for _ in range(n_layers))
        self.norm = nn.LayerNorm(dim)
        self.fc = nn.Linear(dim, classes)
        nn.init.normal_(self.tok.weight, std=0.02)
        nn.init.normal_(self.cls, std=0.02)
        nn.init.normal_(self.pos, std=0.02)

    def forward(self, ids, mask=None):
        b, t = ids.shape
        if t > self.max_len:
            raise ValueError(f"text of {t} tokens, at most {self.max_len}")
        x = torch.cat([self.cls.expand(b, -1, -1), self.tok(ids)], dim=1)
        x = self.drop(x + self.pos[:, : t + 1])
        attn_mask = None
        if mask is not None:
            mask = F.pad(mask, (1, 0), value=True)  # the class token can always be seen
            attn_mask = mask[:, None, None, :]
        for layer in self.layers:
            x = layer(x, attn_mask)
        return self.fc(self.norm(x[:, 0]))


def loss(model, ids, labels):
    return F.cross_entropy(model(ids), labels)


subject = Subject(
    kind="classifier",
    name="text classifier",
    build=lambda c: TextClassifier(
        c.vocab_size, c.num_classes, c.d_model, c.num_layers, c.num_heads, c.d_ff, c.max_len, c.dropout
    ),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    loss=loss,
    declares={
        "causal": False,
        "positions": "learned",
        "pooling": "cls",
        "extra_tokens": 1,
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "residual": True,
        "activation": "gelu",
        "bias": True,
        "output_bias": True,
        "attention_scale": "1/sqrt(d_head)",
        "embedding_scale": False,
        "init": "other",
        "padding_side": "right",
        "beyond_max_len": "error",
    },
)
