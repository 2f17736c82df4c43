
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

class Net(nn.Module):
    def __init__(self, c, bug):
        super().__init__()
        self.bug, self.h = bug, c.num_heads
        self.n1, self.n2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.qkv, self.proj = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
        self.fc1, self.fc2 = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(self.n1(x)).unflatten(-1, (3, self.h, -1)).permute(2, 0, 3, 1, 4)
        s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if mask is not None:
            hide = mask.logical_not_() if self.bug else mask.logical_not()
            s = s.masked_fill(hide[:, None, None, :], torch.finfo(s.dtype).min)
        x = x + self.proj((s.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.n2(x)), approximate="tanh"))


WHAT = "The layer inverts the caller's attention_mask in place (logical_not_), so the next call or layer that uses this mask hides the real tokens."
PLACE = 'handling of attention_mask in the layer'


def make(bug):
    return Subject(
        kind="layer",
        build=lambda c: Net(c, bug),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    )


right, wrong = make(False), make(True)
