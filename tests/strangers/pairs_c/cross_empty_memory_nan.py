import math

import torch
from torch import nn

from veriformer.properties import Subject

class Net(nn.Module):
    """A sample without any memory gets zeros."""
    def __init__(self, c, bug):
        super().__init__()
        self.h, self.bug = c.num_heads, bug
        self.q, self.k, self.v, self.o = (nn.Linear(c.d_model, c.d_model, bias=False) for _ in range(4))

    def forward(self, x, memory, memory_mask=None):
        cut = lambda y: y.unflatten(-1, (self.h, -1)).transpose(1, 2)
        q, k, v = cut(self.q(x)), cut(self.k(memory)), cut(self.v(memory))
        s = q @ k.mT / math.sqrt(q.shape[-1])
        if memory_mask is not None:
            hide = ~memory_mask[:, None, None, :]
            if self.bug:
                s = s.masked_fill(hide, float("-inf"))
            else:
                s = s.masked_fill(hide, torch.finfo(s.dtype).min)
        p = s.softmax(-1)
        if memory_mask is not None:
            p = p.masked_fill(hide, 0) if not self.bug else p
        return self.o((p @ v).transpose(1, 2).flatten(2))


WHAT = 'A sample whose memory is wholly masked gives NaN (softmax over -inf alone) where zeros are promised.'
PLACE = 'cross-attention, softmax of a row without keys'


def make(bug):
    return Subject(
        kind="cross_attention",
        build=lambda c: Net(c, bug),
        forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
        declares={'empty_row': 'zeros', 'bias': False, 'positions': 'none'},
    )


right, wrong = make(False), make(True)
