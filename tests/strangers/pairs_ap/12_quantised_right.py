"""W8A8: weights in int8 by output channel, activations in int8 with a scale found as they come (fake quantisation)."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def fake_quant(x, scale):
    """Rounded to int8 steps of `scale`; gradients pass straight through."""
    scale = scale.detach()
    rounded = (x.detach() / scale).round().clamp(-127, 127) * scale
    return x + (rounded - x.detach())


class QLinear(nn.Linear):
    def forward(self, x):
        w_scale = self.weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-8) / 127
        x_scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-8) / 127
        return F.linear(fake_quant(x, x_scale), fake_quant(self.weight, w_scale), self.bias)


class QBlock(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.h = h
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.wqkv, self.wo = QLinear(d, 3 * d), QLinear(d, d)
        self.w1, self.w2 = QLinear(d, f), QLinear(f, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.wqkv(self.n1(x)).reshape(b, t, 3, self.h, d // self.h).unbind(2)
        s = torch.einsum("bihc,bjhc->bhij", q, k) / (d // self.h) ** 0.5
        s = s + torch.full((t, t), float("-inf"), dtype=s.dtype, device=s.device).triu(1)
        x = x + self.wo(torch.einsum("bhij,bjhc->bihc", s.softmax(-1), v).reshape(b, t, d))
        return x + self.w2(F.gelu(self.w1(self.n2(x))))


class QGPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok, self.pos = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.Sequential(*[QBlock(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens):
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


subject = Subject(
    kind="decoder",
    name="W8A8",
    build=QGPT,
    forward=lambda model, tokens: model(tokens),
    declares={
        "causal": True,
        "quantised": True,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "bias": True,
        "output_bias": False,
    },
)
