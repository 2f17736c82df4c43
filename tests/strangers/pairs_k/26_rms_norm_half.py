"""T5's RMSNorm, meant for mixed precision."""

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "The square is taken before the upcast: float16 activations beyond 255 overflow in it."
CAUSE = "In float16 large inputs overflow: squares are computed in half precision and only their mean in float32."


def first_wide(x, wide):
    return x.to(wide).pow(2).mean(-1, keepdim=True)


def then_wide(x, wide):
    return x.pow(2).to(wide).mean(-1, keepdim=True)


def make(mean_square):
    class T5LayerNorm(nn.Module):
        def __init__(self, hidden_size, eps=1e-6):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(hidden_size))
            self.variance_epsilon = eps

        def forward(self, hidden_states):
            wide = torch.float64 if hidden_states.dtype == torch.float64 else torch.float32
            variance = mean_square(hidden_states, wide)
            normed = hidden_states.to(wide) * torch.rsqrt(variance + self.variance_epsilon)
            return self.weight * normed.to(hidden_states.dtype)

    return T5LayerNorm


def subject(mean_square):
    norm = make(mean_square)
    return Subject(
        kind="norm",
        name="T5LayerNorm",
        build=lambda c: norm(c.d_model),
        forward=lambda m, x: m(x),
        declares={"norm": "rms", "half_precision": True},
    )


right = subject(first_wide)
wrong = subject(then_wide)
