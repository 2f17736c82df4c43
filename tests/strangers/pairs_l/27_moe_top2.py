"""Mixture of experts with two experts a token, after Switch/GShard; no capacity, nothing is dropped."""

import torch
from torch import nn

from veriformer.properties import Subject


def moe(gather):
    class Expert(nn.Module):
        def __init__(self, d_model, d_ff):
            super().__init__()
            self.w1, self.w2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

        def forward(self, x):
            return self.w2(torch.relu(self.w1(x)))

    class MoE(nn.Module):
        def __init__(self, d_model, d_ff, num_experts=4, k=2):
            super().__init__()
            self.k = k
            self.gate = nn.Linear(d_model, num_experts, bias=False)
            self.experts = nn.ModuleList(Expert(d_model, d_ff) for _ in range(num_experts))

        def route(self, x):
            top, index = self.gate(x).topk(self.k, dim=-1)
            return torch.zeros_like(self.gate(x)).scatter(-1, index, top.softmax(-1))

        def forward(self, x):
            flat = x.reshape(-1, x.shape[-1])
            weights = self.route(flat)
            out = torch.zeros_like(flat)
            for e, expert in enumerate(self.experts):
                rows = weights[:, e].nonzero().squeeze(-1)
                out = gather(out, rows, weights[rows, e, None] * expert(flat[rows]))
            return out.view_as(x)

    return MoE


def add(out, rows, y):
    return out.index_add(0, rows, y)


def put(out, rows, y):
    return out.index_copy(0, rows, y)


def subject(cls):
    return Subject(
        kind="feed_forward",
        name="top-2 experts",
        build=lambda c: cls(c.d_model, c.d_ff),
        forward=lambda m, x: m(x),
        router=lambda m, x: m.route(x),
        declares={"norm_topk_prob": True},
    )


right = subject(moe(add))
wrong = subject(moe(put))
WHAT = "out[rows] = y instead of += : of a token's two experts the later overwrites the earlier"
CAUSE = (
    "What the second expert of a token gives overwrites the first instead of being added: the output is one weighted expert, "
    "not the weighted sum of both, and the other expert gets no gradient."
)
