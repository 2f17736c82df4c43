"""A causal model with a classification head on the last token, for prompts padded on either side."""

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "The last token is looked for at (number of real tokens - 1), which is its place only where padding is on the right."
CAUSE = (
    "Pooling takes the state at index mask.sum() - 1: under left padding the real tokens end at the last column, so the "
    "state of a padded or of an earlier token is classified."
)


def last_index(mask):
    """Column of the last real token of each sample."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    return (mask * columns).argmax(dim=-1)


def last_index_by_length(mask):
    return mask.long().sum(dim=-1) - 1


class RotaryAttention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        if hidden // heads % 2:
            raise ValueError("heads of an odd width cannot be rotated")
        self.heads, self.width = heads, hidden // heads
        self.qkv, self.dense = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)

    def rotate(self, x):
        kept = torch.promote_types(x.dtype, torch.float32)
        places = torch.arange(x.shape[-2], device=x.device, dtype=kept)
        powers = torch.arange(0, self.width, 2, device=x.device, dtype=kept) / self.width
        angles = (places[:, None] / 10000**powers).repeat(1, 2)
        left, right = x.chunk(2, dim=-1)
        return x * angles.cos().to(x.dtype) + torch.cat((-right, left), -1) * angles.sin().to(x.dtype)

    def forward(self, x, mask):
        batch, length, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, self.width).permute(2, 0, 3, 1, 4)
        scores = self.rotate(q) @ self.rotate(k).mT / self.width**0.5
        seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril() & mask[:, None, None, :]
        weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1)
        return self.dense((weights @ v).transpose(1, 2).reshape(batch, length, hidden))


class Layer(nn.Module):
    def __init__(self, hidden, heads, inner):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(hidden, eps=1e-6), nn.RMSNorm(hidden, eps=1e-6)
        self.attention = RotaryAttention(hidden, heads)
        self.gate, self.up = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x, mask):
        x = x + self.attention(self.norm_1(x), mask)
        y = self.norm_2(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class SequenceClassifier(nn.Module):
    find = staticmethod(last_index)

    def __init__(self, vocab, hidden, heads, layers, inner, labels):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList([Layer(hidden, heads, inner) for _ in range(layers)])
        self.norm, self.score = nn.RMSNorm(hidden, eps=1e-6), nn.Linear(hidden, labels, bias=False)

    def forward(self, tokens, attention_mask=None):
        mask = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        rows = torch.arange(len(tokens), device=tokens.device)
        return self.score(self.norm(x)[rows, self.find(mask)])


class LengthClassifier(SequenceClassifier):
    find = staticmethod(last_index_by_length)


def subject(cls):
    return Subject(
        kind="classifier",
        name="last-token classifier",
        build=lambda c: cls(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.num_classes),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        mask_forms=("padding",),
        declares={"causal": True, "pooling": "last", "padding_side": "both", "positions": "rotary", "layout": "halves",
                  "norm": "rms"},
    )  # fmt: skip


right, wrong = subject(SequenceClassifier), subject(LengthClassifier)
