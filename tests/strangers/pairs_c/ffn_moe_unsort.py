
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

class Net(nn.Module):
    """Top-1 mixture of three experts; tokens are sorted by expert, as grouped matrix products want them."""
    experts = 3

    def __init__(self, c, bug):
        super().__init__()
        self.bug, self.router = bug, nn.Linear(c.d_model, self.experts, bias=False)
        self.up = nn.ModuleList(nn.Linear(c.d_model, c.d_ff) for _ in range(self.experts))
        self.down = nn.ModuleList(nn.Linear(c.d_ff, c.d_model) for _ in range(self.experts))

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        share, expert = self.router(flat).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        parts = flat[order].split(torch.bincount(expert, minlength=self.experts).tolist())
        y = torch.cat([d(F.gelu(u(p))) for u, d, p in zip(self.up, self.down, parts)])
        back = order if self.bug else order.argsort()
        return (y[back] * share[:, None]).reshape(x.shape)


WHAT = 'Expert outputs are put back with the sorting order instead of its inverse, so tokens get the outputs of other tokens.'
PLACE = 'return of the expert outputs to their tokens (MoE)'


def make(bug):
    return Subject(
        kind="feed_forward",
        build=lambda c: Net(c, bug),
        forward=lambda m, x: m(x),
    )


right, wrong = make(False), make(True)
