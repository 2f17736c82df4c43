"""Dropless mixture of experts: tokens sorted by expert, one GEMM per expert (MegaBlocks style)."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class SortedMoE(nn.Module):
    def __init__(self, d, hidden, experts=4, k=2):
        super().__init__()
        self.k, self.experts = k, experts
        self.gate = nn.Linear(d, experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(experts, d, hidden) * d**-0.5)
        self.w2 = nn.Parameter(torch.randn(experts, hidden, d) * hidden**-0.5)

    def route(self, x):
        probs = F.softmax(self.gate(x), dim=-1)
        weight, index = probs.topk(self.k, dim=-1)
        return weight / weight.sum(-1, keepdim=True), index

    def mixture(self, x):
        weight, index = self.route(x)
        return torch.zeros(*x.shape[:-1], self.experts, dtype=x.dtype, device=x.device).scatter(-1, index, weight)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weight, index = self.route(flat)
        order = torch.argsort(index.flatten(), stable=True)
        source = order // self.k
        counts = torch.bincount(index.flatten(), minlength=self.experts).tolist()
        pieces = []
        for e, rows in enumerate(flat[source].split(counts)):
            pieces.append(F.silu(rows @ self.w1[e]) @ self.w2[e])
        y = torch.cat(pieces) * weight.flatten()[order, None]
        return torch.zeros_like(flat).index_add(0, source, y).view_as(x)


subject = Subject(
    kind="feed_forward",
    name="sorted MoE",
    build=lambda c: SortedMoE(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=lambda m, x: m.mixture(x),
    declares={"norm_topk_prob": True},
)
