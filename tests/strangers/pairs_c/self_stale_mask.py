import math

import torch
from torch import nn

from veriformer.properties import Subject

class Net(nn.Module):
    """The additive bias is expensive to build on our device, therefore kept from call to call."""
    def __init__(self, c, bug):
        super().__init__()
        self.bug, self.h, self.kept = bug, c.num_heads, None
        self.qkv = nn.ModuleList(nn.Linear(c.d_model, c.d_model, bias=False) for _ in range(3))
        self.out = nn.Linear(c.d_model, c.d_model)

    def hidden(self, mask):
        known = self.kept is not None and self.kept[0].shape == mask.shape and self.kept[0].device == mask.device
        if known and (self.bug or torch.equal(self.kept[0], mask)):
            return self.kept[1]
        self.kept = mask.clone(), ~mask[:, None, None, :]
        return self.kept[1]

    def forward(self, x, mask=None):
        q, k, v = (f(x).unflatten(-1, (self.h, -1)).transpose(1, 2) for f in self.qkv)
        s = torch.einsum("bhtk,bhsk->bhts", q, k) / math.sqrt(q.shape[-1])
        if mask is None:
            p = s.softmax(-1)
        else:
            gone = self.hidden(mask)
            p = s.masked_fill(gone, torch.finfo(s.dtype).min).softmax(-1).masked_fill(gone, 0)
        return self.out(torch.einsum("bhts,bhsk->bthk", p, v).flatten(2))


WHAT = 'The mask that was built in an earlier call is used again whenever the shape agrees, whatever the new padding mask says.'
PLACE = 'self-attention, cached padding mask'


def make(bug):
    return Subject(
        kind="self_attention",
        build=lambda c: Net(c, bug),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    )


right, wrong = make(False), make(True)
