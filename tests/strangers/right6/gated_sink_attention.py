"""Self-attention with a learned sink in each head's softmax and a sigmoid gate on each head's output."""
import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject


class GatedSinkAttention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q, self.k, self.v, self.gate = (nn.Linear(d, d) for _ in range(4))
        self.o = nn.Linear(d, d)
        self.sinks = nn.Parameter(torch.randn(h))

    def heads(self, x):
        return x.unflatten(2, (self.h, -1)).movedim(2, 1)

    def weights(self, x, real):
        q, k = self.heads(self.q(x)), self.heads(self.k(x))
        logits = q @ k.mT * q.shape[-1] ** -0.5
        if real is not None:
            logits = logits.masked_fill(~real[:, None, None], -torch.inf)
        sink = self.sinks.view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        return torch.cat([logits, sink], -1).softmax(-1)[..., :-1]

    def forward(self, x, real=None):
        y = self.weights(x, real) @ self.heads(self.v(x))
        y = y * self.heads(self.gate(x)).sigmoid()
        return self.o(y.movedim(1, 2).flatten(2))


def build(c: DrawnConfig):
    return GatedSinkAttention(c.d_model, c.num_heads)


def forward(model, x, attention_mask=None):
    return model(x, None if attention_mask is None else attention_mask.bool())


def weights(model, x, attention_mask=None):
    return model.weights(x, None if attention_mask is None else attention_mask.bool())


declared = Subject(
    kind="self_attention", name="gates and sinks", build=build, forward=forward, weights=weights,
    declares={
        "causal": False, "positions": "none", "sink": True, "bias": True, "attention_scale": "1/sqrt(d_head)",
        "padding_side": "both", "residual": False, "structure": "other",
    },
)
undeclared = Subject(kind="self_attention", build=build, forward=forward)
