
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

class Net(nn.Module):
    """Chunked over time to save memory (Reformer)."""
    chunk = 4

    def __init__(self, c, bug):
        super().__init__()
        self.bug = bug
        self.w_in, self.w_out = nn.Linear(c.d_model, 2 * c.d_ff, bias=False), nn.Linear(c.d_ff, c.d_model, bias=False)

    def piece(self, x):
        gate, value = self.w_in(x).chunk(2, -1)
        return self.w_out(F.silu(gate) * value)

    def forward(self, x):
        T = x.shape[1]
        out = torch.zeros_like(x)
        count = T // self.chunk if self.bug and T > self.chunk else -(-T // self.chunk)
        for i in range(count):
            part = slice(i * self.chunk, (i + 1) * self.chunk)
            out = torch.cat((out[:, :part.start], self.piece(x[:, part]), out[:, part.stop:]), 1)
        return out


WHAT = 'The number of chunks is rounded down, so for lengths above 4 that 4 does not divide the last tokens get zeros.'
PLACE = 'chunking of the feed-forward over time'


def make(bug):
    return Subject(
        kind="feed_forward",
        build=lambda c: Net(c, bug),
        forward=lambda m, x: m(x),
    )


right, wrong = make(False), make(True)
