
import torch
from torch import nn

from veriformer.properties import Subject

class Net(nn.Module):
    window = 4  # a query sees itself and the three before it

    def __init__(self, c, bug):
        super().__init__()
        self.h, self.reach = c.num_heads, self.window + 1 if bug else self.window
        self.in_proj = nn.Linear(c.d_model, 3 * c.d_model)
        self.out_proj = nn.Linear(c.d_model, c.d_model)

    def forward(self, x, mask=None):
        B, T, D = x.shape
        q, k, v = self.in_proj(x).reshape(B, T, 3, self.h, -1).permute(2, 0, 3, 1, 4)
        i = torch.arange(T, device=x.device)
        gap = i[:, None] - i
        ok = ((gap >= 0) & (gap < self.reach))[None, None]
        if mask is not None:
            ok = ok & mask[:, None, None]
        s = q @ k.mT * q.shape[-1] ** -0.5
        p = s.masked_fill(~ok, torch.finfo(s.dtype).min).softmax(-1) * ok
        return self.out_proj((p @ v).transpose(1, 2).reshape(B, T, D))


WHAT = 'The sliding window reaches one key too far back: a query sees 5 keys where the window is 4.'
PLACE = 'sliding-window mask of self-attention'


def make(bug):
    return Subject(
        kind="self_attention",
        build=lambda c: Net(c, bug),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        declares={'causal': True, 'window': 4, 'positions': 'none'},
    )


right, wrong = make(False), make(True)
