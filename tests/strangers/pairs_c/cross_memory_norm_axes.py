import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

class Net(nn.Module):
    """Perceiver style: both inputs are normalised first."""
    def __init__(self, c, bug):
        super().__init__()
        self.bug, self.h, self.d = bug, c.num_heads, c.d_model
        self.nx, self.gain = nn.LayerNorm(c.d_model), nn.Parameter(torch.ones(c.d_model))
        self.q, self.kv = nn.Linear(c.d_model, c.d_model), nn.Linear(c.d_model, 2 * c.d_model)
        self.o = nn.Linear(c.d_model, c.d_model)

    def forward(self, x, memory, memory_mask=None):
        memory = F.layer_norm(memory, memory.shape[1:] if self.bug else (self.d,)) * self.gain
        q = self.q(self.nx(x)).unflatten(-1, (self.h, -1)).transpose(1, 2)
        k, v = self.kv(memory).unflatten(-1, (2, self.h, -1)).permute(2, 0, 3, 1, 4)
        ok = torch.ones(1, 1, 1, k.shape[2], dtype=torch.bool, device=x.device)
        if memory_mask is not None:
            ok = memory_mask[:, None, None, :]
        s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        w = s.masked_fill(~ok, torch.finfo(s.dtype).min).softmax(-1) * ok
        return self.o((w @ v).transpose(1, 2).flatten(2))


WHAT = 'The memory is normalised over time and channels together instead of each position for itself, so masked memory positions change the output.'
PLACE = 'normalisation of the memory in cross-attention'


def make(bug):
    return Subject(
        kind="cross_attention",
        build=lambda c: Net(c, bug),
        forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    )


right, wrong = make(False), make(True)
