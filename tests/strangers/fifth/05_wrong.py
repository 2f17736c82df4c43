"""SwiGLU feed-forward with the two input projections packed into one matrix, as in xFormers."""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class SwiGLU(nn.Module):
    def __init__(
        self, in_features: int, hidden_features: int, out_features: Optional[int] = None, bias: bool = True
    ) -> None:
        super().__init__()
        out_features = out_features or in_features
        self.w12 = nn.Linear(in_features, 2 * hidden_features, bias=bias)
        self.w3 = nn.Linear(hidden_features, out_features, bias=bias)
        self.hidden_features = hidden_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.glu(self.w12(x), dim=-1)
        return self.w3(hidden)


subject = Subject(
    kind="feed_forward",
    name="packed SwiGLU",
    build=lambda c: SwiGLU(c.d_model, c.d_ff, bias=False),
    forward=lambda m, x: m(x),
    declares={"activation": "swiglu", "bias": False, "init": "default"},
)
