WHAT = "Merging the statistics of channel tiles, the sums of squares are added without the term delta^2 * n * k / (n + k) between the tiles' means, so the variance is the mean variance within tiles and too small (line 13)."
"""LayerNorm of wide rows: statistics by tiles of channels, merged as Chan et al. do."""
import torch
import torch.nn as nn

from veriformer.properties import Subject


def merge(a, b):
    (n, mean, m2), (k, other, other_m2) = a, b
    delta = other - mean
    both = n + k
    return both, mean + delta * (k / both), m2 + other_m2


class StreamingLayerNorm(nn.Module):
    tile = 4

    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def statistics(self, x):
        running = None
        for part in torch.split(x, self.tile, dim=-1):
            mean = part.mean(-1, keepdim=True)
            stats = (part.shape[-1], mean, ((part - mean) ** 2).sum(-1, keepdim=True))
            running = stats if running is None else merge(running, stats)
        count, mean, m2 = running
        return mean, m2 / count

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, var = self.statistics(wide)
        normal = (wide - mean) / torch.sqrt(var + self.eps)
        return (normal * self.gain + self.shift).to(x.dtype)


subject = Subject(
    kind="norm",
    name="streaming LayerNorm",
    build=lambda c: StreamingLayerNorm(c.d_model),
    forward=lambda model, x: model(x),
    declares={"norm": "layer"},
)
