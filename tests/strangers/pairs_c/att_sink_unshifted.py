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
    """softmax1: one more key whose score is 0 and whose value is 0."""
    def __init__(self, c, bug):
        super().__init__()
        self.bug = bug

    def forward(self, q, k, v, mask, causal):
        r = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(r, 1), v.repeat_interleave(r, 1)
        ok = allowed(q, k, mask, causal)
        s = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~ok, torch.finfo(q.dtype).min)
        top = s.detach().amax(-1, keepdim=True)
        if self.bug:
            e = torch.exp(s - top) * ok
            return e @ v / (1 + e.sum(-1, keepdim=True))
        top = top.clamp(min=0)
        e = torch.exp(s - top) * ok
        return e @ v / (torch.exp(-top) + e.sum(-1, keepdim=True))


WHAT = "The sink's term in the denominator stays 1 although the scores were shifted by their maximum (it must be exp(-max)), so the sink's share is not that of a score of 0."
PLACE = 'softmax with a sink, denominator'


def make(bug):
    return Subject(
        kind="attention",
        build=lambda c: Net(c, bug),
        forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
        mask_forms=("padding",),
        declares={'sink': True, 'empty_row': 'zeros'},
    )


right, wrong = make(False), make(True)
