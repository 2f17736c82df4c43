import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


WHAT = (
    "Tokens are sorted by expert and the experts' outputs are put back by applying the sorting "
    'permutation a second time instead of its inverse, so tokens receive the outputs of other tokens (of '
    'other samples too).'
)
PLACE = 'un-sorting of the tokens after the experts of a mixture-of-experts feed-forward'


class SortedExperts(nn.Module):
    """Each token goes to the one of 3 experts with the largest gate; no token is dropped."""

    experts = 3

    def __init__(self, d, f):
        super().__init__()
        self.router = nn.Linear(d, self.experts, bias=False)
        self.up = nn.Parameter(torch.randn(self.experts, d, f) / math.sqrt(d))
        self.down = nn.Parameter(torch.randn(self.experts, f, d) / math.sqrt(f))

    def forward(self, x):
        flat = x.flatten(0, 1)
        gate, expert = self.router(flat).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        parts = flat[order].split(torch.bincount(expert, minlength=self.experts).tolist())
        done = torch.cat([F.gelu(part @ self.up[e]) @ self.down[e] for e, part in enumerate(parts)])
        out = done[order.argsort()]
        return (out * gate[:, None]).view(x.shape)


class SortedExperts2(nn.Module):
    """Each token goes to the one of 3 experts with the largest gate; no token is dropped."""

    experts = 3

    def __init__(self, d, f):
        super().__init__()
        self.router = nn.Linear(d, self.experts, bias=False)
        self.up = nn.Parameter(torch.randn(self.experts, d, f) / math.sqrt(d))
        self.down = nn.Parameter(torch.randn(self.experts, f, d) / math.sqrt(f))

    def forward(self, x):
        flat = x.flatten(0, 1)
        gate, expert = self.router(flat).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        parts = flat[order].split(torch.bincount(expert, minlength=self.experts).tolist())
        done = torch.cat([F.gelu(part @ self.up[e]) @ self.down[e] for e, part in enumerate(parts)])
        out = done[order]
        return (out * gate[:, None]).view(x.shape)


right = Subject(
    kind="feed_forward",
    build=lambda c: SortedExperts(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    declares={"activation": "gelu", "bias": False, "structure": "other"},
)

wrong = Subject(
    kind="feed_forward",
    build=lambda c: SortedExperts2(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    declares={"activation": "gelu", "bias": False, "structure": "other"},
)
