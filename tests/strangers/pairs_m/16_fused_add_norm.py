"""zoo/PR 233: encoder with fused add-and-norm. Sublayers and norms are two flat lists: what a sublayer gives is added to
the stream and at once normalised for the one after it (that is the fused kernel), so there is one norm more than there
are sublayers; the last one closes the stack."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "The loop zips the sublayers with the norms between them, one short, so the last feed-forward network never runs."
CAUSE = (
    "`zip(sublayers, norms[1:-1])` ends with the shorter list: the closing norm was taken out of the loop and the last "
    "sublayer (the feed-forward network of the last layer) fell out with it; its parameters reach no output."
)


class Mixer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.inp, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, h):
        q, k, v = self.inp(h).unflatten(-1, (3, self.heads, -1)).movedim(2, 0).transpose(-2, -3)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Channel(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, h):
        return self.down(F.gelu(self.up(h)))


def add_norm(update, residual, norm):
    """Stands for the fused kernel: the new stream, and its normalised copy."""
    residual = residual + update
    return norm(residual), residual


class FusedEncoder(nn.Module):
    def __init__(self, vocab, width, heads, hidden, depth, max_len):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.position = nn.Parameter(0.5 * torch.randn(max_len, width))
        self.sublayers = nn.ModuleList()
        for _ in range(depth):
            self.sublayers.append(Mixer(width, heads))
            self.sublayers.append(Channel(width, hidden))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth + 1))

    def forward(self, ids):
        residual = self.embedding(ids) + self.position[: ids.shape[1]]
        h = self.norms[0](residual)
        for sublayer, norm in zip(self.sublayers, self.norms[1:]):
            h, residual = add_norm(sublayer(h), residual, norm)
        return h


class FusedEncoderClosing(FusedEncoder):
    """The closing norm stands by itself, since heads may want the raw stream."""

    def stream(self, ids):
        residual = self.embedding(ids) + self.position[: ids.shape[1]]
        h = self.norms[0](residual)
        for sublayer, norm in zip(self.sublayers, self.norms[1:-1]):
            h, residual = add_norm(sublayer(h), residual, norm)
        return residual

    def forward(self, ids):
        return self.norms[-1](self.stream(ids))


def subject(cls):
    return Subject(
        kind="encoder",
        name=cls.__name__,
        build=lambda c: cls(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers, c.max_len),
        forward=lambda m, tokens: m(tokens),
    )


right, wrong = subject(FusedEncoder), subject(FusedEncoderClosing)
