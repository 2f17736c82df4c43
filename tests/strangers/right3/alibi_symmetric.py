"""ALiBi for encoders: minus slope times absolute distance; head counts that are powers of two."""
import torch
from torch import nn
from veriformer.properties import Subject

class Alibi(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.num_heads
        self.dummy = nn.Buffer(torch.zeros(()))

    def forward(self, T, S):
        step = torch.arange(1, self.heads + 1, dtype=self.dummy.dtype, device=self.dummy.device)
        m = torch.exp2(-8.0 * step / self.heads)
        gap = torch.arange(S, device=m.device)[None, :] - torch.arange(T, device=m.device)[:, None]
        return -m.view(-1, 1, 1) * gap.abs().to(m.dtype)

common = dict(kind="position_bias", build=Alibi, forward=lambda m, q, k: m(q, k), domain={"num_heads": [1, 2, 4]})
undeclared = Subject(**common)
declared = Subject(**common, declares={"positions": "alibi"})
