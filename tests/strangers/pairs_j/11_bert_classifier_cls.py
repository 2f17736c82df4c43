"""A sentence classifier: a class token before the text, pre-norm blocks, a head on the class token."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "the mask is extended for the class token at its end, not at its beginning: it is shifted by one"
CAUSE = (
    "The padding mask is off by one against the sequence: its entry for the class token is appended at the end instead "
    "of put in front, so that the last real token is hidden and a padded one at the end is seen."
)


class Block(nn.Module):
    def __init__(self, dim, heads, hidden, dropout):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim)
        self.net = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim), nn.Dropout(dropout))
        self.dropout = dropout

    def attend(self, x, mask):
        b, n, _ = x.shape
        q, k, v = (t.reshape(b, n, self.heads, -1).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        dots = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
        if mask is not None:
            dots = dots.masked_fill(~mask[:, None, None, :], torch.finfo(dots.dtype).min)
        attn = F.dropout(dots.softmax(dim=-1), self.dropout, self.training)
        out = torch.einsum("bhij,bhjd->bhid", attn, v)
        return self.to_out(out.transpose(1, 2).reshape(b, n, -1))

    def forward(self, x, mask):
        x = x + self.attend(self.norm1(x), mask)
        return x + self.net(self.norm2(x))


class TextClassifier(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.token_emb = nn.Embedding(c.vocab_size, c.d_model)
        self.cls_token = nn.Parameter(torch.randn(1, 1, c.d_model))
        self.pos_emb = nn.Embedding(c.max_len + 1, c.d_model)
        self.layers = nn.ModuleList(
            [Block(c.d_model, c.num_heads, c.d_ff, c.dropout) for _ in range(c.num_layers)]
        )
        self.norm = nn.LayerNorm(c.d_model)
        self.to_logits = nn.Linear(c.d_model, c.num_classes)

    def extend(self, mask):
        return F.pad(mask, (1, 0), value=True)

    def forward(self, tokens, mask=None):
        x = torch.cat((self.cls_token.expand(tokens.shape[0], -1, -1), self.token_emb(tokens)), dim=1)
        x = x + self.pos_emb(torch.arange(x.shape[1], device=x.device))
        if mask is not None:
            mask = self.extend(mask)
        for layer in self.layers:
            x = layer(x, mask)
        return self.to_logits(self.norm(x[:, 0]))


class SentenceClassifier(TextClassifier):
    def extend(self, mask):
        return F.pad(mask, (0, 1), value=True)


def subject(model):
    return Subject(
        kind="classifier",
        name="sentence classifier",
        build=model,
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={
            "causal": False,
            "positions": "learned",
            "pooling": "cls",
            "extra_tokens": 1,
            "norm": "layer",
            "norm_placement": "pre",
            "activation": "gelu",
            "padding_side": "right",
        },
    )


right = subject(TextClassifier)
wrong = subject(SentenceClassifier)
