"""A mixture of four experts, two for each token; their weights are positive and sum to one."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class Mixture(nn.Module):
    def __init__(self, c, bad, experts=4, k=2):
        super().__init__()
        self.gate = nn.Linear(c.d_model, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.ReLU(), nn.Linear(c.d_ff, c.d_model)) for _ in range(experts))
        self.k, self.bad = k, bad

    def forward(self, x):
        flat = x.reshape(-1, x.size(-1))
        scores, index = self.gate(flat).topk(self.k, -1)
        weights = scores.softmax(-1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows, slot = torch.where(index == i)
            part = weights[rows, slot].unsqueeze(-1) * expert(flat[rows])
            if self.bad:
                out[rows] = part
            else:
                out = out.index_add(0, rows, part)
        return out.view_as(x)


def subject(bad):
    return Subject(kind="feed_forward", build=lambda c: Mixture(c, bad), forward=lambda m, x: m(x))


right, wrong = subject(False), subject(True)
WHAT = "An expert's contribution overwrites that of the token's other expert instead of being added, so that one of the two is lost and the weights that count no longer sum to one."
PLACE = "mixture of experts (combining the experts' outputs)"
