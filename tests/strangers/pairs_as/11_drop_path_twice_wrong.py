WHAT = "stochastic depth mixes both conventions: it divides by the share kept in training and also multiplies by it in evaluation, so that evaluation's branches are too small (line 14)."
import torch
import torch.nn as nn
from veriformer.properties import Subject


class DropPath(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.keep = 1.0 - drop

    def forward(self, x):
        if not self.training:
            return x * self.keep
        if self.keep == 1.0:
            return x
        gate = torch.rand(x.shape[0], 1, 1, device=x.device) < self.keep
        return x * gate.to(x.dtype) / self.keep

    def extra_repr(self):
        return f"keep={self.keep}"


class Layer(nn.Module):
    def __init__(self, d, h, f, drop):
        super().__init__()
        self.h = h
        self.norm1 = nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.norm2 = nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, f), nn.GELU(), nn.Linear(f, d))
        self.drop_path = DropPath(drop)

    def attention(self, x, mask):
        b, t, d = x.shape
        q, k, v = (m(x).view(b, t, self.h, d // self.h).transpose(1, 2) for m in (self.q, self.k, self.v))
        s = q @ k.mT * (d // self.h) ** -0.5
        if mask is not None:
            s = s.masked_fill(~mask[:, None, None, :], torch.finfo(s.dtype).min)
        return self.o((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))

    def forward(self, x, mask=None):
        x = x + self.drop_path(self.attention(self.norm1(x), mask))
        return x + self.drop_path(self.mlp(self.norm2(x)))


subject = Subject(
    kind="layer",
    build=lambda c: Layer(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    mask_forms=("padding",),
    declares={"causal": False, "positions": "none", "norm": "layer", "norm_placement": "pre", "residual": True,
              "activation": "gelu", "bias": True, "drop_path_scaled": True},
)
