
import torch
from torch import nn

from veriformer.properties import Subject

class Net(nn.Module):
    def __init__(self, c, bug):
        super().__init__()
        self.bug = bug

    def forward(self, q, k, v, mask, causal):
        bias = q.new_zeros(1, 1, q.shape[2], k.shape[2])
        low = torch.finfo(q.dtype).min
        if mask is not None:
            bias = bias.masked_fill(~mask[:, None, None, :], low)
        if causal and not (self.bug and mask is not None):
            future = torch.ones_like(bias[:1, :1], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
            bias = bias.masked_fill(future, low)
        r = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(r, 1), v.repeat_interleave(r, 1)
        s = torch.where(bias == 0, torch.einsum("bhtk,bhsk->bhts", q, k) * q.shape[-1] ** -0.5, bias)
        return torch.einsum("bhts,bhse->bhte", s.softmax(-1) * (bias == 0), v)


WHAT = 'causal=True is ignored when an attention_mask is given too: the two masks are alternatives instead of being combined.'
PLACE = 'attention kernel, combination of the causal flag and the padding mask'


def make(bug):
    return Subject(
        kind="attention",
        build=lambda c: Net(c, bug),
        forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
        mask_forms=("padding",),
    )


right, wrong = make(False), make(True)
