import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

def visible(x, mask, causal=False):
    """[B or 1, 1, T, T], True where query t may see key s."""
    T = x.shape[1]
    ok = torch.ones(1, 1, T, T, dtype=torch.bool, device=x.device)
    ok = ok.tril() if causal else ok
    return ok if mask is None else ok & mask[:, None, None, :]


class Net(nn.Module):
    """Causal, with normalised queries and keys."""
    def __init__(self, c, bug):
        super().__init__()
        self.heads, self.axis = c.num_heads, -2 if bug else -1
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(c.d_model, c.d_model) for _ in range(4))
        self.gq = nn.Parameter(torch.ones(c.num_heads, 1, 1))
        self.gk = nn.Parameter(torch.ones(c.num_heads, 1, 1))

    def unit(self, x):
        return F.normalize(x, dim=self.axis, eps=1e-6) * math.sqrt(x.shape[-1])

    def forward(self, x, mask=None):
        q, k, v = (w(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = self.unit(q) * self.gq, self.unit(k) * self.gk
        ok = visible(x, mask, causal=True)
        s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        p = s.masked_fill(~ok, torch.finfo(s.dtype).min).softmax(-1) * ok
        return self.wo((p @ v).transpose(1, 2).flatten(2))


WHAT = 'Queries and keys are normalised along time instead of along the channels of a head, so later and padded tokens enter earlier outputs.'
PLACE = 'query-key normalisation in self-attention'


def make(bug):
    return Subject(
        kind="self_attention",
        build=lambda c: Net(c, bug),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        declares={'causal': True, 'query_key_norm': True, 'positions': 'none'},
    )


right, wrong = make(False), make(True)
