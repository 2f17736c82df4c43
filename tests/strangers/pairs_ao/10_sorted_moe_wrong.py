WHAT = "the rows are sorted by expert but their router weights are not: they stay in token order, so experts are mixed with the weights of others and of other tokens (line 32)."
"""Mixture of SwiGLU experts, top-2: tokens are sorted by expert, so that each expert runs once on a dense slice."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class SortedMoE(nn.Module):
    def __init__(self, d_model, d_ff, num_experts=4, top_k=2):
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.gate = nn.Linear(d_model, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, 2 * d_ff, d_model) * d_model**-0.5)
        self.down = nn.Parameter(torch.randn(num_experts, d_model, d_ff) * d_ff**-0.5)

    def route(self, flat):
        share, expert = self.gate(flat).softmax(-1).topk(self.top_k, dim=-1)
        return share / share.sum(-1, keepdim=True), expert

    def dense_routing(self, x):
        share, expert = self.route(x)
        return torch.zeros(*x.shape[:-1], self.num_experts, dtype=x.dtype, device=x.device).scatter(-1, expert, share)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        share, expert = self.route(flat)
        order = expert.flatten().argsort(stable=True)
        token = order // self.top_k
        share = share.flatten()
        sizes = torch.bincount(expert.flatten(), minlength=self.num_experts).tolist()
        done = []
        for rows, up, down in zip(flat[token].split(sizes), self.up, self.down, strict=True):
            gate, value = F.linear(rows, up).chunk(2, dim=-1)
            done.append(F.linear(F.silu(gate) * value, down))
        return torch.zeros_like(flat).index_add(0, token, torch.cat(done) * share[:, None]).view_as(x)


subject = Subject(
    kind="feed_forward",
    name="sorted mixture of experts",
    build=lambda c: SortedMoE(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=lambda m, x: m.dense_routing(x),
    declares={"activation": "swiglu", "bias": False, "norm_topk_prob": True, "structure": "other"},
)
