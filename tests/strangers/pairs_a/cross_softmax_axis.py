import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'The softmax of cross-attention runs over the queries (dim=-2) instead of the memory positions, so a '
    "query's weights do not sum to one, target positions influence one another, and padded memory is not "
    'hidden.'
)
PLACE = 'axis of the softmax in cross-attention'


class CrossAttention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q, self.kv, self.out = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)

    def forward(self, x, memory, memory_mask=None):
        q = self.q(x).unflatten(-1, (self.h, -1)).transpose(1, 2)
        k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.kv(memory).chunk(2, -1))
        scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
        if memory_mask is not None:
            hidden = ~memory_mask[:, None, None, :]
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        weights = F.softmax(scores, dim=-1)
        if memory_mask is not None:
            weights = weights.masked_fill(hidden.all(-1, keepdim=True), 0.0)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class CrossAttention2(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q, self.kv, self.out = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)

    def forward(self, x, memory, memory_mask=None):
        q = self.q(x).unflatten(-1, (self.h, -1)).transpose(1, 2)
        k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.kv(memory).chunk(2, -1))
        scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
        if memory_mask is not None:
            hidden = ~memory_mask[:, None, None, :]
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        weights = F.softmax(scores, dim=-2)
        if memory_mask is not None:
            weights = weights.masked_fill(hidden.all(-1, keepdim=True), 0.0)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


right = Subject(
    kind="cross_attention",
    build=lambda c: CrossAttention(c.d_model, c.num_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    declares={"positions": "none", "bias": True, "empty_row": "zeros"},
)

wrong = Subject(
    kind="cross_attention",
    build=lambda c: CrossAttention2(c.d_model, c.num_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    declares={"positions": "none", "bias": True, "empty_row": "zeros"},
)
