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
    """Gemma-2 style: scores = 5 * tanh(q k^T / sqrt(d_head) / 5), then the mask."""
    cap = 5.0

    def __init__(self, c, bug):
        super().__init__()
        self.bug = bug

    def forward(self, q, k, v, mask, causal):
        r = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(r, 1), v.repeat_interleave(r, 1)
        ok = allowed(q, k, mask, causal)
        scale = 1 / math.sqrt(q.shape[-1])
        s = q @ k.transpose(-1, -2)
        if self.bug:
            s = self.cap * torch.tanh(s / self.cap) * scale
        else:
            s = self.cap * torch.tanh(s * scale / self.cap)
        w = s.masked_fill(~ok, torch.finfo(s.dtype).min).softmax(-1) * ok
        return w @ v


WHAT = 'The soft cap is put on the unscaled scores and the scale follows after it, so scores saturate at cap/sqrt(d_head) instead of cap.'
PLACE = 'soft cap of the attention scores'


def make(bug):
    return Subject(
        kind="attention",
        build=lambda c: Net(c, bug),
        forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
        mask_forms=("padding",),
        declares={'soft_cap': 5.0, 'empty_row': 'zeros'},
    )


right, wrong = make(False), make(True)
