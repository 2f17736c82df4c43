"""A GEGLU feed-forward with one fused input projection and dropout inside."""
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject

class GEGLU(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.w_in, self.w_out = nn.Linear(c.d_model, 2 * c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x):
        value, gate = self.w_in(x).chunk(2, dim=-1)
        return self.w_out(self.drop(value * F.gelu(gate)))

common = dict(kind="feed_forward", build=GEGLU, forward=lambda m, x: m(x))
undeclared = Subject(**common)
declared = Subject(**common, declares={"activation": "other", "bias": True, "residual": False})
