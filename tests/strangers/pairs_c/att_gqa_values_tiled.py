import math

import torch
from torch import nn

from veriformer.properties import Subject

def allowed(q, k, mask, causal):
    T, S = q.shape[-2], k.shape[-2]
    ok = torch.ones(1, 1, T, S, dtype=torch.bool, device=q.device)
    ok = ok.tril(S - T) if causal else ok
    return ok if mask is None else ok & mask[:, None, None, :]


class Net(nn.Module):
    def __init__(self, c, bug):
        super().__init__()
        self.bug = bug

    def forward(self, q, k, v, mask, causal):
        r = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(r, dim=1)
        v = v.repeat(1, r, 1, 1) if self.bug else v.repeat_interleave(r, dim=1)
        ok = allowed(q, k, mask, causal)
        s = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.shape[-1])
        p = s.masked_fill(~ok, torch.finfo(s.dtype).min).softmax(-1) * ok
        return torch.matmul(p, v)


WHAT = 'With grouped heads the values are tiled (repeat) where the keys are repeat_interleaved, so query heads read the values of another group.'
PLACE = 'grouped-query attention, expansion of the value heads'


def make(bug):
    return Subject(
        kind="attention",
        build=lambda c: Net(c, bug),
        forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
        mask_forms=("padding",),
    )


right, wrong = make(False), make(True)
