
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
    def __init__(self, c, bug):
        super().__init__()
        self.h, self.bug = c.num_heads, bug
        self.q, self.k, self.v, self.o = (nn.Linear(c.d_model, c.d_model, bias=False) for _ in range(4))

    def forward(self, x, mask=None):
        q, k, v = (f(x).unflatten(-1, (self.h, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.bug:
            q = q * q.shape[-1] ** -0.5
        ok = visible(x, mask)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=ok | ~ok.any(-1, keepdim=True))
        return self.o(y.transpose(1, 2).flatten(2))


WHAT = 'The queries are scaled by 1/sqrt(d_head) although scaled_dot_product_attention scales too: the scores are divided by d_head.'
PLACE = 'self-attention, scale of the scores'


def make(bug):
    return Subject(
        kind="self_attention",
        build=lambda c: Net(c, bug),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        declares={'attention_scale': '1/sqrt(d_head)', 'bias': False, 'causal': False, 'positions': 'none'},
        projections=lambda m: {n: getattr(m, n).weight for n in "qkvo"},
    )


right, wrong = make(False), make(True)
