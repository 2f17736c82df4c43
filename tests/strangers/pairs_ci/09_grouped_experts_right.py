"""Mixture of experts as a grouped product: assignments are sorted by expert, each expert takes one run of rows."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class GroupedExperts(nn.Module):
    def __init__(self, d, d_ff, experts=4, k=2):
        super().__init__()
        self.k = k
        self.gate = nn.Linear(d, experts, bias=False)
        self.w_in = nn.Parameter(torch.randn(experts, d, d_ff) * d**-0.5)
        self.w_out = nn.Parameter(torch.randn(experts, d_ff, d) * d_ff**-0.5)

    def route(self, x):
        weight, chosen = self.gate(x).softmax(-1).topk(self.k, -1)
        return weight / weight.sum(-1, keepdim=True), chosen

    def mix(self, x):
        weight, chosen = self.route(x)
        zeros = torch.zeros(*x.shape[:-1], self.w_in.shape[0], dtype=weight.dtype, device=x.device)
        return zeros.scatter(-1, chosen, weight)

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        weight, chosen = self.route(rows)
        order = chosen.flatten().argsort(stable=True)
        token = order // self.k
        sizes = chosen.flatten().bincount(minlength=self.w_in.shape[0]).tolist()
        runs = rows[token].split(sizes)
        done = torch.cat([F.silu(run @ a) @ b for run, a, b in zip(runs, self.w_in, self.w_out)])
        done = done * weight.flatten()[order, None]
        return torch.zeros_like(rows).index_add(0, token, done.to(rows.dtype)).view_as(x)


subject = Subject(
    kind="feed_forward",
    name="grouped experts",
    build=lambda c: GroupedExperts(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=lambda m, x: m.mix(x),
    declares={"activation": "other", "structure": "other", "norm_topk_prob": True},
)
