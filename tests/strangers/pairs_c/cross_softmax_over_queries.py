
import torch
from torch import nn

from veriformer.properties import Subject

class Net(nn.Module):
    def __init__(self, c, bug):
        super().__init__()
        d, h = c.d_model, c.num_heads
        self.axis = 2 if bug else 3
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(d, h, d // h) / d ** 0.5) for _ in range(3))
        self.wo = nn.Parameter(torch.randn(h, d // h, d) / d ** 0.5)

    def forward(self, x, memory, memory_mask=None):
        q = torch.einsum("btd,dhk->bhtk", x, self.wq)
        k, v = (torch.einsum("bsd,dhk->bhsk", memory, w) for w in (self.wk, self.wv))
        a = torch.einsum("bhtk,bhsk->bhts", q, k) * q.shape[-1] ** -0.5
        ok = torch.ones_like(a, dtype=torch.bool)
        if memory_mask is not None:
            ok = ok & memory_mask[:, None, None, :]
        a = a.masked_fill(~ok, torch.finfo(a.dtype).min).softmax(self.axis) * ok
        return torch.einsum("bhts,bhsk,hkd->btd", a, v, self.wo)


WHAT = 'The softmax of cross-attention runs over the queries instead of over the memory, so outputs of different queries influence one another.'
PLACE = 'cross-attention, axis of the softmax'


def make(bug):
    return Subject(
        kind="cross_attention",
        build=lambda c: Net(c, bug),
        forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    )


right, wrong = make(False), make(True)
