
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


class Attention(nn.Module):
    """Weights as tensors [d, heads, d_head], in the manner of JAX code."""
    def __init__(self, d, h):
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(d, h, d // h) * d ** -0.5) for _ in range(3))
        self.wo = nn.Parameter(torch.randn(h, d // h, d) * d ** -0.5)

    def forward(self, x, ok):
        q, k, v = (torch.einsum("btd,dhk->bhtk", x, w) for w in (self.wq, self.wk, self.wv))
        logits = torch.einsum("bhtk,bhsk->bhts", q * q.shape[-1] ** -0.5, k)
        p = logits.masked_fill(~ok, torch.finfo(logits.dtype).min).softmax(-1).masked_fill(~ok, 0)
        return torch.einsum("bhts,bhsk,hkd->btd", p, v, self.wo)


class Net(nn.Module):
    """CaiT: each branch is multiplied by a learned gain before it is added."""
    def __init__(self, c, bug):
        super().__init__()
        self.bug = bug
        self.n1, self.n2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.attn = Attention(c.d_model, c.num_heads)
        self.fc1, self.fc2 = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.gamma1, self.gamma2 = (nn.Parameter(torch.full((c.d_model,), 0.1)) for _ in range(2))

    def forward(self, x, mask=None):
        a = self.attn(self.n1(x), visible(x, mask))
        x = self.gamma1 * (x + a) if self.bug else x + self.gamma1 * a
        return x + self.gamma2 * self.fc2(F.gelu(self.fc1(self.n2(x))))


WHAT = 'LayerScale multiplies the sum of stream and attention branch instead of the branch alone, so the identity path is scaled down.'
PLACE = 'LayerScale round attention'


def make(bug):
    return Subject(
        kind="layer",
        build=lambda c: Net(c, bug),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        declares={'norm_placement': 'pre', 'residual': True, 'causal': False, 'positions': 'none'},
    )


right, wrong = make(False), make(True)
