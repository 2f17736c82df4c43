"""Sentence classifier: a small encoder and max pooling over time."""

import torch
from torch import nn

from veriformer.properties import Subject


class PreNorm(nn.Module):
    def __init__(self, dim, fn):
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(dim), fn

    def forward(self, x, **kwargs):
        return self.fn(self.norm(x), **kwargs) + x


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.to_q, self.to_kv = nn.Linear(dim, dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.to_q(x), *self.to_kv(x).chunk(2, -1)))
        sim = torch.einsum("bhid,bhjd->bhij", q * self.scale, k)
        if mask is not None:
            sim = sim.masked_fill(~mask[:, None, None, :], -torch.finfo(sim.dtype).max)
        return self.to_out((sim.softmax(-1) @ v).transpose(1, 2).flatten(2))


def FeedForward(dim, hidden):
    return nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))


def classifier(pool):
    class SentenceClassifier(nn.Module):
        def __init__(self, num_tokens, dim, depth, heads, hidden, max_len, num_classes):
            super().__init__()
            self.token_emb, self.pos_emb = nn.Embedding(num_tokens, dim), nn.Embedding(max_len, dim)
            self.layers = nn.ModuleList(
                nn.ModuleList([PreNorm(dim, Attention(dim, heads)), PreNorm(dim, FeedForward(dim, hidden))])
                for _ in range(depth)
            )
            self.norm = nn.LayerNorm(dim)
            self.to_logits = nn.Linear(dim, num_classes)

        def forward(self, ids, mask=None):
            x = self.token_emb(ids) + self.pos_emb(torch.arange(ids.shape[1], device=ids.device))
            for attn, ff in self.layers:
                x = ff(attn(x, mask=mask))
            return self.to_logits(pool(self.norm(x), mask))

    return SentenceClassifier


def fill_low(x, mask):
    if mask is not None:
        x = x.masked_fill(~mask[..., None], -torch.finfo(x.dtype).max)
    return x.amax(1)


def fill_zero(x, mask):
    if mask is not None:
        x = x * mask[..., None]
    return x.amax(1)


def subject(cls):
    return Subject(
        kind="classifier",
        name="max pooled",
        build=lambda c: cls(c.vocab_size, c.d_model, c.num_layers, c.num_heads, c.d_ff, c.max_len, c.num_classes),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"pooling": "max", "padding_side": "right", "norm_placement": "pre", "positions": "learned"},
    )


right = subject(classifier(fill_low))
wrong = subject(classifier(fill_zero))
WHAT = "padded states are set to 0, not to minus infinity, before the max: a channel negative everywhere pools to 0"
CAUSE = (
    "Max pooling sees padding as zeros: masked positions are multiplied by 0 instead of being set to -inf, so a padded "
    "sequence pools max(0, real values)."
)
