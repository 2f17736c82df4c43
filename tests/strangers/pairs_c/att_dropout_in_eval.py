
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

def allowed(q, k, mask, causal):
    T, S = q.shape[-2], k.shape[-2]
    ok = torch.ones(1, 1, T, S, dtype=torch.bool, device=q.device)
    ok = ok.tril(S - T) if causal else ok
    return ok if mask is None else ok & mask[:, None, None, :]


class Net(nn.Module):
    def __init__(self, c, bug):
        super().__init__()
        self.p, self.bug = c.dropout, bug

    def forward(self, q, k, v, mask, causal):
        ok = allowed(q, k, mask, causal)
        ok = ok | ~ok.any(-1, keepdim=True)
        p = self.p if self.training or self.bug else 0.0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=ok, dropout_p=p, enable_gqa=q.shape[1] != k.shape[1])


WHAT = 'dropout_p is handed to scaled_dot_product_attention unconditionally, so attention dropout stays on in eval mode.'
PLACE = 'attention dropout'


def make(bug):
    return Subject(
        kind="attention",
        build=lambda c: Net(c, bug),
        forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
        mask_forms=("padding",),
    )


right, wrong = make(False), make(True)
