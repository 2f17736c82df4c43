WHAT = 'the number of chunks is rounded down (`T // self.chunk`), so the tokens behind the last whole chunk keep the zeros that the output was allocated with'
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class ChunkedFeedForward(nn.Module):
    """Goes along the sequence a few frames at a time, to spare memory."""

    def __init__(self, d_model, d_ff, chunk=4):
        super().__init__()
        self.chunk = chunk
        self.w_in = nn.Parameter(torch.empty(d_ff, d_model))
        self.b_in = nn.Parameter(torch.zeros(d_ff))
        self.w_out = nn.Parameter(torch.empty(d_model, d_ff))
        self.b_out = nn.Parameter(torch.zeros(d_model))
        nn.init.xavier_uniform_(self.w_in)
        nn.init.xavier_uniform_(self.w_out)

    def forward(self, x):
        T = x.size(1)
        if T < self.chunk:
            return self.one(x)
        out = torch.zeros_like(x)
        for n in range(T // self.chunk):
            piece = slice(n * self.chunk, (n + 1) * self.chunk)
            out[:, piece] = self.one(x[:, piece])
        return out

    def one(self, x):
        return F.linear(F.gelu(F.linear(x, self.w_in, self.b_in)), self.w_out, self.b_out)


subject = Subject(
    kind="feed_forward",
    name="feed-forward by chunks",
    build=lambda c: ChunkedFeedForward(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    declares={"activation": "gelu", "bias": True},
)
