WHAT = 'when the adapters are merged into the fused qkv weight, the delta of v is added to the rows of k (the zeros come behind it): merged and unmerged model differ (line 45).'
import contextlib
import torch
import torch.nn as nn
import torch.nn.functional as F
from veriformer.properties import Subject

MERGED = False


@contextlib.contextmanager
def mode(merged):
    global MERGED
    before, MERGED = MERGED, merged
    try:
        yield
    finally:
        MERGED = before


class Lora(nn.Module):
    def __init__(self, d, rank=2, alpha=4.0):
        super().__init__()
        self.A = nn.Parameter(torch.randn(rank, d) * d ** -0.5)
        self.B = nn.Parameter(torch.randn(d, rank) * 0.3)  # as after some training
        self.scale = alpha / rank

    def forward(self, x):
        return F.linear(F.linear(x, self.A), self.B) * self.scale

    def delta(self):
        return self.B @ self.A * self.scale


class SelfAttention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h, self.d = h, d
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.lora_q, self.lora_v = Lora(d), Lora(d)

    def project(self, x):
        if MERGED:
            dq, dv = self.lora_q.delta(), self.lora_v.delta()
            delta = torch.cat([dq, dv, torch.zeros_like(dv)])
            return F.linear(x, self.qkv.weight + delta, self.qkv.bias).chunk(3, -1)
        q, k, v = self.qkv(x).chunk(3, -1)
        return q + self.lora_q(x), k, v + self.lora_v(x)

    def forward(self, x, attention_mask=None):
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.h, d // self.h).transpose(1, 2) for y in self.project(x))
        s = q @ k.transpose(-2, -1) / (d // self.h) ** 0.5
        if attention_mask is not None:
            s = s.masked_fill(~attention_mask[:, None, None, :], torch.finfo(s.dtype).min)
        return self.proj((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))


subject = Subject(
    kind="self_attention",
    build=lambda c: SelfAttention(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    backends={"adapters": lambda: mode(False), "merged": lambda: mode(True)},
    mask_forms=("padding",),
    declares={"causal": False, "positions": "none", "attention_scale": "1/sqrt(d_head)", "structure": "other",
              "bias": True},
)
