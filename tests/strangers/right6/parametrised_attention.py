"""Causal self-attention, every projection parametrised (unit columns times a gain), masks of two shapes."""
import torch
from torch import nn
from torch.nn.utils import parametrize

from veriformer.properties import DrawnConfig, Subject


class UnitColumns(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.log_gain = nn.Parameter(torch.zeros(n))

    def forward(self, w):
        return w / w.norm(dim=0, keepdim=True).clamp_min(1e-12) * self.log_gain.exp()


class Attention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        for name in ("to_q", "to_k", "to_v", "to_out"):
            lin = nn.Linear(d, d, bias=name == "to_out")
            parametrize.register_parametrization(lin, "weight", UnitColumns(d))
            setattr(self, name, lin)

    def probabilities(self, x, mask):
        b, t, _ = x.shape
        q, k = (f(x).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.to_q, self.to_k))
        sim = torch.matmul(q, k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        see = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()[None]
        if mask is not None:
            m = mask.bool()
            m = m[:, None, :] if m.dim() == 2 else m
            see = see & m
        see = see[:, None]
        sim = sim.masked_fill(~see, -torch.inf)
        sim = sim - sim.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(sim.dtype).min)
        e = sim.exp()
        return e / e.sum(-1, keepdim=True).clamp_min(torch.finfo(sim.dtype).tiny)

    def forward(self, x, mask=None):
        b, t, d = x.shape
        p = self.probabilities(x, mask)
        v = self.to_v(x).view(b, t, self.heads, -1).transpose(1, 2)
        return self.to_out((p @ v).transpose(1, 2).reshape(b, t, d))


def build(c: DrawnConfig):
    return Attention(c.d_model, c.num_heads)


def forward(model, x, attention_mask=None):
    return model(x, attention_mask)


declared = Subject(
    kind="self_attention", name="parametrised attention", build=build, forward=forward,
    weights=lambda model, x, attention_mask=None: model.probabilities(x, attention_mask),
    declares={
        "causal": True, "positions": "none", "attention_scale": "1/sqrt(d_head)", "padding_side": "both",
        "residual": False, "sink": False,
    },
)
undeclared = Subject(kind="self_attention", build=build, forward=forward)
