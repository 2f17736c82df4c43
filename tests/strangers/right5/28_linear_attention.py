WHAT = "causal linear attention (elu + 1 features, running sums over chunks of 4): no softmax, no scale, no T x T matrix"
import torch
from torch import nn
from torch.nn import functional as F

CHUNK = 4


class LinearAttention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x, mask=None):
        B, T, D = x.shape
        q, k, v = (f(x).view(B, T, self.h, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        if mask is not None:
            k = k * mask[:, None, :, None].to(k.dtype)
        sum_kv = x.new_zeros(B, self.h, D // self.h, D // self.h)
        sum_k = x.new_zeros(B, self.h, D // self.h)
        out = []
        for a, b, c in zip(q.split(CHUNK, 2), k.split(CHUNK, 2), v.split(CHUNK, 2)):
            w = (a @ b.mT).tril()
            top = a @ sum_kv + w @ c
            below = (a * sum_k[:, :, None]).sum(-1) + w.sum(-1)
            out.append(top / below.masked_fill(below == 0, 1.0)[..., None])
            sum_kv, sum_k = sum_kv + b.mT @ c, sum_k + b.sum(2)
        return self.o(torch.cat(out, 2).transpose(1, 2).reshape(B, T, D))


from veriformer.properties import Subject


def build(c):
    return LinearAttention(c.d_model, c.num_heads)


def forward(model, x, attention_mask=None):
    return model(x, attention_mask)


undeclared = Subject(kind="self_attention", build=build, forward=forward)
declared = Subject(
    kind="self_attention", name="linear attention", build=build, forward=forward,
    declares={"causal": True, "positions": "none", "bias": True, "memory": "linear", "padding_side": "both"},
)
