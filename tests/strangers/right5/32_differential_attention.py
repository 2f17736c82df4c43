WHAT = "differential attention: the difference of two softmaxes (weights may be negative, rows do not sum to 1), an RMSNorm per head behind it, lambda learned as two exponentials of inner products"
import math

import torch
from torch import nn


class DiffAttention(nn.Module):
    def __init__(self, d, h, depth=1):
        super().__init__()
        self.h, self.K = h, d // h
        self.start = 0.8 - 0.6 * math.exp(-0.3 * depth)
        self.qk, self.v, self.o = nn.Linear(d, 4 * d, bias=False), nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.lam = nn.Parameter(torch.randn(4, self.K) * 0.1)
        self.subln = nn.RMSNorm(self.K, eps=1e-5)

    def forward(self, x, mask=None):
        B, T, D = x.shape
        q, k = self.qk(x).view(B, T, 2, self.h, 2, self.K).permute(2, 0, 3, 4, 1, 5)  # [B, h, 2, T, K]
        v = self.v(x).view(B, T, self.h, self.K).transpose(1, 2)
        seen = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        if mask is not None:
            seen = seen & mask[:, None, None, None]
        s = (q @ k.mT * self.K**-0.5).masked_fill(~seen, torch.finfo(x.dtype).min)
        one, two = s.softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype).unbind(2)
        a, b, c, d = self.lam
        lam = (a @ b).exp() - (c @ d).exp() + self.start
        y = self.subln((one - lam * two) @ v) * (1 - self.start)
        return self.o(y.transpose(1, 2).reshape(B, T, D))


from veriformer.properties import Subject


def build(c):
    return DiffAttention(c.d_model, c.num_heads)


def forward(model, x, attention_mask=None):
    return model(x, attention_mask)


undeclared = Subject(kind="self_attention", build=build, forward=forward)
declared = Subject(
    kind="self_attention", name="differential attention", build=build, forward=forward,
    declares={"causal": True, "positions": "none", "bias": False, "structure": "other", "padding_side": "both"},
)
