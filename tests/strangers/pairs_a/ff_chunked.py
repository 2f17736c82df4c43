import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'The chunks over time are put together along the batch axis (dim 0) and reshaped instead of along '
    'time, so for batches of more than one sample and more than one chunk of 4 positions outputs land at '
    'other positions and samples.'
)
PLACE = 'reassembly of the chunks of a chunked feed-forward'


class ChunkedFeedForward(nn.Module):
    """Position by position, 4 positions at a time, so that the wide activations stay small."""

    chunk = 4

    def __init__(self, d, f, p):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(d, f), nn.Linear(f, d), nn.Dropout(p)

    def forward(self, x):
        outs = [self.down(self.drop(F.gelu(self.up(part)))) for part in x.split(self.chunk, 1)]
        return torch.cat(outs, 1)


class ChunkedFeedForward2(nn.Module):
    """Position by position, 4 positions at a time, so that the wide activations stay small."""

    chunk = 4

    def __init__(self, d, f, p):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(d, f), nn.Linear(f, d), nn.Dropout(p)

    def forward(self, x):
        outs = [self.down(self.drop(F.gelu(self.up(part)))) for part in x.split(self.chunk, 1)]
        return torch.cat([out.flatten(0, 1) for out in outs], 0).reshape(x.shape)


right = Subject(
    kind="feed_forward",
    build=lambda c: ChunkedFeedForward(c.d_model, c.d_ff, c.dropout),
    forward=lambda m, x: m(x),
    declares={"activation": "gelu", "bias": True},
)

wrong = Subject(
    kind="feed_forward",
    build=lambda c: ChunkedFeedForward2(c.d_model, c.d_ff, c.dropout),
    forward=lambda m, x: m(x),
    declares={"activation": "gelu", "bias": True},
)
