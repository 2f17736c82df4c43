
import torch
from torch import nn

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
        self.to_qkv = nn.Linear(c.d_model, 3 * c.d_model)
        self.to_out = nn.Linear(c.d_model, c.d_model)

    def forward(self, x, mask=None):
        B, T, D = x.shape
        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        q, k, v = (y.reshape(B, T, self.h, D // self.h).transpose(1, 2) for y in (q, k, v))
        ok = visible(x, mask)
        dots = (q @ k.transpose(2, 3)) * (D // self.h) ** -0.5
        out = (dots.masked_fill(~ok, torch.finfo(dots.dtype).min).softmax(dim=-1) * ok) @ v
        if not self.bug:
            out = out.transpose(1, 2)
        return self.to_out(out.reshape(B, T, D))


WHAT = 'The heads are merged by a reshape without transposing back, which mixes time steps and heads in the output.'
PLACE = 'self-attention, merging of the heads'


def make(bug):
    return Subject(
        kind="self_attention",
        build=lambda c: Net(c, bug),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    )


right, wrong = make(False), make(True)
