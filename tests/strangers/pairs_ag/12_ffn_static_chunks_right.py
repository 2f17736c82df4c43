"""Feed-forward in chunks along the sequence to bound activation memory; chunks have one static size (XLA recompiles otherwise)."""
import torch
from torch import nn

from veriformer.properties import Subject

CHUNK = 4


class ChunkedFFN(nn.Module):
    def __init__(self, d_model, d_ff, chunk=CHUNK):
        super().__init__()
        self.dense1 = nn.Linear(d_model, d_ff)
        self.act = nn.GELU(approximate="tanh")
        self.dense2 = nn.Linear(d_ff, d_model)
        self.chunk = chunk

    def chunk_forward(self, h):
        return self.dense2(self.act(self.dense1(h)))

    def forward(self, x):
        length = x.shape[1]
        size = min(self.chunk, length)
        out = torch.zeros_like(x)
        for start in range(0, length, size):
            start = min(start, length - size)  # the last one overlaps rather than being shorter
            out[:, start:start + size] = self.chunk_forward(x[:, start:start + size])
        return out


subject = Subject(
    kind="feed_forward",
    name="chunked FFN",
    build=lambda c: ChunkedFFN(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    declares={"activation": "gelu_tanh", "bias": True},
)
