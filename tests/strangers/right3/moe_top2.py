"""A mixture-of-experts feed-forward: top-2 routing without capacity, weights renormalised, loop over experts."""
import torch
from torch import nn
from veriformer.properties import Subject

class MoE(nn.Module):
    def __init__(self, c, n=4, k=2):
        super().__init__()
        self.router, self.k = nn.Linear(c.d_model, n, bias=False), k
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.SiLU(), nn.Linear(c.d_ff, c.d_model)) for _ in range(n))

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        gate, idx = self.router(flat).topk(self.k, dim=-1)
        gate, out = gate.softmax(-1), torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            row, slot = (idx == e).nonzero(as_tuple=True)
            out = out.index_add(0, row, expert(flat[row]) * gate[row, slot, None])
        return out.view_as(x)

common = dict(kind="feed_forward", build=MoE, forward=lambda m, x: m(x))
undeclared = Subject(**common)
declared = Subject(**common, declares={"activation": "other", "structure": "other", "residual": False})
