
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
    def __init__(self, d, h):
        super().__init__()
        self.h, self.qkv, self.proj = h, nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)

    def forward(self, x, ok):
        B, T, D = x.shape
        q, k, v = self.qkv(x).reshape(B, T, 3, self.h, D // self.h).permute(2, 0, 3, 1, 4)
        ok = ok | ~ok.any(-1, keepdim=True)  # a row without keys takes the mean: finite
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=ok)
        return self.proj(y.transpose(1, 2).reshape(B, T, D))


def drop_path(x, p, training, scale):
    if not training or p == 0:
        return x
    keep = x.new_empty(x.shape[0], 1, 1).bernoulli_(1 - p)
    return x * keep / (1 - p) if scale else x * keep


class Net(nn.Module):
    """Stochastic depth as in timm: the branch is kept with probability 1 - p and divided by it."""
    def __init__(self, c, bug):
        super().__init__()
        self.p, self.scale = c.dropout, not bug
        self.n1, self.n2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.attn = Attention(c.d_model, c.num_heads)
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def forward(self, x, mask=None):
        x = x + drop_path(self.attn(self.n1(x), visible(x, mask)), self.p, self.training, self.scale)
        return x + drop_path(self.down(F.gelu(self.up(self.n2(x)))), self.p, self.training, self.scale)


WHAT = 'Stochastic depth does not divide the kept branches by the share kept, so training and evaluation disagree in expectation.'
PLACE = 'drop path of the layer'


def make(bug):
    return Subject(
        kind="layer",
        build=lambda c: Net(c, bug),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        declares={'drop_path_scaled': True, 'norm_placement': 'pre', 'residual': True, 'causal': False},
    )


right, wrong = make(False), make(True)
