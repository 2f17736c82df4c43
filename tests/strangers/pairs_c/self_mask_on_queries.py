import math

import torch
from torch import nn

from veriformer.properties import Subject

class Net(nn.Module):
    def __init__(self, c, bug):
        super().__init__()
        self.h, self.bug = c.num_heads, bug
        self.query, self.key, self.value, self.dense = (nn.Linear(c.d_model, c.d_model) for _ in range(4))

    def heads(self, x):
        return x.view(x.shape[0], x.shape[1], self.h, -1).permute(0, 2, 1, 3)

    def forward(self, x, mask=None):
        x = x.contiguous()
        q, k, v = self.heads(self.query(x)), self.heads(self.key(x)), self.heads(self.value(x))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1))
        if mask is not None:
            hide = ~(mask[:, None, :, None] if self.bug else mask[:, None, None, :])
            scores = scores.masked_fill(hide, torch.finfo(scores.dtype).min)
        ctx = torch.matmul(scores.softmax(dim=-1), v)
        return self.dense(ctx.permute(0, 2, 1, 3).flatten(2))


WHAT = 'The padding mask is laid along the query axis instead of the key axis, so real tokens attend to padding.'
PLACE = 'self-attention, axis of the padding mask'


def make(bug):
    return Subject(
        kind="self_attention",
        build=lambda c: Net(c, bug),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    )


right, wrong = make(False), make(True)
