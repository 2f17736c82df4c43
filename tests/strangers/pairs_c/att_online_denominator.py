import math

import torch
from torch import nn

from veriformer.properties import Subject

def allowed(q, k, mask, causal):
    T, S = q.shape[-2], k.shape[-2]
    ok = torch.ones(1, 1, T, S, dtype=torch.bool, device=q.device)
    ok = ok.tril(S - T) if causal else ok
    return ok if mask is None else ok & mask[:, None, None, :]


def merge(state, s, ok, v, bug):
    top, den, num = state
    s = s.masked_fill(~ok, torch.finfo(s.dtype).min)
    new = torch.maximum(top, s.detach().amax(-1, keepdim=True))
    e, fade = (s - new).exp() * ok, (top - new).exp()
    den = (den if bug else den * fade) + e.sum(-1, keepdim=True)
    return new, den, num * fade + e @ v


class Net(nn.Module):
    """Running softmax over chunks of four keys."""
    def __init__(self, c, bug):
        super().__init__()
        self.bug = bug

    def forward(self, q, k, v, mask, causal):
        r = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(r, 1) for x in (k, v))
        ok = allowed(q, k, mask, causal).expand(q.shape[0], 1, -1, -1)
        q = q / math.sqrt(q.shape[-1])
        state = (q.new_full(q.shape[:3] + (1,), torch.finfo(q.dtype).min), q.new_zeros(q.shape[:3] + (1,)),
                 q.new_zeros(q.shape[:3] + (v.shape[-1],)))
        for kc, vc, oc in zip(k.split(4, 2), v.split(4, 2), ok.split(4, 3)):
            state = merge(state, q @ kc.mT, oc, vc, self.bug)
        return state[2] / state[1].masked_fill(state[1] == 0, 1)


WHAT = 'The online softmax rescales the running numerator when the maximum grows but not the running denominator, so from the second chunk of keys on the weights do not sum to 1.'
PLACE = 'online softmax over key chunks, denominator'


def make(bug):
    return Subject(
        kind="attention",
        build=lambda c: Net(c, bug),
        forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
        mask_forms=("padding",),
    )


right, wrong = make(False), make(True)
