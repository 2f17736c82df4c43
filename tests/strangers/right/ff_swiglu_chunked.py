"""SwiGLU with gate and value interleaved channel by channel in one matrix, computed in chunks of five tokens.

Unusual: tokens are taken flat, five at a time, so that the wide hidden layer never exists for all of them; the activation is in
place. No biases.
"""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

CHUNK = 5


class ChunkedSwiGLU(nn.Module):
    def __init__(self, d_model, d_ff, dropout):
        super().__init__()
        self.d_ff = d_ff
        self.w_in = nn.Linear(d_model, 2 * d_ff, bias=False)
        self.w_out = nn.Linear(d_ff, d_model, bias=False)
        self.dropout = nn.Dropout(dropout)

    def few(self, x):
        gate, value = self.w_in(x).unflatten(-1, (self.d_ff, 2)).unbind(-1)
        hidden = F.silu(gate.clone(), inplace=True)
        hidden = hidden * value
        return self.w_out(self.dropout(hidden))

    def forward(self, x):
        flat = x.reshape(-1, x.size(-1))
        return torch.cat([self.few(piece) for piece in flat.split(CHUNK)]).reshape(x.shape)


COMMON = dict(
    kind="feed_forward",
    build=lambda c: ChunkedSwiGLU(c.d_model, c.d_ff, c.dropout),
    forward=lambda m, x: m(x),
)
undeclared = Subject(**COMMON)
declared = Subject(**COMMON, declares={"activation": "swiglu", "bias": False})
