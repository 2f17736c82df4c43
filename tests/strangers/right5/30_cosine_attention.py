WHAT = "Swin v2: cosine attention with a learned, clamped temperature per head, and a position bias from a small network on log-spaced offsets; biases on queries and values alone, one parameter each"
import math

import torch
from torch import nn
from torch.nn import functional as F


class CosineAttention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.logit_scale = nn.Parameter(torch.full((h, 1, 1), math.log(10.0)))
        self.cpb_mlp = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, h, bias=False))
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.q_bias, self.v_bias = nn.Parameter(torch.zeros(d)), nn.Parameter(torch.zeros(d))
        self.proj = nn.Linear(d, d)

    def forward(self, x, mask=None):
        B, T, D = x.shape
        bias = torch.cat([self.q_bias, torch.zeros_like(self.v_bias), self.v_bias])
        q, k, v = F.linear(x, self.qkv.weight, bias).reshape(B, T, 3, self.h, -1).permute(2, 0, 3, 1, 4).unbind(0)
        s = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        s = s * self.logit_scale.clamp(max=math.log(100.0)).exp()
        far = torch.arange(1 - T, T, device=x.device, dtype=x.dtype)  # j - i
        log = far.sign() * torch.log2(far.abs() + 1.0) / 3.0
        table = 16 * torch.sigmoid(self.cpb_mlp(log[:, None]))
        at = torch.arange(T, device=x.device)
        s = s + table[at[None] - at[:, None] + T - 1].permute(2, 0, 1)
        if mask is not None:
            s = s.masked_fill(~mask[:, None, None], torch.finfo(s.dtype).min)
        return self.proj((s.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D))


from veriformer.properties import Subject


def build(c):
    return CosineAttention(c.d_model, c.num_heads)


def forward(model, x, attention_mask=None):
    return model(x, attention_mask)


undeclared = Subject(kind="self_attention", build=build, forward=forward)
declared = Subject(
    kind="self_attention", name="cosine attention", build=build, forward=forward,
    declares={"causal": False, "query_key_norm": True, "positions": "relative", "bidirectional": True,
              "structure": "other", "padding_side": "both", "beyond_max_len": "works"},
)
